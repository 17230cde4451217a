"""The messages to and from a provider: a request as OpenAI's JSON, the events of its stream, its refusals. Pure.

Only fields that every server with OpenAI's API understands are sent, and of ours those that the provider is configured
to know. Source: OpenAI's API reference, chat and legacy completions, streaming.
"""

from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from math import isnan
from typing import NamedTuple

import msgspec

from penstock.base.errors import PenstockError
from penstock.router.config import EXTENSIONS, ProviderConfig
from penstock.router.routing.request import CallDelta, ProviderRequest
from penstock.wire.errors import ContextTooLong, InvalidRequest, Overloaded
from penstock.wire.frames import Finish
from penstock.wire.openai import (
    NULL,
    ChatMessageIn,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    ToolDefinition,
)

MAX_STOPS = 4
"""OpenAI's bound on stop strings; where there are more, the gateway itself finds the rest."""
MAX_MESSAGE_CHARS = 500
MAX_CALLS = 1024
"""Tool calls of one answer."""
_SHARED = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
"""Values of our extensions that change nothing."""
_GATEWAYS_OWN: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "cache_salt": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (NULL,),
    "guided_regex": (),
    "structured_outputs": (),
}
"""Fields that only a prompt and an answer of tokens can honour, and their values that change nothing."""
_OF_TOKENS = ("allowed_token_ids", "bad_words", "logit_bias", "return_token_ids", "stop_token_ids")
"""Fields that speak of tokens of one vocabulary."""
_MAX_TOKENS = 2**31
"""No answer has more; a sum beyond it is taken for none."""
_MAX_RETRY_AFTER_S = 86_400.0
_CALLER_AT_FAULT = frozenset({400, 413, 422})


class ProviderEvent(NamedTuple):
    """What one event of the stream adds to the answer."""

    text: str = ""
    finish: Finish | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    calls: tuple[CallDelta, ...] = ()
    """Parts of tool calls, by the provider's own numbers: see `CallNumbers`."""
    cached_tokens: int | None = None
    """Prompt tokens of which the provider says that they were in its cache."""


class Refusal(NamedTuple):
    """A response without an answer: its error, and what it means for the provider."""

    error: PenstockError
    is_failure: bool
    """The refusal is about the provider's health, or our account there; else about the request."""
    pause_s: float | None = None
    """Seconds for which the provider demands no more requests; None: it demands no pause."""


class StreamBroken(Exception):
    """The provider's stream is malformed, or ends with an error."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


_NULL = msgspec.Raw(b"null")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = _NULL


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _Error(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_chunks = msgspec.json.Decoder(_Chunk)
_errors = msgspec.json.Decoder(_ErrorBody)


def is_bound_to_tokens(request: ChatRequest | CompletionRequest) -> bool:
    """Whether the request contains token ids, or wants some in the answer: then only the vocabulary that it was written
    for will do."""
    if any(getattr(request, name) for name in _OF_TOKENS) or request.prompt_logprobs is not None:
        return True
    if isinstance(request, ChatRequest):
        return bool(request.logprobs)
    if request.best_of is not None and request.best_of > (request.n or 1):
        return True  # the best are chosen by their log probabilities
    return request.logprobs is not None or not (
        isinstance(request.prompt, str) or all(isinstance(item, str) for item in request.prompt)
    )


def is_understood(request: ChatRequest | CompletionRequest, provider: ProviderConfig) -> bool:
    """Whether the provider can do all that the request needs."""
    if is_bound_to_tokens(request) or _is_for_gateway(request):
        return False
    return _extensions(request).keys() <= frozenset(provider.extra_fields)


def _is_for_gateway(request: ChatRequest | CompletionRequest) -> bool:
    """Whether the request asks for something of template, prompt, cache or text that is done here, or nowhere."""
    if isinstance(request, CompletionRequest) and _response_format(request) is not None:
        return True  # which OpenAI has for chats alone
    values = {name: getattr(request, name, None) for name in _GATEWAYS_OWN}
    return any(value is not None and value not in _GATEWAYS_OWN[name] for name, value in values.items())


def _response_format(request: ChatRequest | CompletionRequest) -> ResponseFormat | None:
    """The form that the answer must have, unless that is any text."""
    wanted = request.response_format
    return None if wanted is None or wanted.type == "text" else wanted


def request_path(sequence: ProviderRequest) -> str:
    return "/chat/completions" if isinstance(sequence.request, ChatRequest) else "/completions"


def encode_body(sequence: ProviderRequest, provider: ProviderConfig, max_tokens: int, seed: int) -> bytes:
    """JSON of the request, always as a stream. seed: sent where the caller gave one."""
    request = sequence.request
    body: dict[str, object] = {"model": provider.model, "stream": True, "stream_options": {"include_usage": True}}
    if isinstance(request, ChatRequest):
        body["messages"] = [_message(message) for message in request.messages]
        body |= _tools(request)
        body[provider.max_tokens_field] = max_tokens
        if (wanted := _response_format(request)) is not None:
            body["response_format"] = wanted
    else:
        body["prompt"] = request.prompt if isinstance(request.prompt, str) else request.prompt[sequence.prompt]
        body["max_tokens"] = max_tokens
    body |= {name: value for name in _SHARED if (value := getattr(request, name)) is not None}
    if request.seed is not None:
        body["seed"] = seed
    if request.stop:
        body["stop"] = request.stop if isinstance(request.stop, str) else request.stop[:MAX_STOPS]
    return msgspec.json.encode(body | _extensions(request))


def read_event(data: bytes) -> ProviderEvent:
    """What an event's data holds; `[DONE]` is none. Raises StreamBroken."""
    try:
        chunk = _chunks.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StreamBroken("an event of its stream can't be read") from error
    if chunk.error is not None and bytes(chunk.error) != b"null":
        raise StreamBroken("its stream ended with an error")
    usage = chunk.usage or _Usage()
    counts = _drop_implausible(usage.prompt_tokens), _drop_implausible(usage.completion_tokens)
    cached_tokens = _read_cached_tokens(usage.prompt_tokens_details)
    if not chunk.choices:
        return ProviderEvent("", None, *counts, cached_tokens=cached_tokens)
    choice = chunk.choices[0]
    text = choice.text or (choice.delta.content if choice.delta is not None else None) or ""
    finish = (
        None if choice.finish_reason is None else Finish.LENGTH if choice.finish_reason == "length" else Finish.STOP
    )
    return ProviderEvent(text, finish, *counts, _read_calls(choice.delta), cached_tokens)


def _read_cached_tokens(details: msgspec.Raw) -> int | None:
    """Prompt tokens in the provider's cache. Returns None where it does not say: the answer is as good without."""
    try:
        found = msgspec.json.decode(details, type=_Details | None)
    except msgspec.DecodeError:
        return None
    return None if found is None else _drop_implausible(found.cached_tokens)


class CallNumbers:
    """The numbers of tool calls in one answer: 0, 1 and so on in the order in which they begin, whatever the provider
    calls them. Some repeat id and name in every part, and some give all calls the same number."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[int, str]] = {}
        """Number here and id of the latest call, by the number that the provider gave it."""
        self._num_calls = 0

    def renumber(self, calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
        """The parts with id and name where a call begins, and only there. Raises StreamBroken for a call that begins
        without them."""
        return tuple(map(self._renumber, calls))

    def _renumber(self, call: CallDelta) -> CallDelta:
        begun = self._begun.get(call.number)
        if begun is not None and (call.name is None or call.id in (None, begun[1])):
            return CallDelta(begun[0], call.arguments)
        if call.name is None or call.id is None or self._num_calls == MAX_CALLS:
            raise StreamBroken("a tool call of its stream has no beginning")
        number, self._num_calls = self._num_calls, self._num_calls + 1
        self._begun[call.number] = number, call.id
        return call._replace(number=number)


def read_refusal(name: str, status: int, retry_after: str | None, body: bytes, now: float) -> Refusal:
    """The meaning of a status other than 200. now: Unix time, for a Retry-After that is a date."""
    pause_s = _retry_after_s(retry_after, now)
    if status in _CALLER_AT_FAULT:
        return Refusal(_request_error(body), is_failure=False)
    if status == 429:
        return Refusal(
            Overloaded(f"the provider {name} is at its limit", retry_after_s=pause_s or 1.0),
            is_failure=True,
            pause_s=pause_s,
        )
    return Refusal(
        Overloaded(f"the provider {name} answered with status {status}", retry_after_s=pause_s or 1.0),
        is_failure=True,
        pause_s=pause_s if status == 503 else None,
    )


def _request_error(body: bytes) -> PenstockError:
    try:
        error = _errors.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = _Error()
    message = f"The provider refused the request: {(error.message or 'it gave no reason')[:MAX_MESSAGE_CHARS]}"
    return ContextTooLong(message) if error.code == "context_length_exceeded" else InvalidRequest(message)


def _retry_after_s(value: str | None, now: float) -> float | None:
    """RFC 9110, 10.2.3: seconds or a date; what is neither is None. Bounded, since the caller may get it."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return None if isnan(seconds) else min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)


def _drop_implausible(num_tokens: int | None) -> int | None:
    """None instead of what is no count: it would spoil the sums of limits, usage and cost."""
    return num_tokens if num_tokens is not None and 0 <= num_tokens <= _MAX_TOKENS else None


def _extensions(request: ChatRequest | CompletionRequest) -> dict[str, object]:
    found = {name: getattr(request, name) for name in sorted(EXTENSIONS)}
    return {name: value for name, value in found.items() if value is not None and value not in _NEUTRAL[name]}


def _message(message: ChatMessageIn) -> dict[str, object]:
    told: dict[str, object] = {"role": message.role, "content": _content(message.content)}
    if message.tool_calls:
        told["tool_calls"] = message.tool_calls
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    return told


def _tools(request: ChatRequest) -> dict[str, object]:
    """The fields of tools, as the caller sent them; none where there are no tools."""
    if not request.tools:
        return {}
    fields: dict[str, object] = {
        "tools": [_without_nulls(tool) for tool in request.tools],
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _without_nulls(tool: ToolDefinition) -> dict[str, object]:
    assert tool.function is not None  # `read_tools` has seen to it
    function = msgspec.structs.asdict(tool.function)
    return {"type": tool.type, "function": {name: value for name, value in function.items() if value is not None}}


def _read_calls(delta: _Delta | None) -> tuple[CallDelta, ...]:
    if delta is None or not delta.tool_calls:
        return ()
    return tuple(
        CallDelta(call.index, function.arguments or "", call.id or None, function.name or None)
        for call in delta.tool_calls
        for function in [call.function or _Function()]
    )


def _content(content: object) -> object:
    """A message's content as JSON values; its parts are known to be text by then."""
    return msgspec.to_builtins(content)
