from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.serving.load import grant_credit


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 40))
def test_credit_never_takes_a_place_away_and_shares_what_is_free(inflight: list[int], num_places: int) -> None:
    total = sum(inflight)

    credits = [grant_credit(own, total, len(inflight), num_places, is_closed=False) for own in inflight]

    extra = [granted - own for granted, own in zip(credits, inflight, strict=True)]
    free = max(0, num_places - total)
    assert min(extra) >= min(1, free)
    assert sum(extra) <= max(free, len(inflight) * min(1, free))


def test_a_closed_replica_grants_nothing_beyond_what_runs() -> None:
    assert grant_credit(3, 3, 1, 10, is_closed=True) == 3
