"""Text of an answer into content and tool calls, for requests with tools. Pure.

Invariants: content and calls together are the answer's text, but for markers and white space around calls; an answer
with a call that stops by itself has the finish `tool_calls`; requests without tools never come here. What a model
thinks is taken out before (`reasoning_assembly`), and is never read as a call.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.router.completions.text_assembly import Assembler, TextPiece
from penstock.router.routing.request import CallDelta, TextDelta
from penstock.text.json_parts import JsonParts
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.events import CallArguments, CallBegin, Content, Event
from penstock.text.tools.forms import ToolForm
from penstock.text.tools.parser import ToolParser
from penstock.text.tools.prompt import short_id
from penstock.wire.frames import Delta

_ID_BYTES = 12


class AnswerTools(NamedTuple):
    """What the assemblers of one request know of its tools."""

    names: frozenset[str]
    """Functions that may be called."""
    is_parallel: bool
    """Whether an answer may have several calls; else the first one counts, and the others are left out."""
    is_stream: bool
    """Whether a call is passed on as it comes; else when it is complete."""


class ToolAssembler:
    """The content and the calls of one sequence. assembler: shows markers, and nothing has been pushed to it. seed: any
    number, of which the ids of the calls are made."""

    __slots__ = ("_assembler", "_form", "_num_calls", "_parser", "_seed", "_tools")

    def __init__(self, assembler: Assembler, tools: AnswerTools, form: ToolForm, seed: int) -> None:
        self._assembler = assembler
        self._tools = tools
        self._form = form
        self._parser = ToolParser(form.call_format, tools.names, holds_calls=not tools.is_stream)
        self._seed = seed
        self._num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Never: any text may begin a call."""
        return False

    def text(self, token_ids: Sequence[int]) -> str:
        return self._assembler.text(token_ids)

    def json_parts(self) -> JsonParts | None:
        return self._assembler.json_parts()

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._assembler.num_reasoning_tokens

    def with_tokenizer(self, tokenizer: Tokenizer, packed_prompt: bytes = b"") -> "ToolAssembler":
        assembler = self._assembler.with_tokenizer(tokenizer, packed_prompt)
        return ToolAssembler(assembler, self._tools, tokenizer.tool_form, self._seed)

    def push(self, delta: Delta) -> TextPiece:
        piece = self._assembler.push(delta)
        if isinstance(delta, TextDelta):  # a provider has found the calls itself
            self._num_calls += sum(call.name is not None for call in delta.calls)
            return self._with_finish(piece._replace(calls=delta.calls))
        events = self._parser.push(piece.text)
        if piece.finish is not None:
            events += self._parser.finish()
        content = "".join(event.text for event in events if isinstance(event, Content))
        return self._with_finish(piece._replace(text=content, calls=list(self._read(events))))

    def _read(self, events: Iterable[Event]) -> Iterable[CallDelta]:
        for event in events:
            if isinstance(event, Content) or (event.number > 0 and not self._tools.is_parallel):
                continue
            if isinstance(event, CallBegin):
                self._num_calls += 1
                yield CallDelta(event.number, id=self._call_id(event.number), name=event.name)
            elif isinstance(event, CallArguments):
                yield CallDelta(event.number, event.text)

    def _with_finish(self, piece: TextPiece) -> TextPiece:
        return piece._replace(finish="tool_calls") if piece.finish == "stop" and self._num_calls else piece

    def _call_id(self, number: int) -> str:
        digest = hashlib.blake2b(f"{self._seed}-{number}".encode(), digest_size=_ID_BYTES, person=b"penstock-call")
        call_id = f"call_{digest.hexdigest()}"
        return short_id(call_id) if self._form.has_short_ids else call_id
