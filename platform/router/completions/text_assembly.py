"""Deltas of token ids into pieces of text: detokenizing, stop strings, and where an answer ends because of one. Pure.

Invariant: the pieces' texts together are the answer, without the stop string; their token ids are the tokens it took,
the ones that completed the stop string included and none after them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.router.routing.request import CallDelta, TextDelta
from penstock.text.detokenizer import Detokenizer
from penstock.text.stops import NO_STOPS, StopAutomaton, StopStrings
from penstock.text.tokenizer import Tokenizer
from penstock.wire.frames import Delta, Finish, TokenLogprobs
from penstock.wire.openai import FinishReason


class TextPiece(NamedTuple):
    """What an answer gains by one delta."""

    text: str
    """New text; may be empty: half a character, or what may become a stop string, is held back."""
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`; None: the request wants none."""
    offsets: Sequence[int] = ()
    """Whole characters of the answer before each of `token_ids`; empty: the request wants none."""
    num_text_tokens: int = 0
    """Tokens of an answer that comes as text; see `TextDelta`."""
    calls: Sequence[CallDelta] = ()
    """New parts of tool calls, in their order; empty: the request has no tools."""


class Assembler(Protocol):
    """The text of one sequence, and its tool calls if the request has tools (`tool_assembly`)."""

    @property
    def is_plain(self) -> bool:
        """Whether only a delta's own finish can end the text, and each token's text is content."""

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a plain delta, as `push` would return it; only where `is_plain`."""

    def with_tokenizer(self, tokenizer: Tokenizer) -> "Assembler":
        """A new assembler of the same settings, for an answer by another model; only before anything is pushed."""

    def push(self, delta: Delta) -> TextPiece:
        """What a delta adds. delta.finish: None, STOP or LENGTH."""


class TextAssembler:
    """The text of one sequence so far. stops: shared by the sequences of a request; min_tokens: they count only in what
    comes after that many tokens. shows_markers: markers of tool calls are part of the text."""

    __slots__ = (
        "_automaton",
        "_detokenizer",
        "_has_offsets",
        "_has_stops",
        "_min_tokens",
        "_num_chars",
        "_num_tokens",
        "_shows_markers",
        "_stops",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopAutomaton = NO_STOPS,
        min_tokens: int = 0,
        has_offsets: bool = False,
        shows_markers: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, shows_markers=shows_markers)
        self._shows_markers = shows_markers
        self._stops = StopStrings(stops)
        self._automaton = stops
        self._has_stops = bool(stops.edges)
        self._has_offsets = has_offsets
        self._min_tokens = min_tokens
        self._num_chars = 0
        self._num_tokens = 0

    @property
    def is_plain(self) -> bool:
        """Whether only a delta's own finish can end the text."""
        return not (self._has_stops or self._has_offsets)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a plain delta, as `push` would return it; only where `is_plain`."""
        return self._detokenizer.push(token_ids)

    def with_tokenizer(self, tokenizer: Tokenizer) -> "TextAssembler":
        """A new assembler with the same stops, for an answer by another model; only before anything is pushed."""
        return TextAssembler(tokenizer, self._automaton, self._min_tokens, self._has_offsets, self._shows_markers)

    def push(self, delta: Delta) -> TextPiece:
        """The piece of text that a delta adds. delta.finish: None, STOP or LENGTH."""
        if isinstance(delta, TextDelta):
            return self._push_text(delta)
        if self._has_stops or self._has_offsets:
            piece = self._push_each(delta)
        else:
            piece = TextPiece(self._detokenizer.push(delta.token_ids), delta.token_ids, None, delta.logprobs)
        if piece.finish is None and delta.finish is not None:
            return self._finish(piece, delta.finish)
        return piece

    def _push_text(self, delta: TextDelta) -> TextPiece:
        """Text of a provider, which watches for some stop strings, but not for all."""
        text, has_stopped = self._stops.push(delta.text)
        if has_stopped:
            return TextPiece(text, [], "stop", num_text_tokens=delta.num_tokens)
        piece = TextPiece(text, [], num_text_tokens=delta.num_tokens)
        return piece if delta.finish is None else self._finish(piece, delta.finish)

    def _push_each(self, delta: Delta) -> TextPiece:
        """Detokenize token by token, so that the one that completes a stop string is known."""
        texts: list[str] = []
        offsets: list[int] = []
        for count, token_id in enumerate(delta.token_ids, 1):
            offsets.append(self._num_chars)
            text = self._detokenizer.push((token_id,))
            self._num_chars += len(text)
            self._num_tokens += 1
            has_stopped = False
            if self._num_tokens > self._min_tokens:
                text, has_stopped = self._stops.push(text)
            texts.append(text)
            if has_stopped:
                return TextPiece(
                    "".join(texts), delta.token_ids[:count], "stop", delta.logprobs and delta.logprobs[:count], offsets
                )
        return TextPiece("".join(texts), delta.token_ids, None, delta.logprobs, offsets)

    def _finish(self, piece: TextPiece, finish: Finish) -> TextPiece:
        tail, has_stopped = self._stops.push(self._detokenizer.finish())
        if not has_stopped:
            tail += self._stops.finish()
        return piece._replace(
            text=piece.text + tail, finish="length" if finish is Finish.LENGTH and not has_stopped else "stop"
        )
