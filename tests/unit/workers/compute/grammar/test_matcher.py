"""A matcher stands wherever its answer is: ahead, back, elsewhere, and what may follow there is always the same."""

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import Constraint
from penstock.workers.compute.grammar.compiler import GrammarCompiler
from penstock.workers.compute.grammar.matcher import Allowed, GrammarFault, Matcher

SIZE = 256 + 3
WORDS = Constraint("regex", "ab(cd|ce)*f?")
MERGED = {256: b"ab", 257: b"cdc", 258: b"ef"}


@cache
def compiler() -> GrammarCompiler:
    tokens: Any = SimpleNamespace(
        token_bytes=[*[bytes([byte]) for byte in range(256)], *MERGED.values()],
        special_ids=frozenset(),
        eos_token_ids=frozenset(),
    )
    return GrammarCompiler(lambda: tokens, SIZE)


def fresh(constraint: Constraint = WORDS) -> Matcher:
    return compiler().compile(constraint, "t", [])


def state_of(matcher: Matcher) -> tuple[list[int], bool]:
    allowed, may_end = matcher.allowed()
    return allowed.row().nonzero()[0].tolist(), may_end


def walk(seed: int, length: int) -> list[int]:
    """Tokens that may follow each other."""
    draw, matcher, output = random.Random(seed), fresh(), list[int]()
    while len(output) < length and not matcher.is_complete:
        output.append(draw.choice(state_of(matcher)[0]))
        matcher.go_to(output)
    return output


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 5)), max_size=12))
def test_what_may_follow_is_what_may_follow_in_a_fresh_one(moves: list[tuple[int, int, int]]) -> None:
    """Each move settles some tokens of one walk and looks ahead along another one that begins the same."""
    matcher, num_settled, answer = fresh(), 0, walk(0, 20)
    for seed, num_more, num_ahead in moves:
        num_settled = min(len(answer), num_settled + num_more // 3)
        output = answer[:num_settled]
        other = walk(seed, 20)
        ahead = (other if other[:num_settled] == output else answer)[num_settled : num_settled + num_ahead]
        matcher.go_to(output, ahead)
        expected = fresh()
        expected.go_to([*output, *ahead])

        assert matcher.is_complete == expected.is_complete
        if not matcher.is_complete:
            assert state_of(matcher) == state_of(expected)


def test_it_comes_back_from_the_end_of_an_answer() -> None:
    matcher = fresh()
    matcher.go_to([256], [258 - 1, ord("d"), ord("f")])
    assert matcher.is_complete
    matcher.go_to([256], [ord("c")])

    assert state_of(matcher) == ([ord("d"), ord("e"), 258], False)


def test_a_draft_fits_as_far_as_the_grammar_goes() -> None:
    matcher = fresh()

    assert matcher.count_fitting([256, ord("c"), ord("d"), ord("x"), ord("c")]) == 3
    assert matcher.count_fitting([]) == 0
    assert matcher.try_step(256)
    assert not matcher.try_step(ord("x"))
    assert not matcher.try_step(SIZE)  # the id that stands for the end is no token
    assert state_of(matcher) == ([ord("c"), ord("f"), 257], True)


def test_a_token_that_does_not_fit_is_a_fault() -> None:
    matcher = fresh()

    with pytest.raises(GrammarFault, match="does not fit"):
        matcher.go_to([256, ord("x")])


def test_nothing_follows_a_whole_answer() -> None:
    matcher = fresh(Constraint("regex", "ab"))
    matcher.go_to([256])

    assert matcher.is_complete
    assert not matcher.try_step(ord("c"))
    assert matcher.count_fitting([ord("c")]) == 0
    with pytest.raises(GrammarFault):
        matcher.go_to([256, ord("c")])


@pytest.mark.parametrize("size", [31, 32, 33, 64])
def test_what_is_allowed_is_a_bit_a_token(size: int) -> None:
    allowed = Allowed(np.zeros(size // 32 + 1, dtype=np.uint32), size)
    assert allowed.is_empty()

    allowed.add([0, size - 1])

    assert not allowed.is_empty()
    assert [token_id for token_id in range(size) if token_id in allowed] == [0, size - 1]
    assert allowed.row().nonzero()[0].tolist() == [0, size - 1]
    assert len(allowed.row()) == size
