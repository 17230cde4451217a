"""Deltas of token ids into pieces of text: detokenizing, stop strings, and where an answer ends because of one. Pure.

Invariant: the pieces' texts together are the answer, without the stop string; their token ids are the tokens it took,
the ones that completed the stop string included and none after them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.router.routing.request import CallDelta, TextDelta
from penstock.text.detokenizer import Detokenizer
from penstock.text.json_parts import JsonParts
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
    stop_string: str | None = None
    """The stop string that ended the answer; None: none did."""
    reasoning: str = ""
    """New text of the thinking, which stands before the piece's own text; see `reasoning_assembly`."""


class Assembler(Protocol):
    """The text of one sequence, its tool calls if the request has tools (`tool_assembly`), and its thinking if the
    model thinks (`reasoning_assembly`)."""

    @property
    def is_plain(self) -> bool:
        """Whether only a delta's own finish can end the text, and each token's text is content."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of the thinking so far; None: the model does not think."""

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a plain delta, as `push` would return it; only where `is_plain`."""

    def json_parts(self) -> JsonParts | None:
        """The table in which the text of the next plain deltas may be looked up, instead of being asked for, as long as
        each token has a part; only where `is_plain`. Returns None where the text must be asked for."""

    def with_tokenizer(self, tokenizer: Tokenizer, packed_prompt: bytes = b"") -> "Assembler":
        """A new assembler of the same settings, for an answer by another model; only before anything is pushed.
        packed_prompt: the prompt in that model's tokens."""

    def push(self, delta: Delta) -> TextPiece:
        """What a delta adds. delta.finish: None, STOP or LENGTH."""


class Shown(NamedTuple):
    """What of an answer's tokens is in its text, beside what always is."""

    special_tokens: bool = False
    stop_string: bool = False
    call_markers: bool = False
    """Markers of tool calls, also where they are special tokens."""
    reasoning_markers: bool = False
    """Markers of thinking, also where they are special tokens."""


_PLAIN = Shown()


class TextAssembler:
    """The text of one sequence so far. stops: shared by the sequences of a request; min_tokens: they count only in what
    comes after that many tokens; shown: what the text has beside what it always has; first_offset: characters of the
    prompt that stand before it."""

    __slots__ = (
        "_automaton",
        "_detokenizer",
        "_first_offset",
        "_has_offsets",
        "_has_stops",
        "_hidden_ends",
        "_min_tokens",
        "_num_chars",
        "_num_tokens",
        "_shown",
        "_stops",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopAutomaton = NO_STOPS,
        min_tokens: int = 0,
        has_offsets: bool = False,
        shown: Shown = _PLAIN,
        first_offset: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, not shown.special_tokens, shown.call_markers, shown.reasoning_markers
        )
        self._stops = StopStrings(stops, shown.stop_string)
        self._shown = shown
        self._hidden_ends = tokenizer.eos_token_ids if shown.special_tokens and not shown.stop_string else frozenset()
        """Tokens that end the answer and are no part of its text, where others of their kind are."""
        self._automaton = stops
        self._has_stops = bool(stops.edges)
        self._has_offsets = has_offsets
        self._min_tokens = min_tokens
        self._first_offset = self._num_chars = first_offset
        self._num_tokens = 0

    @property
    def is_plain(self) -> bool:
        """Whether only a delta's own finish can end the text."""
        return not (self._has_stops or self._has_offsets)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None: all of the text is content."""
        return None

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a plain delta, as `push` would return it; only where `is_plain`."""
        return self._detokenizer.push(token_ids)

    def json_parts(self) -> JsonParts | None:
        """Parts by which plain deltas may be looked up; None: not now."""
        return self._detokenizer.json_parts()

    def with_tokenizer(self, tokenizer: Tokenizer, packed_prompt: bytes = b"") -> "TextAssembler":  # noqa: ARG002 (any)
        """A new assembler with the same stops, for an answer by another model; only before anything is pushed."""
        return TextAssembler(
            tokenizer, self._automaton, self._min_tokens, self._has_offsets, self._shown, self._first_offset
        )

    def push(self, delta: Delta) -> TextPiece:
        """The piece of text that a delta adds. delta.finish: None, STOP or LENGTH."""
        if isinstance(delta, TextDelta):
            return self._push_text(delta)
        if self._has_stops or self._has_offsets:
            piece = self._push_each(delta)
        else:
            shown = delta.token_ids[:-1] if self._hides_last(delta) else delta.token_ids
            piece = TextPiece(self._detokenizer.push(shown), delta.token_ids, None, delta.logprobs)
        if piece.finish is None and delta.finish is not None:
            return self._finish(piece, delta.finish)
        return piece

    def _push_text(self, delta: TextDelta) -> TextPiece:
        """Text of a provider, which watches for some stop strings, but not for all."""
        text, has_stopped = self._stops.push(delta.text)
        if has_stopped:
            return TextPiece(text, [], "stop", num_text_tokens=delta.num_tokens, stop_string=self._stops.hit)
        piece = TextPiece(text, [], num_text_tokens=delta.num_tokens)
        return piece if delta.finish is None else self._finish(piece, delta.finish)

    def _push_each(self, delta: Delta) -> TextPiece:
        """Detokenize token by token, so that the one that completes a stop string is known."""
        texts: list[str] = []
        offsets: list[int] = []
        for count, token_id in enumerate(delta.token_ids, 1):
            offsets.append(self._num_chars)
            is_hidden = count == len(delta.token_ids) and self._hides_last(delta)
            text = "" if is_hidden else self._detokenizer.push((token_id,))
            self._num_chars += len(text)
            self._num_tokens += 1
            has_stopped = False
            if self._num_tokens > self._min_tokens:
                text, has_stopped = self._stops.push(text)
            texts.append(text)
            if has_stopped:
                logprobs = delta.logprobs and delta.logprobs[:count]
                return TextPiece(
                    "".join(texts), delta.token_ids[:count], "stop", logprobs, offsets, stop_string=self._stops.hit
                )
        return TextPiece("".join(texts), delta.token_ids, None, delta.logprobs, offsets)

    def _hides_last(self, delta: Delta) -> bool:
        """Whether the delta's last token ends the answer and is no part of its text."""
        ends = self._hidden_ends
        return bool(ends and delta.finish is Finish.STOP and delta.token_ids and delta.token_ids[-1] in ends)

    def _finish(self, piece: TextPiece, finish: Finish) -> TextPiece:
        tail, has_stopped = self._stops.push(self._detokenizer.finish())
        if not has_stopped:
            tail += self._stops.finish()
        has_length = finish is Finish.LENGTH and not has_stopped
        return piece._replace(
            text=piece.text + tail,
            finish="length" if has_length else "stop",
            stop_string=self._stops.hit if has_stopped else None,
        )
