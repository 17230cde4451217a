"""Pieces of an answer as blocks, one after another: texts and tool calls. Pure.

Invariant: a block has ended before the next one begins, so whatever its API calls them, its events are in order.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.router.completions.text_assembly import TextPiece
from penstock.router.routing.request import CallDelta
from penstock.wire.errors import EngineFault


class Begin(NamedTuple):
    """A block begins. call: with its id and name; None: it is a text."""

    call: CallDelta | None


class Part(NamedTuple):
    """The next part of the open block: of its text, or of the JSON of the call's arguments."""

    text: str


class End(NamedTuple):
    """The open block ends."""


Step = Begin | Part | End
_END = End()


class Blocks:
    """The blocks of one answer."""

    def __init__(self) -> None:
        self._is_open = False
        self._call: int | None = None
        """Number of the call that is open; None: a text is, or nothing."""
        self._num_calls = 0

    def push(self, piece: TextPiece) -> Iterator[Step]:
        """What a piece adds. Where it has a text and calls, the call that is open goes on before the text, and others
        begin behind it. Raises EngineFault for a call that goes on after another one has begun."""
        open_call = self._call if self._is_open else None
        for call in piece.calls:
            if call.number == open_call:
                yield from _part(call.arguments)
        if piece.text:
            yield from self.text(piece.text)
        for call in piece.calls:
            if call.number != open_call:
                yield from self._add(call)

    def text(self, text: str) -> Iterator[Step]:
        """What a text alone adds."""
        if not self._is_open or self._call is not None:
            yield from self.finish()
            self._is_open = True
            yield Begin(None)
        yield Part(text)

    def finish(self) -> Iterator[Step]:
        """The end of the block that is open, if there is one."""
        if self._is_open:
            self._is_open, self._call = False, None
            yield _END

    def _add(self, call: CallDelta) -> Iterator[Step]:
        if call.number == self._num_calls:
            yield from self.finish()
            self._is_open, self._call = True, call.number
            self._num_calls += 1
            yield Begin(call)
        elif not self._is_open or call.number != self._call:
            raise EngineFault("The provider has mixed the arguments of two tool calls.")
        yield from _part(call.arguments)


def _part(text: str) -> Iterator[Step]:
    if text:
        yield Part(text)
