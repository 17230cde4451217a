"""Pieces of an answer as blocks."""

import pytest

from penstock.router.completions.text_assembly import TextPiece
from penstock.router.dialects.blocks import Begin, Blocks, End, Part, Step
from penstock.router.routing.request import CallDelta
from penstock.wire.errors import EngineFault

FIRST = CallDelta(0, id="a", name="f")
SECOND = CallDelta(1, id="b", name="g")


def pieces(*given: TextPiece) -> list[Step]:
    blocks = Blocks()
    steps = [step for piece in given for step in blocks.push(piece)]
    return [*steps, *blocks.finish()]


def piece(text: str = "", *calls: CallDelta) -> TextPiece:
    return TextPiece(text, [], calls=calls)


def test_texts_that_follow_each_other_are_one_block() -> None:
    assert pieces(piece("a"), piece(), piece("b")) == [Begin(None), Part("a"), Part("b"), End()]
    assert pieces(piece()) == []


def test_a_block_ends_before_the_next_one_begins() -> None:
    assert pieces(piece("a", FIRST), piece("", CallDelta(0, "{}")), piece("", SECOND), piece("b")) == [
        *(Begin(None), Part("a"), End()),
        *(Begin(FIRST), Part("{}"), End()),
        *(Begin(SECOND), End()),
        *(Begin(None), Part("b"), End()),
    ]


def test_in_one_piece_the_open_call_goes_on_before_the_text() -> None:
    steps = pieces(piece("", FIRST), piece("then", CallDelta(0, "{}"), SECOND, CallDelta(1, "[]")))

    assert steps == [
        *(Begin(FIRST), Part("{}"), End()),
        *(Begin(None), Part("then"), End()),
        *(Begin(SECOND), Part("[]"), End()),
    ]


def test_a_call_that_goes_on_behind_another_one_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="mixed"):
        pieces(piece("", FIRST), piece("", SECOND), piece("", CallDelta(0, "{}")))
