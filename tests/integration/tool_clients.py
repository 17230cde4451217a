"""Conversations with tools by the unmodified clients of OpenAI and Anthropic, in one form for both.

What the client gives for an answer goes back to it as it is, as a program would do it; only messages of the user and
results are made here.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import anthropic
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.integration.tool_sets import Function

ALL_TOKENS = 400
"""Most tokens of an answer that is calls."""
FEW_TOKENS = 16
"""Most tokens of an answer that is text."""


class Call(NamedTuple):
    name: str
    arguments: str
    """JSON."""


class Answer(NamedTuple):
    calls: tuple[Call, ...]
    text: str
    finish: str
    """OpenAI's word for it: `stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    call_ids: tuple[str, ...]
    message: Any
    """The answer as the client has it, to go back in the next request."""

    @property
    def said(self) -> tuple[object, ...]:
        """What the model wrote, and how much it had read: the same for the same request, whatever the client."""
        calls = [(call.name, json.loads(call.arguments)) for call in self.calls]
        return calls, self.text, self.finish, self.prompt_tokens


class Wish(NamedTuple):
    """What a request wants of its answer."""

    functions: tuple[Function, ...]
    has_call: bool
    """Whether calls are demanded; else the answer is text alone, the likeliest."""
    name: str | None = None
    """Function that must be called; None: any."""
    is_parallel: bool = False
    """Whether there may be several calls."""
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        return ALL_TOKENS if self.has_call else FEW_TOKENS

    @property
    def temperature(self) -> float:
        return 0.8 if self.has_call else 0.0


OnPart = Callable[[str], None]
"""Called with the id of the replica that answers, behind each part of arguments in a stream."""


class Client(Protocol):
    def asked(self, text: str) -> list[Any]:
        """Messages in which the user says the text."""
        ...

    def told(self, answer: Answer, result: str) -> list[Any]:
        """Messages that repeat the answer, and tell the result of each of its calls; of an answer without calls, only
        the answer."""
        ...

    def whole(self, messages: list[Any], wish: Wish) -> Answer: ...

    def streamed(self, messages: list[Any], wish: Wish, on_part: OnPart) -> Answer: ...


class OpenAIClient:
    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def asked(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def told(self, answer: Answer, result: str) -> list[Any]:
        results = [{"role": "tool", "tool_call_id": call_id, "content": result} for call_id in answer.call_ids]
        return [answer.message, *results]

    def whole(self, messages: list[Any], wish: Wish) -> Answer:
        return _of_completion(self._client.chat.completions.create(**self._fields(messages, wish)))

    def streamed(self, messages: list[Any], wish: Wish, on_part: OnPart) -> Answer:
        fields = self._fields(messages, wish) | {"stream": True, "stream_options": {"include_usage": True}}
        state: Any = ChatCompletionStreamState(input_tools=fields["tools"] if wish.has_call else ())
        with self._client.chat.completions.create(**fields) as stream:
            replica = stream.response.headers["x-penstock-replica"]
            for chunk in stream:
                state.handle_chunk(chunk)
                for _ in _parts_of(chunk):
                    on_part(replica)
        # where a call is demanded, this client reads its arguments too; it raises for any answer that is cut off
        return _of_completion(state.get_final_completion() if wish.has_call else state.current_completion_snapshot)

    def _fields(self, messages: list[Any], wish: Wish) -> dict[str, Any]:
        tools = [{"type": "function", "function": {**each._asdict(), "strict": True}} for each in wish.functions]
        choice: Any = "none"
        if wish.has_call:
            choice = {"type": "function", "function": {"name": wish.name}} if wish.name else "required"
        return {
            "model": "demo",
            "messages": messages,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": wish.is_parallel,
            "max_tokens": wish.max_tokens,
            "temperature": wish.temperature,
            "seed": wish.seed,
        }


def _parts_of(chunk: Any) -> list[str]:
    """Parts of arguments in a chunk."""
    return [call.function.arguments for choice in chunk.choices for call in choice.delta.tool_calls or ()]


def _of_completion(completion: Any) -> Answer:
    (choice,) = completion.choices
    calls = choice.message.tool_calls or []
    return Answer(
        tuple(Call(call.function.name, call.function.arguments) for call in calls),
        choice.message.content or "",
        choice.finish_reason,
        completion.usage.prompt_tokens,
        tuple(call.id for call in calls),
        choice.message,
    )


_FINISHES = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


class AnthropicClient:
    def __init__(self, client: anthropic.Anthropic) -> None:
        self._client = client

    def asked(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def told(self, answer: Answer, result: str) -> list[Any]:
        results = [{"type": "tool_result", "tool_use_id": call_id, "content": result} for call_id in answer.call_ids]
        said = {"role": "assistant", "content": answer.message.content}
        return [said, {"role": "user", "content": results}] if results else [said]

    def whole(self, messages: list[Any], wish: Wish) -> Answer:
        message = self._client.messages.create(**self._fields(messages, wish))
        inputs = [json.dumps(block.input) for block in message.content if block.type == "tool_use"]
        return _of_message(message, inputs)

    def streamed(self, messages: list[Any], wish: Wish, on_part: OnPart) -> Answer:
        inputs: dict[int, str] = {}  # as they came: the client itself also reads JSON that is cut off
        with self._client.messages.stream(**self._fields(messages, wish)) as stream:
            replica = stream.response.headers["x-penstock-replica"]
            for event in stream:
                if event.type == "content_block_start" and event.content_block.type == "tool_use":
                    inputs[event.index] = ""
                elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    inputs[event.index] += event.delta.partial_json
                    on_part(replica)
            message = stream.get_final_message()
        for index, text in inputs.items():
            block = message.content[index]
            assert block.type == "tool_use"
            assert block.input == json.loads(text or "{}")
        return _of_message(message, [json.dumps(json.loads(text or "{}")) for text in inputs.values()])

    def _fields(self, messages: list[Any], wish: Wish) -> dict[str, Any]:
        tools = [
            {"name": each.name, "description": each.description, "input_schema": each.parameters}
            for each in wish.functions
        ]
        choice: dict[str, Any] = {"type": "none"}
        if wish.has_call:
            choice = {"type": "tool", "name": wish.name} if wish.name else {"type": "any"}
            choice["disable_parallel_tool_use"] = not wish.is_parallel
        return {
            "model": "demo",
            "messages": messages,
            "tools": tools,
            "tool_choice": choice,
            "max_tokens": wish.max_tokens,
            "extra_body": {"temperature": wish.temperature, "seed": wish.seed},  # this client has no names for them
        }


def _of_message(message: Any, inputs: Sequence[str]) -> Answer:
    calls = [block for block in message.content if block.type == "tool_use"]
    return Answer(
        tuple(Call(call.name, text) for call, text in zip(calls, inputs, strict=True)),
        "".join(block.text for block in message.content if block.type == "text"),
        _FINISHES[message.stop_reason],
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
        tuple(call.id for call in calls),
        message,
    )
