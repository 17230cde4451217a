"""Answers as OpenAI's JSON: chat and legacy completions, whole and as the chunks of a stream. Pure.

The structs of `wire.openai` are the truth. For the chunk that is sent most, text and nothing else, their encoding is
made once per choice with a mark in place of the text; a chunk is then what stood before the mark, the text, and what
stood behind it. A whole answer is made in parts, because a long one with log probabilities takes a second.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from penstock.router.completions.echo import Echo, PromptPiece
from penstock.router.completions.logprobs import chat_logprobs, text_logprobs
from penstock.router.completions.text_assembly import TextPiece
from penstock.router.routing.request import CallDelta, Receipt
from penstock.text.tokenizer import Tokenizer
from penstock.wire.frames import TokenLogprobs
from penstock.wire.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessageOut,
    FinishReason,
    FunctionCall,
    FunctionCallDelta,
    PromptTokens,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)

_MARK = "\x00text\x00"
_encode = msgspec.json.Encoder().encode
encode_text: Callable[[str], bytes] = _encode
"""Encoder of a text as a JSON string."""
_ENCODED_MARK = _encode(_MARK)
NO_USAGE = b"null}"
"""End of a chunk that leaves its usage to a later one: `usage` is the last field."""
PART_TOKENS = 16
"""Tokens whose log probabilities are encoded at once: a fraction of a millisecond with 20 alternatives each, and too
few objects at a time to start the garbage collector, which would look at all that the gateway holds."""
_NO_CHOICES = b'"choices":[]'
_NO_CONTENT = b'"content":[]'
_NO_PROMPT = b'"prompt_logprobs":[]'
_NO_LOGPROBS = _encode(TextLogprobs([], [], [], []))


def encode_usage(usage: Usage) -> bytes:
    """The end of a chunk that has a usage, instead of NO_USAGE."""
    return _encode(usage) + b"}"


class ResponseMeta(NamedTuple):
    """The fields that every chunk of an answer repeats, and which optional parts the request wants."""

    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    has_usage_chunk: bool = False
    has_continuous_usage: bool = False
    """Whether each chunk has the usage so far; only with a chunk for the usage of the whole."""
    has_token_ids: bool = False
    has_logprobs: bool = False
    """Whether log probabilities are shown, as far as there are any: the timed runner has none."""

    def with_answering_model(self, receipt: Receipt) -> "ResponseMeta":
        return (
            self if receipt.answering_model is None else self._replace(fingerprint=receipt.answering_model.fingerprint)
        )

    @property
    def chunk_usage(self) -> UnsetType | None:
        """Usage in chunks before the last: null where the last has it, absent elsewhere."""
        return None if self.has_usage_chunk else UNSET


@dataclass(slots=True)
class FinishedCall:
    """A tool call of a finished choice."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class FinishedChoice:
    """A finished choice."""

    index: int
    text: str = ""
    finish: FinishReason = "stop"
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    calls: list[FinishedCall] = field(default_factory=list)
    stop_string: str | None = None
    """The stop string that ended it; None: none did."""
    echo: Echo | None = None
    """What is shown of the prompt; None: nothing."""
    reasoning: str = ""
    """What the model thought before its text."""

    @property
    def shown_text(self) -> str:
        return self.text if self.echo is None else self.echo.text + self.text


class WholeFormat(Protocol):
    """The JSON of one answer that is sent as a whole."""

    meta: ResponseMeta

    def set_answering_model(self, receipt: Receipt) -> None:
        """Must be called before anything is formatted: the model that answers may not be the one that the request was
        tokenized for."""

    def whole(self, choices: Iterable[FinishedChoice], usage: Usage) -> Iterator[bytes]:
        """JSON of the whole answer, in parts that take about a millisecond each; an empty part is only a place to
        pause."""


class Format(WholeFormat, Protocol):
    """The JSON of one answer, sent as a whole or as OpenAI's chunks."""

    def chunk(self, index: int, piece: TextPiece, is_first: bool) -> bytes:
        """JSON of the chunk for a piece, without its finish."""

    def prompt_chunk(self, index: int, piece: PromptPiece, is_first: bool) -> bytes:
        """JSON of the chunk for a piece of the prompt, before those of the answer."""

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """JSON before and behind the text (`encode_text`) of a chunk that has nothing else."""

    def end(self, index: int, finish: FinishReason) -> bytes:
        """JSON of a choice's last chunk."""

    def usage(self, usage: Usage) -> bytes:
        """JSON of the stream's last chunk."""


class ChatFormat:
    """Answers of /v1/chat/completions."""

    def __init__(self, meta: ResponseMeta) -> None:
        self.meta = meta
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, index: int, piece: TextPiece, is_first: bool) -> bytes:
        if is_first or piece.calls or piece.reasoning or self.meta.has_token_ids or self.meta.has_logprobs:
            return self._chunk(self._choice(index, piece, is_first))
        before, behind = self.around_text(index)
        return before + encode_text(piece.text) + behind

    def prompt_chunk(self, index: int, piece: PromptPiece, is_first: bool) -> bytes:
        return self._chunk(self._choice(index, TextPiece(piece.text, []), is_first))

    def set_answering_model(self, receipt: Receipt) -> None:
        self.meta = self.meta.with_answering_model(receipt)

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        if index not in self._plain:
            self._plain[index] = _split_at_mark(self._chunk(self._choice(index, TextPiece(_MARK, []), is_first=False)))
        return self._plain[index]

    def end(self, index: int, finish: FinishReason) -> bytes:
        return self._chunk(
            ChatChunkChoice(
                index=index,
                delta=ChatDelta(),
                finish_reason=finish,
                token_ids=[] if self.meta.has_token_ids else UNSET,
            )
        )

    def usage(self, usage: Usage) -> bytes:
        return self._chunk(None, usage)

    def whole(self, choices: Iterable[FinishedChoice], usage: Usage) -> Iterator[bytes]:
        meta = self.meta
        finished = iter(choices)
        first = next(finished)  # all are of one prompt
        envelope = ChatCompletion(
            id=meta.id,
            created=meta.created,
            model=meta.model,
            system_fingerprint=meta.fingerprint,
            choices=[],
            usage=usage,
            prompt_logprobs=_no_prompt(first.echo),
        )
        before, _, behind = _encode(envelope).partition(_NO_CHOICES)
        all_choices = _with_commas(map(self._whole_choice, chain((first,), finished)))
        return chain((before + _NO_CHOICES[:-1],), all_choices, (b"]",), _with_prompt(behind, first.echo))

    def _whole_choice(self, choice: FinishedChoice) -> Iterator[bytes]:
        meta = self.meta
        has_logprobs = meta.has_logprobs and bool(choice.logprobs)
        answer = _encode(
            ChatChoice(
                index=choice.index,
                message=_message(choice),
                logprobs=ChatLogprobs([]) if has_logprobs else None,
                finish_reason=choice.finish,
                token_ids=choice.token_ids if meta.has_token_ids else UNSET,
            )
        )
        if not has_logprobs:
            return iter((answer,))
        return _fill(answer, _NO_CONTENT, _with_commas(self._whole_logprobs(choice)))

    def _whole_logprobs(self, choice: FinishedChoice) -> Iterator[Iterator[bytes]]:
        for part in _parts(choice.token_ids):
            content = chat_logprobs(self.meta.tokenizer, choice.token_ids[part], choice.logprobs[part]).content
            yield iter((_encode(content)[1:-1],))

    def _choice(self, index: int, piece: TextPiece, is_first: bool) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(
                role="assistant" if is_first else UNSET,
                content=UNSET if (piece.calls or piece.reasoning) and not piece.text else piece.text,
                tool_calls=_call_deltas(piece.calls) if piece.calls else UNSET,
                reasoning_content=piece.reasoning or UNSET,
            ),
            logprobs=self._logprobs(piece.token_ids, piece.logprobs or ()),
            token_ids=piece.token_ids if self.meta.has_token_ids else UNSET,
        )

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(self.meta.tokenizer, token_ids, logprobs) if self.meta.has_logprobs and logprobs else None

    def _chunk(self, choice: ChatChunkChoice | None, usage: Usage | None = None) -> bytes:
        meta = self.meta
        return _encode(
            ChatCompletionChunk(
                id=meta.id,
                created=meta.created,
                model=meta.model,
                system_fingerprint=meta.fingerprint,
                choices=[choice] if choice else [],
                usage=usage or meta.chunk_usage,
            )
        )


class TextFormat:
    """Answers of /v1/completions."""

    def __init__(self, meta: ResponseMeta) -> None:
        self.meta = meta
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, index: int, piece: TextPiece, is_first: bool) -> bytes:  # noqa: ARG002 (it has no role)
        if self.meta.has_token_ids or self.meta.has_logprobs:
            return self._chunk(self._choice(index, piece))
        before, behind = self.around_text(index)
        return before + encode_text(piece.text) + behind

    def prompt_chunk(self, index: int, piece: PromptPiece, is_first: bool) -> bytes:  # noqa: ARG002 (it has no role)
        choice = self._choice(index, TextPiece(piece.text, []))
        if piece.logprobs:
            logprobs = text_logprobs(self.meta.tokenizer, piece.token_ids, piece.logprobs, piece.offsets)
            choice = msgspec.structs.replace(choice, logprobs=logprobs)
        return self._chunk(choice)

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        if index not in self._plain:
            self._plain[index] = _split_at_mark(self._chunk(self._choice(index, TextPiece(_MARK, []))))
        return self._plain[index]

    def end(self, index: int, finish: FinishReason) -> bytes:
        return self._chunk(
            TextChoice(index=index, text="", finish_reason=finish, token_ids=[] if self.meta.has_token_ids else UNSET)
        )

    def usage(self, usage: Usage) -> bytes:
        return self._chunk(None, usage)

    def whole(self, choices: Iterable[FinishedChoice], usage: Usage) -> Iterator[bytes]:
        return _fill(self._completion([], usage), _NO_CHOICES, _with_commas(map(self._whole_choice, choices)))

    def _whole_choice(self, choice: FinishedChoice) -> Iterator[bytes]:
        meta = self.meta
        echo = choice.echo
        has_logprobs = meta.has_logprobs and (bool(choice.logprobs) or (echo is not None and echo.has_legacy))
        answer = _encode(
            TextChoice(
                index=choice.index,
                text=choice.shown_text,
                logprobs=TextLogprobs([], [], [], []) if has_logprobs else None,
                finish_reason=choice.finish,
                token_ids=choice.token_ids if meta.has_token_ids else UNSET,
                prompt_logprobs=_no_prompt(echo),
            )
        )
        if not has_logprobs:
            return _with_prompt(answer, echo)
        before, _, behind = answer.partition(_NO_LOGPROBS)
        return chain((before,), self._whole_logprobs(choice), _with_prompt(behind, echo))

    def _whole_logprobs(self, choice: FinishedChoice) -> Iterator[bytes]:
        """The object of four arrays, all of which are as long as the answer."""
        columns: tuple[list[bytes], ...] = ([], [], [], [])
        for logprobs in self._legacy_parts(choice):
            for column, values in zip(columns, msgspec.structs.astuple(logprobs), strict=True):
                column.append(_encode(values)[1:-1])
            yield b""
        before = b"{"
        for name, column in zip(TextLogprobs.__struct_fields__, columns, strict=True):
            yield before + _encode(name) + b":["
            yield b",".join(column)
            before = b"],"
        yield b"]}"

    def _legacy_parts(self, choice: FinishedChoice) -> Iterator[TextLogprobs]:
        """Log probabilities of what is shown of the prompt, then of the answer."""
        tokenizer = self.meta.tokenizer
        if choice.echo is not None and choice.echo.has_legacy:
            for piece in choice.echo.pieces():
                yield text_logprobs(tokenizer, piece.token_ids, piece.logprobs, piece.offsets)
        for part in _parts(choice.token_ids if choice.logprobs else ()):
            yield text_logprobs(tokenizer, choice.token_ids[part], choice.logprobs[part], choice.offsets[part])

    def set_answering_model(self, receipt: Receipt) -> None:
        self.meta = self.meta.with_answering_model(receipt)

    def _choice(self, index: int, piece: TextPiece) -> TextChoice:
        return TextChoice(
            index=index,
            text=piece.text,
            logprobs=self._logprobs(piece.token_ids, piece.logprobs or (), piece.offsets),
            token_ids=piece.token_ids if self.meta.has_token_ids else UNSET,
        )

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> TextLogprobs | None:
        return (
            text_logprobs(self.meta.tokenizer, token_ids, logprobs, offsets)
            if self.meta.has_logprobs and logprobs
            else None
        )

    def _chunk(self, choice: TextChoice | None, usage: Usage | None = None) -> bytes:
        return self._completion([choice] if choice else [], usage or self.meta.chunk_usage)

    def _completion(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> bytes:
        meta = self.meta
        return _encode(
            TextCompletion(
                id=meta.id,
                created=meta.created,
                model=meta.model,
                system_fingerprint=meta.fingerprint,
                choices=choices,
                usage=usage,
            )
        )


def _message(choice: FinishedChoice) -> ChatMessageOut:
    reasoning = choice.reasoning or UNSET
    if not choice.calls:
        return ChatMessageOut(choice.shown_text, reasoning_content=reasoning)
    calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in choice.calls]
    return ChatMessageOut(choice.shown_text or None, tool_calls=calls, reasoning_content=reasoning)


def _call_deltas(calls: Sequence[CallDelta]) -> list[ToolCallDelta]:
    """Parts of calls, those of one call joined."""
    joined: dict[int, CallDelta] = {}
    for call in calls:
        before = joined.get(call.number)
        joined[call.number] = call if before is None else before._replace(arguments=before.arguments + call.arguments)
    return [
        ToolCallDelta(
            index=call.number,
            id=UNSET if call.id is None else call.id,
            type=UNSET if call.id is None else "function",
            function=FunctionCallDelta(name=UNSET if call.name is None else call.name, arguments=call.arguments),
        )
        for call in joined.values()
    ]


def _parts(token_ids: Sequence[int]) -> Iterator[slice]:
    return (slice(first, first + PART_TOKENS) for first in range(0, len(token_ids), PART_TOKENS))


def _fill(encoded: bytes, empty: bytes, items: Iterable[bytes]) -> Iterator[bytes]:
    """JSON in parts, with `items` in its array `empty`, which ends in `[]`: no string holds its quotes unescaped."""
    before, _, behind = encoded.partition(empty)
    return chain((before + empty[:-1],), items, (b"]" + behind,))


def _no_prompt(echo: Echo | None) -> PromptTokens | UnsetType:
    """What stands for the log probabilities of the prompt until `_with_prompt`."""
    return UNSET if echo is None or echo.wish.num_top is None else []


def _with_prompt(encoded: bytes, echo: Echo | None) -> Iterator[bytes]:
    """JSON in parts, with the prompt's log probabilities where they are wanted."""
    if echo is None or echo.wish.num_top is None:
        return iter((encoded,))
    parts = (iter((_encode(part)[1:-1],)) for part in echo.prompt_tokens())
    return _fill(encoded, _NO_PROMPT, _with_commas(parts))


def _with_commas(items: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    for number, item in enumerate(items):
        if number:
            yield b","
        yield from item


def _split_at_mark(chunk: bytes) -> tuple[bytes, bytes]:
    before, _, behind = chunk.partition(_ENCODED_MARK)
    return before, behind
