"""Tokens of a step for the prompts of each tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import SamplingParams
from penstock.workers.engine.prompt_shares import divide
from penstock.workers.engine.sequence import Sequence


def prompt(tenant: str, num_tokens: int, weight: float = 1.0) -> Sequence:
    seq = Sequence("id", list(range(num_tokens)), SamplingParams(max_tokens=1), num_tokens, [], b"", 0.0)
    seq.tenant, seq.weight = tenant, weight
    return seq


def test_one_tenant_alone_divides_with_nobody() -> None:
    assert divide(100, [prompt("a", 10), prompt("a", 500)]) is None
    assert divide(100, []) is None
    assert divide(100, [prompt("a", 10, 0.0), prompt("b", 500, 0.0)]) is None


@pytest.mark.parametrize(
    ("prompts", "shares"),
    [
        ([("a", 500, 1.0), ("b", 500, 1.0)], {"a": 50, "b": 50}),
        ([("a", 500, 3.0), ("b", 500, 1.0)], {"a": 75, "b": 25}),
        ([("a", 500, 1.0), ("b", 20, 1.0)], {"a": 80, "b": 20}),
        ([("a", 500, 1.0), ("a", 500, 1.0), ("b", 500, 1.0)], {"a": 50, "b": 50}),
        ([("a", 30, 1.0), ("b", 20, 1.0)], {"a": 30, "b": 20}),
        ([("a", 90, 1.0), ("b", 20, 1.0), ("c", 90, 1.0)], {"a": 40, "b": 20, "c": 40}),
    ],
)
def test_who_wants_little_gets_it_and_the_others_divide_the_rest(
    prompts: list[tuple[str, int, float]], shares: dict[str, int]
) -> None:
    assert divide(100, [prompt(*each) for each in prompts]) == shares


@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 400), st.sampled_from([1.0])), min_size=1),
)
def test_nothing_is_given_twice_and_everybody_gets_something(budget: int, wanted: list[tuple[str, int, float]]) -> None:
    shares = divide(budget, [prompt(*each) for each in wanted])
    if shares is None:
        return
    total = {tenant: sum(tokens for other, tokens, _ in wanted if other == tenant) for tenant in shares}

    assert sum(shares.values()) <= max(budget, len(shares))
    assert all(1 <= shares[tenant] <= total[tenant] for tenant in shares)
    unmet = [tenant for tenant in shares if shares[tenant] < total[tenant]]
    if unmet and budget >= len(shares):
        assert sum(shares.values()) > budget - len(shares)
        assert max(shares.values()) <= min(shares[tenant] for tenant in unmet) + 1
