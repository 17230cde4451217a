import time

from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.engine.lookups import LENGTHS, MAX_MISALIGNED, WINDOW
from penstock.workers.engine.sequence import Chunk, Sequence


def sequence(token_ids: list[int]) -> Sequence:
    return Sequence("r", token_ids, SamplingParams(max_tokens=100), len(token_ids), [], b"", 0.0)


def propose(token_ids: list[int], count: int = 4, drafter: NgramDrafter | None = None) -> list[int]:
    seq = sequence(token_ids)
    return (drafter or NgramDrafter()).propose([Chunk(seq, seq.num_tokens - 1, 1, count)])[0]


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 2, 3]) == [4, 5, 6, 9]


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert propose([1, 2, 3, 7, 8, 2, 3, 9, 1, 2, 3], 1) == [7]


def test_of_equally_long_matches_the_latest_wins() -> None:
    assert propose([2, 3, 7, 2, 3, 8, 2, 3], 1) == [8]


def test_tokens_seen_once_or_alone_propose_nothing() -> None:
    assert [propose([1, 2, 3, 4]), propose([7]), propose([7, 7]), propose([5, 1, 5, 2, 5])] == [[], [], [], []]


def test_a_loop_goes_on() -> None:
    assert propose([1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert propose([0] * 5, 3) == [0, 0, 0]


def test_bytes_that_look_like_a_token_between_two_tokens_are_no_match() -> None:
    between = [0x105, 0x200, 0x300]  # little-endian: 05 01 00 00 | 00 02 00 00 | 00 03 00 00 holds the bytes of 1 and 2

    assert propose([*between, 9, 1, 2]) == []
    assert propose([1, 2, 7, *between * (MAX_MISALIGNED - 1), 9, 1, 2], 1) == [7]
    assert propose([1, 2, 7, *between * MAX_MISALIGNED, 9, 1, 2], 1) == []


def test_tokens_that_came_since_are_looked_at() -> None:
    drafter, seq = NgramDrafter(), sequence([4, 5, 6, 7])
    chunk = Chunk(seq, 3, 1, 2)
    assert drafter.propose([chunk]) == [[]]
    seq.token_ids += [4, 5]

    assert drafter.propose([chunk]) == [[6, 7]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_it_proposes_what_a_plain_search_finds(token_ids: list[int], count: int) -> None:
    def plain() -> list[int]:
        for length in LENGTHS:
            suffix = token_ids[-length:]
            for start in range(len(token_ids) - length - 1, -1, -1):
                if len(suffix) == length and token_ids[start : start + length] == suffix:
                    found = list(token_ids)
                    while len(found) < len(token_ids) + count:
                        found.append(found[start + length + len(found) - len(token_ids)])
                    return found[len(token_ids) :]
        return []

    assert propose(token_ids, count) == plain()


def test_a_context_far_beyond_the_window_costs_well_below_a_millisecond() -> None:
    seq = sequence([(31 * place) % 40009 for place in range(40_000)] + [50_000, 50_001])
    drafter, chunk = NgramDrafter(), Chunk(seq, seq.num_tokens - 1, 1, 4)
    drafter.propose([chunk])
    costs = []
    for _ in range(50):
        begin_s = time.thread_time()
        assert drafter.propose([chunk]) == [[]]
        costs.append(time.thread_time() - begin_s)

    assert seq.num_tokens > 2 * WINDOW
    assert sorted(costs)[len(costs) // 2] < 1e-3
