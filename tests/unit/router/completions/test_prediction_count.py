"""What of a prediction is found in answers, and what looking for it costs."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.prediction_count import LONGEST, SHORTEST, PredictedTokens, PredictionCount
from penstock.wire.frames import pack_token_ids
from tests.yardstick import rested

tokens = st.lists(st.integers(0, 4), max_size=30)
few_kinds = st.lists(st.integers(0, 2), max_size=80)
NUM_PREDICTED, MAX_S = 16384, 1.0
"""CPU seconds, by the yardstick: a search of the whole prediction for each token takes three times as long or more."""


def count(prediction: list[int], *answer: list[int]) -> PredictionCount:
    found = PredictionCount(PredictedTokens(pack_token_ids(prediction)))
    for part in answer:
        found.push(part)
    return found


@pytest.mark.parametrize(
    ("prediction", "answer", "accepted"),
    [
        ("abcdef", "abcdef", "abcdef"),
        ("abcdef", "abc", "abc"),
        ("abc", "abcdef", "abc"),
        ("abcdef", "xyz", ""),
        ("abcdef", "abXdef", "abdef"),  # changed
        ("abcdef", "abXYcdef", "abcdef"),  # put in
        ("abcdef", "abef", "abef"),  # left out
        ("abcdef", "abXf", "ab"),  # one token alone is found by chance
        ("abcdef", "defabc", "abcdef"),  # moved
        ("abcabc", "abcXabc", "abcabc"),  # what stands there twice: the second one
        ("abc", "abcXabcXabc", "abc"),  # counts once
        ("ababababab", "abXab", "abab"),
        ("", "abc", ""),
    ],
)
def test_tokens_of_the_prediction_that_stand_in_the_answer_are_counted(
    prediction: str, answer: str, accepted: str
) -> None:
    found = count([*prediction.encode()], [*answer.encode()])

    assert (found.num_accepted, found.num_rejected) == (len(accepted), len(prediction) - len(accepted))


def test_token_ids_of_any_size_are_told_apart() -> None:
    ids = [0, 255, 256, 0xD800, 0xFFFF, 0x10000, 262143]

    assert count(ids, ids).num_rejected == 0
    assert count([256, 0, 1], [1, 0]).num_accepted == 0  # whose bytes overlap


@given(tokens, tokens, st.integers(0, 30))
def test_no_cut_of_the_answer_changes_a_count_and_nothing_counts_twice(
    prediction: list[int], answer: list[int], cut: int
) -> None:
    found, cut_up = count(prediction, answer), count(prediction, answer[:cut], answer[cut:])

    assert found.num_accepted == cut_up.num_accepted
    assert 0 <= found.num_accepted <= min(len(prediction), len(answer))
    assert found.num_accepted + found.num_rejected == len(prediction)


@given(tokens, tokens)
def test_an_answer_that_begins_as_predicted_has_all_of_that(prediction: list[int], rest: list[int]) -> None:
    assert count(prediction, prediction + rest).num_rejected == 0


def search_plainly(prediction: str, answer: str) -> int:
    """Tokens accepted, by searching the whole prediction for each length."""
    place, accepted, is_found, num_lost, tail = 0, set[int](), True, 0, ""
    for token in answer:
        tail = (tail + token)[-LONGEST:]
        if is_found and prediction[place : place + 1] == token:
            accepted.add(place)
            place += 1
            continue
        is_found, num_lost = False, num_lost + 1
        for length in range(len(tail), SHORTEST - 1, -1):
            num_known = max(0, length - num_lost)
            start = prediction.find(tail[-length:], max(0, place - num_known))
            start = prediction.find(tail[-length:]) if start < 0 else start
            if start >= 0:
                place, is_found, num_lost = start + length, True, 0
                accepted |= {*range(start + num_known, place)}
                break
    return len(accepted)


@given(few_kinds, st.lists(few_kinds, min_size=1, max_size=3))
def test_the_longest_end_wins_and_of_its_places_the_next_one(prediction: list[int], answers: list[list[int]]) -> None:
    shared = PredictedTokens(pack_token_ids(prediction))
    for answer in answers:
        found = PredictionCount(shared)
        found.push(answer)

        assert found.num_accepted == search_plainly("".join(map(chr, prediction)), "".join(map(chr, answer)))


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 16])
def test_answers_that_leave_a_long_prediction_all_the_time_cost_little(num_kinds: int) -> None:
    rng = random.Random(num_kinds)
    shared = PredictedTokens(pack_token_ids(rng.choices(range(num_kinds), k=NUM_PREDICTED)))
    answers = [rng.choices(range(num_kinds + 1), k=NUM_PREDICTED) for _ in range(2)]
    begin_s = time.thread_time()
    for answer in answers:
        PredictionCount(shared).push(answer)

    assert rested(time.thread_time() - begin_s) < MAX_S
