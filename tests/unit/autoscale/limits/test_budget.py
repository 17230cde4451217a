"""Division of GPUs: worked examples, and what holds for every division."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.autoscale.limits.budget import Claim, divide, grant


@pytest.mark.parametrize(
    ("gpus", "claims", "expected"),
    [
        (8, [Claim("a", 1, 1, 1, 3), Claim("b", 0, 1, 1, 4)], {"a": 3, "b": 4}),
        (6, [Claim("a", 1, 1, 1, 3), Claim("b", 0, 1, 1, 4)], {"a": 3, "b": 3}),
        (6, [Claim("a", 1, 1, 1, 9), Claim("b", 0, 1, 2, 4)], {"a": 4, "b": 2}),  # a floor before a higher want
        (2, [Claim("b", 0, 1, 2, 2), Claim("a", 1, 1, 2, 2)], {"a": 2, "b": 0}),  # floors by priority
        (7, [Claim("a", 1, 4, 0, 2), Claim("b", 0, 1, 0, 9)], {"a": 1, "b": 3}),  # what is too little for one
        (5, [Claim("a", 0, 1, 0, 5), Claim("b", 0, 1, 0, 5)], {"a": 3, "b": 2}),  # equals, one by one
        (5, [Claim("a", 0, 1, 0, 5), Claim("b", 0, 1, 0, 5, target=4)], {"a": 1, "b": 4}),  # and what one has
        (6, [Claim("a", 0, 2, 0, 3), Claim("b", 0, 1, 0, 3)], {"a": 2, "b": 2}),  # by GPUs, not replicas
        (0, [Claim("a", 0, 1, 1, 1)], {"a": 0}),
    ],
)
def test_worked_examples(gpus: int, claims: list[Claim], expected: dict[str, int]) -> None:
    assert divide(gpus, claims) == expected


def test_gpus_of_replicas_that_stop_are_not_given_twice() -> None:
    before = [Claim("a", 1, 1, 1, 4, target=2, num_held=2), Claim("b", 0, 1, 1, 4, target=4, num_held=4)]
    shares = divide(6, before)
    assert shares == {"a": 4, "b": 2}
    assert grant(6, before, shares) == {"a": 2, "b": 2}, "b gives way first"

    one_gone = [before[0], before[1]._replace(target=2, num_held=3)]
    assert grant(6, one_gone, divide(6, one_gone)) == {"a": 3, "b": 2}

    gone = [before[0], before[1]._replace(target=2, num_held=2)]
    assert grant(6, gone, divide(6, gone)) == {"a": 4, "b": 2}


@st.composite
def claims(draw: st.DrawFn) -> list[Claim]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        least = draw(st.integers(0, 4))
        wanted = least + draw(st.integers(0, 6))
        target = draw(st.integers(0, 8))
        found.append(
            Claim(
                f"p{number}",
                draw(st.integers(-1, 2)),
                draw(st.integers(1, 4)),
                least,
                wanted,
                target,
                target + draw(st.integers(0, 3)),
            )
        )
    return found


@settings(max_examples=300)
@given(st.integers(0, 40), claims())
def test_the_budget_is_never_exceeded_and_nobody_gets_more_than_it_wants(gpus: int, asked: list[Claim]) -> None:
    shares = divide(gpus, asked)
    now = grant(gpus, asked, shares)

    assert sum(shares[claim.pool] * claim.gpus for claim in asked) <= gpus
    for claim in asked:
        assert 0 <= shares[claim.pool] <= claim.wanted
        assert now[claim.pool] <= shares[claim.pool]
    held = sum(max(now[claim.pool], claim.target, claim.num_held) * claim.gpus for claim in asked)
    before = sum(max(claim.target, claim.num_held) * claim.gpus for claim in asked)
    assert held <= max(gpus, before), "what is granted beside what is still held"


@settings(max_examples=300)
@given(st.integers(0, 40), claims(), st.integers(1, 6))
def test_a_higher_pool_never_gets_less_because_a_lower_one_wants_more(gpus: int, asked: list[Claim], more: int) -> None:
    lowest = min(asked, key=lambda claim: claim.priority)
    greedy = [claim._replace(wanted=claim.wanted + more) if claim is lowest else claim for claim in asked]

    before, after = divide(gpus, asked), divide(gpus, greedy)

    assert all(after[claim.pool] == before[claim.pool] for claim in asked if claim.priority > lowest.priority)


@settings(max_examples=300)
@given(st.integers(0, 40), claims())
def test_what_was_divided_stays_as_it_is_while_nothing_changes(gpus: int, asked: list[Claim]) -> None:
    shares = divide(gpus, asked)
    met = [claim._replace(target=shares[claim.pool], num_held=shares[claim.pool]) for claim in asked]

    assert divide(gpus, met) == shares
    assert grant(gpus, met, shares) == shares
