from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.routing.retry import MIN_SPREAD_S, SPREAD, spread_s


@given(st.floats(0.0, 1e6), st.integers())
def test_a_wait_is_never_shortened_and_little_longer(wait_s: float, seed: int) -> None:
    assert wait_s <= spread_s(wait_s, Random(seed)) <= wait_s + max(MIN_SPREAD_S, SPREAD * wait_s)


def test_waits_differ() -> None:
    random = Random(0)

    assert len({spread_s(1.0, random) for _ in range(100)}) == 100
