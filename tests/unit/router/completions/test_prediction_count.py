import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.prediction_count import PredictionCount
from penstock.wire.frames import pack_token_ids

tokens = st.lists(st.integers(0, 4), max_size=30)


def count(prediction: list[int], *answer: list[int]) -> PredictionCount:
    found = PredictionCount(pack_token_ids(prediction))
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
