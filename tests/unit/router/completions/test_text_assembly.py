import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.text_assembly import Shown, TextAssembler, TextPiece
from penstock.text.stops import StopAutomaton
from penstock.wire.frames import Delta, Finish, TokenLogprobs
from tests.unit.router.http_fakes import IM_END, IM_START, TOKENIZER


def pushed(assembler: TextAssembler, *pieces: Sequence[int], finish: Finish | None = Finish.LENGTH) -> list[TextPiece]:
    last = len(pieces) - 1
    return [
        assembler.push(Delta(1, list(ids), finish if number == last else None)) for number, ids in enumerate(pieces)
    ]


def text(pieces: Sequence[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_half_a_character_is_held_back() -> None:
    first, second = pushed(TextAssembler(TOKENIZER), [0xC3], [0xA9])

    assert (first.text, second.text) == ("", "é")


def test_a_character_that_never_completes_is_replaced_at_the_end() -> None:
    assert text(pushed(TextAssembler(TOKENIZER), b"a", [0xC3])) == "a\N{REPLACEMENT CHARACTER}"


def test_an_end_token_has_no_text_but_counts() -> None:
    (piece,) = pushed(TextAssembler(TOKENIZER), [*b"ok", IM_END], finish=Finish.STOP)

    assert piece == TextPiece("ok", [*b"ok", IM_END], "stop")


@pytest.mark.parametrize(("finish", "reason"), [(Finish.STOP, "stop"), (Finish.LENGTH, "length")])
def test_the_engines_finish_is_the_reason(finish: Finish, reason: str) -> None:
    (piece,) = pushed(TextAssembler(TOKENIZER, StopAutomaton(("never",))), b"ok", finish=finish)

    assert piece.finish == reason


def test_a_stop_string_ends_the_answer_and_the_tokens_behind_it_do_not_count() -> None:
    logprobs = [TokenLogprobs(-float(number)) for number in range(6)]

    piece = TextAssembler(TOKENIZER, StopAutomaton(("c",))).push(Delta(1, list(b"abcdef"), logprobs=logprobs))

    assert piece == TextPiece("ab", list(b"abc"), "stop", logprobs[:3], [0, 1, 2], stop_string="c")


def test_a_stop_string_counts_only_behind_min_tokens() -> None:
    assert text(pushed(TextAssembler(TOKENIZER, StopAutomaton(("a",)), min_tokens=3), b"aaab", b"ba")) == "aaabb"


def test_what_may_become_a_stop_string_is_held_back_and_then_released() -> None:
    pieces = pushed(TextAssembler(TOKENIZER, StopAutomaton(("END",))), b"xEN", b"y")

    assert [piece.text for piece in pieces] == ["x", "ENy"]


def test_a_stop_string_beats_the_length_it_is_complete_at() -> None:
    (piece,) = pushed(TextAssembler(TOKENIZER, StopAutomaton(("z",))), b"xyz", finish=Finish.LENGTH)

    assert (piece.text, piece.finish) == ("xy", "stop")


def test_what_is_left_at_the_end_can_complete_a_stop_string() -> None:
    (piece,) = pushed(
        TextAssembler(TOKENIZER, StopAutomaton(("\N{REPLACEMENT CHARACTER}",))), [97, 0xC3], finish=Finish.LENGTH
    )

    assert (piece.text, piece.finish) == ("a", "stop")


def test_offsets_are_where_each_token_begins() -> None:
    (piece,) = pushed(TextAssembler(TOKENIZER, has_offsets=True), "aéb".encode())

    assert piece.offsets == [0, 1, 1, 2]


@given(
    st.text(alphabet="abé€", max_size=12), st.lists(st.integers(0, 30)), st.sampled_from([(), ("ab",), ("b", "é€a")])
)
def test_the_text_does_not_depend_on_how_it_was_cut(answer: str, cuts: list[int], stops: tuple[str, ...]) -> None:
    data = answer.encode()
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    parts = [data[a:b] for a, b in itertools.pairwise(places)] or [b""]

    cut = pushed(TextAssembler(TOKENIZER, StopAutomaton(stops)), *parts)
    whole = pushed(TextAssembler(TOKENIZER, StopAutomaton(stops)), data)
    until = next((number for number, piece in enumerate(cut) if piece.finish), len(cut) - 1)

    assert text(cut[: until + 1]) == text(whole)
    assert [token for piece in cut[: until + 1] for token in piece.token_ids] == whole[0].token_ids


SHOWS_SPECIAL, SHOWS_ALL = Shown(special_tokens=True), Shown(special_tokens=True, stop_string=True)


@pytest.mark.parametrize("stops", [(), ("zz",)])
@pytest.mark.parametrize(
    ("shown", "finish", "expected"),
    [
        (Shown(), Finish.STOP, "ab"),
        (SHOWS_SPECIAL, Finish.STOP, "a<|im_start|>b"),
        (SHOWS_SPECIAL, Finish.LENGTH, "a<|im_start|>b<|im_end|>"),
        (SHOWS_ALL, Finish.STOP, "a<|im_start|>b<|im_end|>"),
    ],
)
def test_special_tokens_are_shown_where_they_are_wanted_but_not_the_one_that_ends_the_answer(
    stops: tuple[str, ...], shown: Shown, finish: Finish, expected: str
) -> None:
    assembler = TextAssembler(TOKENIZER, StopAutomaton(stops), shown=shown)
    pieces = pushed(assembler, b"a", [IM_START, *b"b"], [IM_END], finish=finish)

    assert text(pieces) == expected
    assert [token_id for piece in pieces for token_id in piece.token_ids] == [*b"a", IM_START, *b"b", IM_END]


def test_a_stop_string_is_part_of_the_answer_where_it_is_wanted() -> None:
    assembler = TextAssembler(TOKENIZER, StopAutomaton(("cd",)), shown=Shown(stop_string=True))

    (piece,) = pushed(assembler, b"abcdef")

    assert (piece.text, piece.token_ids, piece.finish) == ("abcd", [*b"abcd"], "stop")


def test_another_models_assembler_shows_the_same() -> None:
    assembler = TextAssembler(TOKENIZER, StopAutomaton(("c",)), shown=SHOWS_ALL).with_tokenizer(TOKENIZER)

    assert text(pushed(assembler, [IM_START, *b"bcd"])) == "<|im_start|>bc"
