from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.tiers.curve import (
    Pair,
    Prices,
    area_above_random,
    draw_curve,
    final_answer,
    interval,
    largest_area,
    match_of,
    pair_of,
    propose_for_agreement,
    propose_for_share,
)
from penstock.cli.tiers.questions import Answer, Message, Question

PAIRS = st.lists(
    st.builds(
        Pair,
        st.floats(-9, 0, width=16),
        st.booleans(),
        st.floats(0, 1),
        st.floats(0, 1),
        st.floats(0, 1),
    ),
    min_size=1,
    max_size=40,
)


def pair(score: float, agrees: bool) -> Pair:
    return Pair(score, agrees, 2.0, 1.0, 10.0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She makes 9 * 2 = $18 every day.", "18"),
        ("1,800.0 in all", "1800"),
        ("#### -3.50", "-3.5"),
        ("from 3 to 10", "10"),
        ("No  number, HERE!", "no number here"),
    ],
)
def test_the_last_number_is_the_final_answer(text: str, answer: str) -> None:
    assert final_answer(text, "number") == answer


def test_words_are_compared_without_case_spaces_and_punctuation() -> None:
    assert final_answer(" The  Answer is: 42.\n", "text") == "the answer is 42"


@pytest.mark.parametrize(
    ("label", "match"), [("a long way\n#### 18", "number"), ("18 %", "number"), ("Paris", "text"), (None, "text")]
)
def test_the_label_says_what_is_compared(label: str | None, match: str) -> None:
    question = Question((Message("user", "?"),), label)

    assert match_of(question, "auto") == match
    assert match_of(question, "text") == "text"


def test_the_first_tokens_are_judged_and_priced() -> None:
    question = Question((Message("user", "?"),), "#### 4")
    edge = Answer("edge", "a", "k", 9, "it is 4", 10, (-1.0, -3.0, -8.0))
    cloud = Answer("cloud", "b", "k", 9, "4.0", 20, (-0.1,))

    assert pair_of(question, edge, cloud, 2, "auto", Prices(1e6, 2e6), Prices(1e6, 3e6)) == Pair(
        -2.0, True, 10 + 6, 10 + 4, 20 + 3, edge_is_right=True, cloud_is_right=True
    )
    assert edge.mean_logprob(9) == -4.0


def test_the_curve_sends_the_least_sure_on_first() -> None:
    points = draw_curve([pair(-1.0, True), pair(-3.0, False), pair(-2.0, True), pair(-2.0, False)])

    assert [(point.threshold, point.share, point.agreement) for point in points] == [
        (-3.0, 0.0, 0.5),
        (-2.5, 0.25, 0.75),
        (-1.5, 0.75, 1.0),
        (0.0, 1.0, 1.0),
    ]
    assert [point.cost for point in points] == [2.0, (11 + 6) / 4, (33 + 2) / 4, 11.0]


def test_what_is_wanted_is_proposed() -> None:
    points = draw_curve([pair(-4.0, False), pair(-3.0, True), pair(-2.0, False), pair(-1.0, True)])

    assert propose_for_agreement(points, 0.7).share == 0.25
    assert propose_for_agreement(points, 1.0).share == 0.75
    assert propose_for_agreement(points, 0.0).share == 0.0
    assert propose_for_share(points, 0.6).share == 0.5
    assert propose_for_share(points, 0.1).share == 0.0


def test_doubt_that_knows_has_the_largest_area_and_doubt_that_errs_a_negative_one() -> None:
    right = [pair(-2.0 if number < 30 else -1.0, number >= 30) for number in range(100)]
    wrong = [each._replace(score=-3.0 - each.score) for each in right]

    assert area_above_random(right) == pytest.approx(largest_area(right)) == pytest.approx(0.3 * 0.7 / 2)
    assert area_above_random(wrong) == pytest.approx(-largest_area(right))
    assert interval(right, 200).low > 0 > interval(wrong, 200).high


def test_doubt_that_says_nothing_is_no_better_than_drawing() -> None:
    random = Random(1)
    pairs = [pair(random.random() - 1, random.random() < 0.6) for _ in range(400)]

    bounds = interval(pairs, 200)
    assert bounds.low < 0 < bounds.high


@given(PAIRS)
def test_a_curve_goes_from_none_to_all_and_agreement_never_falls(pairs: list[Pair]) -> None:
    points = draw_curve(pairs)

    assert (points[0].share, points[-1].share, points[-1].agreement) == (0.0, 1.0, 1.0)
    assert points == sorted(points, key=lambda point: (point.share, point.agreement))
    for point in points:
        sent = sum(each.score < point.threshold for each in pairs)
        assert sent == pytest.approx(point.share * len(pairs)) or point is points[-1]
    assert -largest_area(pairs) - 1e-9 <= area_above_random(pairs) <= largest_area(pairs) + 1e-9
