"""Answers of /v1/messages: Anthropic's JSON, whole and as the events of a stream. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.router.completions.formats import FinishedCall, FinishedChoice, ResponseMeta
from penstock.router.completions.text_assembly import TextPiece
from penstock.router.dialects.blocks import Begin, Blocks, Part, Step
from penstock.router.dialects.stream import named_event
from penstock.router.routing.request import Receipt
from penstock.wire.anthropic import Message, MessageUsage, StopReason, TextOut, ToolUseOut, messages_error
from penstock.wire.openai import FinishReason, Usage

_REASONS: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_PING = named_event("ping", {"type": "ping"})


class MessageFormat:
    """One answer."""

    def __init__(self, meta: ResponseMeta) -> None:
        self.meta = meta
        self._blocks = Blocks()
        self._index = 0
        """Index of the block that is open, or of the next one."""
        self._is_text = True
        self._stop_reason: StopReason = "end_turn"
        self._stop_sequence: str | None = None

    def set_answering_model(self, receipt: Receipt) -> None:
        self.meta = self.meta.with_answering_model(receipt)

    def whole(self, choices: Iterable[FinishedChoice], usage: Usage) -> Iterator[bytes]:
        for choice in choices:
            texts = [TextOut(text=choice.text)] if choice.text else []
            message = Message(
                id=self.meta.id,
                model=self.meta.model,
                content=[*texts, *map(_tool_use, choice.calls)],
                stop_reason=_reason(choice.finish, choice.stop_string),
                stop_sequence=choice.stop_string,
                usage=_usage(usage),
            )
            yield msgspec.json.encode(message)

    def begin(self, usage: Usage) -> bytes:
        message = Message(
            id=self.meta.id,
            model=self.meta.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(usage),
        )
        return named_event("message_start", {"type": "message_start", "message": message}) + _PING

    def piece(self, piece: TextPiece) -> bytes:
        if piece.finish is not None:
            self._stop_reason = _reason(piece.finish, piece.stop_string)
            self._stop_sequence = piece.stop_string
        return b"".join(map(self._event, self._blocks.push(piece)))

    def text(self, text: str) -> bytes:
        return b"".join(map(self._event, self._blocks.text(text)))

    def end(self, usage: Usage) -> bytes:
        events = b"".join(map(self._event, self._blocks.finish()))
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        events += named_event("message_delta", {"type": "message_delta", "delta": delta, "usage": _usage(usage)})
        return events + named_event("message_stop", {"type": "message_stop"})

    def failure(self, error: BaseException, request_id: str) -> bytes:
        return message_failure(error, request_id)

    def _event(self, step: Step) -> bytes:
        if isinstance(step, Begin):
            self._is_text = step.call is None
            block = (
                TextOut(text="")
                if step.call is None
                else ToolUseOut(id=step.call.id or "", name=step.call.name or "", input={})
            )
            return self._block_event("content_block_start", {"content_block": block})
        if isinstance(step, Part):
            delta = (
                {"type": "text_delta", "text": step.text}
                if self._is_text
                else {"type": "input_json_delta", "partial_json": step.text}
            )
            return self._block_event("content_block_delta", {"delta": delta})
        event = self._block_event("content_block_stop", {})
        self._index += 1
        return event

    def _block_event(self, name: str, members: dict[str, object]) -> bytes:
        return named_event(name, {"type": name, "index": self._index, **members})


def message_failure(error: BaseException, request_id: str) -> bytes:
    """The last event of a stream that has failed."""
    return b"event: error\ndata: " + messages_error(error, request_id) + b"\n\n"


def _reason(finish: FinishReason, stop_string: str | None) -> StopReason:
    return "stop_sequence" if finish == "stop" and stop_string is not None else _REASONS[finish]


def _usage(usage: Usage) -> MessageUsage:
    num_cached = min(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=usage.completion_tokens,
    )


def _tool_use(call: FinishedCall) -> ToolUseOut:
    return ToolUseOut(id=call.id, name=call.name, input=_read_input(call.arguments))


def _read_input(arguments: str) -> dict[str, Any]:
    """The arguments as an object. Returns an empty one for what is cut off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
