"""Text of a chat's answer into thinking and content, for models that think. Pure.

Invariants: what is counted as tokens of the thinking are all tokens up to the one that completes the closing marker;
tokens, log probabilities and stop strings are those of the whole answer, thinking included; the models that do not
think never come here.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.router.completions.text_assembly import TextAssembler, TextPiece
from penstock.router.routing.request import TextDelta
from penstock.text.json_parts import JsonParts
from penstock.text.reasoning import PROMPT_END_TOKENS, ReasoningSplitter
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.prompt import content_text
from penstock.wire.frames import Delta, unpack_token_ids
from penstock.wire.openai import ChatRequest

_ID_BYTES = 4
"""Bytes of a packed token id."""


class AnswerReasoning(NamedTuple):
    """What becomes of the thinking in one answer."""

    is_shown: bool = True
    """Whether the answer has it; else only its tokens are counted."""
    is_stream: bool = True
    """Whether it is passed on as it comes; else when it is complete."""
    continued: str | None = None
    """The message that the answer goes on with; None: it is a new one."""


def read_reasoning(request: ChatRequest) -> AnswerReasoning | None:
    """What a chat wants of the thinking; None: it is content."""
    if request.separate_reasoning is False:
        return None
    last = request.messages[-1]
    continued = content_text(last) if request.continue_final_message else None
    return AnswerReasoning(request.include_reasoning is not False, request.stream_reasoning is not False, continued)


class ReasoningAssembler:
    """The thinking and the content of one sequence. assembler: shows the markers of thinking, and nothing has been
    pushed to it; packed_prompt: packed ids of the prompt in the tokenizer's tokens."""

    __slots__ = ("_assembler", "_held", "_num_tokens", "_reasoning", "_splitter", "num_reasoning_tokens")

    def __init__(
        self, assembler: TextAssembler, reasoning: AnswerReasoning, tokenizer: Tokenizer, packed_prompt: bytes
    ) -> None:
        self._assembler = assembler
        self._reasoning = reasoning
        self._splitter = _new_splitter(reasoning, tokenizer, packed_prompt)
        self._held: list[str] = []
        """Thinking that is passed on when it is complete."""
        self._num_tokens = 0
        """Tokens up to here, as long as the thinking may go on."""
        self.num_reasoning_tokens = None if self._splitter is None else 0
        """Tokens of the thinking so far; None: the model does not think."""

    @property
    def is_plain(self) -> bool:
        """Whether there will be no more thinking, and only a delta's own finish can end the text."""
        return (self._splitter is None or self._splitter.is_done) and self._assembler.is_plain

    def text(self, token_ids: Sequence[int]) -> str:
        return self._assembler.text(token_ids)

    def json_parts(self) -> JsonParts | None:
        return self._assembler.json_parts()

    def with_tokenizer(self, tokenizer: Tokenizer, packed_prompt: bytes = b"") -> "ReasoningAssembler":
        return ReasoningAssembler(self._assembler.with_tokenizer(tokenizer), self._reasoning, tokenizer, packed_prompt)

    def push(self, delta: Delta) -> TextPiece:
        if isinstance(delta, TextDelta):  # a provider sends content alone
            self._splitter = self.num_reasoning_tokens = None
        if self._splitter is None or self._splitter.is_done:
            return self._assembler.push(delta)
        piece: TextPiece | None = None
        for token in _single_tokens(delta):
            added = self._push_token(self._splitter, token)
            piece = added if piece is None else _join(piece, added)
            if piece.finish is not None:
                break
        assert piece is not None
        return piece

    def _push_token(self, splitter: ReasoningSplitter, delta: Delta) -> TextPiece:
        piece = self._assembler.push(delta)
        may_think = splitter.is_open
        reasoning, content = splitter.push(piece.text)
        if piece.finish is not None:
            rest = splitter.finish()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        if may_think:
            self._num_tokens += len(piece.token_ids)
            if splitter.has_thought:
                self.num_reasoning_tokens = self._num_tokens
        is_over = piece.finish is not None or not splitter.is_open
        return piece._replace(text=content, reasoning=self._show(reasoning, is_over=is_over))

    def _show(self, reasoning: str, *, is_over: bool) -> str:
        """The part of the thinking that is passed on now."""
        if not self._reasoning.is_shown:
            return ""
        if self._reasoning.is_stream:
            return reasoning
        self._held.append(reasoning)
        if not is_over:
            return ""
        shown, self._held = "".join(self._held), []
        return shown


def _new_splitter(reasoning: AnswerReasoning, tokenizer: Tokenizer, packed_prompt: bytes) -> ReasoningSplitter | None:
    form = tokenizer.reasoning_form
    if form is None:
        return None
    end = unpack_token_ids(packed_prompt[-PROMPT_END_TOKENS * _ID_BYTES :])
    prompt_end = tokenizer.decode(end, skip_special=False)
    return ReasoningSplitter(form, begins_inside=form.begins_inside(prompt_end, reasoning.continued))


def _single_tokens(delta: Delta) -> Iterator[Delta]:
    """The delta token by token, so that those of the thinking can be told from others. The last one has its finish."""
    last = len(delta.token_ids) - 1
    if last <= 0:
        yield delta
        return
    for index, token_id in enumerate(delta.token_ids):
        yield msgspec.structs.replace(
            delta,
            token_ids=[token_id],
            finish=delta.finish if index == last else None,
            logprobs=delta.logprobs and delta.logprobs[index : index + 1],
        )


def _join(piece: TextPiece, added: TextPiece) -> TextPiece:
    """Both pieces as one."""
    return added._replace(
        text=piece.text + added.text,
        reasoning=piece.reasoning + added.reasoning,
        token_ids=piece.token_ids + added.token_ids,
        logprobs=None if added.logprobs is None else [*(piece.logprobs or ()), *added.logprobs],
        offsets=[*piece.offsets, *added.offsets],
    )
