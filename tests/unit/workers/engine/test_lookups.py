"""What followed where a sequence's end stood before, and how likely it is to follow again."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engine.lookups import LENGTHS, MOST_MATCHED, SHORTEST, Chances, Found, Packed, look_up


def find_slowly(token_ids: list[int], count: int) -> Found | None:
    """`look_up` by its definition: every earlier place, every length."""
    end = len(token_ids)
    for length in LENGTHS:
        places = [at for at in range(end - length) if token_ids[at : at + length] == token_ids[end - length :]]
        if not places or end < length:
            continue
        place = places[-1] + length
        matched = length
        while matched < MOST_MATCHED and matched < place and token_ids[place - matched - 1] == token_ids[-matched - 1]:
            matched += 1
        behind = itertools.cycle(token_ids[place:])
        return Found(matched, list(itertools.islice(behind, count)))
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5))
def test_it_finds_what_a_search_of_all_places_finds(token_ids: list[int], count: int) -> None:
    assert look_up(Packed(), token_ids, count) == find_slowly(token_ids, count)


@given(st.lists(st.integers(0, 2), min_size=4, max_size=40))
def test_tokens_that_come_later_are_found_too(token_ids: list[int]) -> None:
    packed = Packed()
    for end in range(1, len(token_ids) + 1):
        assert look_up(packed, token_ids[:end], 2) == find_slowly(token_ids[:end], 2)


def test_the_match_is_counted_beyond_what_is_searched_for() -> None:
    text = list(range(100, 112))

    assert look_up(Packed(), [*text, 7, 8, *text], 2) == Found(12, [7, 8])
    assert look_up(Packed(), [9, *text[-SHORTEST:], 7, 8, *text[-SHORTEST:]], 1) == Found(SHORTEST, [7])
    assert look_up(Packed(), [1, 2, 3, 4], 3) is None
    assert look_up(Packed(), [*text, *text], 0) is None, "no place for a draft"
    assert look_up(Packed(), list(range(40)) * 2, 1) == Found(MOST_MATCHED, [0])


def test_at_first_a_longer_match_is_likelier_to_go_on() -> None:
    chances = Chances()

    assert chances.list(2, 3) == pytest.approx([1 / 2, 1 / 2 * 2 / 3, 1 / 2 * 2 / 3 * 3 / 4])
    assert chances.list(8, 1) < chances.list(12, 1)
    assert chances.list(MOST_MATCHED, 2)[1] == pytest.approx((1 - 1 / MOST_MATCHED) ** 2)


def test_chances_become_what_verified_drafts_show() -> None:
    chances = Chances()
    for _ in range(1500):
        chances.learn(3, 2, 1)  # the first token behind three is right, and the next, behind four, is not

    assert chances.list(3, 2) == pytest.approx([1.0, 0.0], abs=0.02)
    assert chances.list(2, 1) == [0.5], "nothing was learned of two"
    for _ in range(1500):
        chances.learn(3, 1, 0)
    assert chances.list(3, 1)[0] < 0.1, "what was learned long ago fades"


def test_what_is_cut_off_tells_nothing() -> None:
    chances = Chances()
    before = chances.list(5, 4)
    chances.learn(5, 0, 0)

    assert chances.list(5, 4) == before


def test_a_chance_that_is_not_tried_comes_back() -> None:
    chances = Chances()
    for _ in range(200):
        chances.learn(2, 1, 0)
    low = chances.list(2, 1)[0]
    for _ in range(2000):
        chances.forget(2)

    assert low < 0.1
    assert chances.list(2, 1)[0] == pytest.approx(0.5, abs=0.02)
