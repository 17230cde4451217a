"""The thinking of a reasoning model, apart from its answer: which markers a model puts around it, and a splitter that
finds them in text that comes in pieces. Pure.

Thinking stands at the beginning of an answer; a marker further on is content. Invariants: how the text was cut changes
nothing; no part of a marker is shown; nothing is lost but the markers and the white space next to them; an answer
without thinking is all content, unchanged; thinking that is never closed is thinking to its end.

Sources of the formats: the chat templates and model cards of Qwen3 and QwQ (<think>, closed before the answer; an empty
pair in the prompt where thinking is off), DeepSeek-R1 (newer templates end the prompt with an opened <think>), SmolLM3,
Magistral and mistral-common's instruct tokenizer v13 ([THINK], [/THINK]).
"""

from collections.abc import Container
from enum import Enum
from typing import Literal, NamedTuple

ReasoningParserName = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"]
"""Setting of a pool. auto: by chat template and vocabulary; none: what a model thinks is content."""
PROMPT_END_TOKENS = 32
"""Tokens at the end of a prompt that say whether the answer begins within the thinking: a marker and white space."""
_BLANK = " \t\n\r"
_MAX_BLANK_CHARS = 64
"""White space before the opening marker; behind more of it there is none."""


class ReasoningForm(NamedTuple):
    """How one model marks its thinking."""

    opening: str
    closing: str
    is_first: bool = False
    """Whether an answer begins with thinking also where neither prompt nor answer open it."""

    def begins_inside(self, prompt_end: str, continued: str | None = None) -> bool:
        """Whether an answer begins within the thinking. prompt_end: the last `PROMPT_END_TOKENS` of its prompt as text,
        special tokens included; continued: the message that the answer goes on with; None: it is a new one."""
        if continued is not None:
            return continued.rfind(self.opening) > continued.rfind(self.closing)
        end = prompt_end.rstrip(_BLANK)
        return end.endswith(self.opening) or (self.is_first and not end.endswith(self.closing))


_QWEN3 = ReasoningForm("<think>", "</think>")
_MISTRAL = ReasoningForm("[THINK]", "[/THINK]")
FORMS: dict[ReasoningParserName, ReasoningForm] = {
    "qwen3": _QWEN3,
    "deepseek_r1": _QWEN3._replace(is_first=True),
    "mistral": _MISTRAL,
}
REASONING_MARKERS = frozenset(marker for form in FORMS.values() for marker in (form.opening, form.closing))
"""Markers of all forms. In some vocabularies they are special tokens, which the text of an answer leaves out."""


def choose_reasoning(template: str, added_tokens: Container[str], parser: ReasoningParserName) -> ReasoningForm | None:
    """The form of a model's thinking; None: what it writes is all content. template: Jinja source; added_tokens: the
    vocabulary's tokens that no text is cut into by itself."""
    if parser != "auto":
        return FORMS.get(parser)
    for form in (_MISTRAL, _QWEN3):
        if form.closing in template or (form.opening in added_tokens and form.closing in added_tokens):
            return form
    return None


class Split(NamedTuple):
    """What a piece of text adds."""

    reasoning: str
    content: str


class _Place(Enum):
    BEGINNING = 0
    """No marker yet, and nothing but white space."""
    THINKING = 1
    BEHIND = 2
    """The closing marker is read, and nothing but white space behind it."""
    CONTENT = 3


class ReasoningSplitter:
    """The splitter of one answer. begins_inside: see `ReasoningForm`."""

    __slots__ = ("_begins_inside", "_blank", "_form", "_has_shown", "_held", "_place", "has_thought")

    def __init__(self, form: ReasoningForm, *, begins_inside: bool) -> None:
        self._form = form
        self._begins_inside = begins_inside
        self._place = _Place.BEGINNING
        self._held = ""
        """Text that is not decided yet."""
        self._blank: list[str] = []
        """White space in the thinking, which is part of it if more follows."""
        self._has_shown = False
        self.has_thought = False
        """Whether the answer has begun to think."""

    @property
    def is_open(self) -> bool:
        """Whether what comes next may belong to the thinking."""
        return self._place in (_Place.BEGINNING, _Place.THINKING)

    @property
    def is_done(self) -> bool:
        """Whether all that comes next is content."""
        return self._place is _Place.CONTENT

    def push(self, text: str) -> Split:
        """What the next piece of the answer brings; any length, also none."""
        self._held += text
        reasoning = content = ""
        if self._place is _Place.BEGINNING:
            self._begin(is_ended=False)
        if self._place is _Place.THINKING:
            reasoning = self._think()
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip(_BLANK)
            if self._held:
                self._place = _Place.CONTENT
        if self._place is _Place.CONTENT:
            content, self._held = self._held, ""
        return Split(reasoning, content)

    def finish(self) -> Split:
        """What is left at the end of the answer; only once."""
        if self._place is _Place.BEGINNING:
            self._begin(is_ended=True)
        held, self._held = self._held, ""
        if self._place is _Place.THINKING:
            return Split(self._pass_on(held), "")
        return Split("", held)

    def _begin(self, *, is_ended: bool) -> None:
        """Find out what the answer begins with, as soon as that is known."""
        opening, body = self._form.opening, self._held.lstrip(_BLANK)
        is_blank_short = len(self._held) - len(body) <= _MAX_BLANK_CHARS
        if is_blank_short and body.startswith(opening):
            self._held = body[len(opening) :]
            self._think_on()
        elif is_blank_short and not is_ended and opening.startswith(body):
            return
        elif self._begins_inside:
            self._think_on()
        else:
            self._place = _Place.CONTENT

    def _think_on(self) -> None:
        self._place, self.has_thought = _Place.THINKING, True

    def _think(self) -> str:
        """Thinking out of what is held, up to the closing marker or what may become one."""
        text, closing = self._held, self._form.closing
        at = text.find(closing)
        if at >= 0:
            self._place, self._held = _Place.BEHIND, text[at + len(closing) :]
            return self._pass_on(text[:at])
        end = len(text) - _num_undecided(text, closing)
        self._held = text[end:]
        return self._pass_on(text[:end])

    def _pass_on(self, text: str) -> str:
        """Thinking, but for the white space that it begins and ends with."""
        body = text.rstrip(_BLANK)
        shown = ""
        if body:
            shown = "".join([*self._blank, body])
            shown = shown if self._has_shown else shown.lstrip(_BLANK)
            self._blank, self._has_shown = [], True
        if len(body) < len(text):
            self._blank.append(text[len(body) :])
        return shown


def _num_undecided(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of the marker."""
    longest = min(len(marker) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(marker[:count])), 0)
