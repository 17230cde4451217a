import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import StepCosts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import EngineLoad
from penstock.workers.serving.load import StreamInfo, grant_credit, lacks_kv


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


def test_kv_lacks_where_what_waits_and_may_not_be_passed_is_more_than_is_free() -> None:
    def load(unplaced_tokens: int) -> EngineLoad:
        return EngineLoad(3, 1, 9000, 0, 10, 100, 0, StepCosts(), unplaced_tokens=unplaced_tokens)

    assert not lacks_kv(load(0), 16)  # what runs has its blocks, and what waits may be passed
    assert not lacks_kv(load(160), 16)
    assert lacks_kv(load(161), 16)


@pytest.mark.parametrize(("max_num_seqs", "lookahead", "num_places"), [(16, None, 20), (256, None, 277), (16, 1, 17)])
def test_places_are_the_rows_and_some_that_wait(max_num_seqs: int, lookahead: int | None, num_places: int) -> None:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_batched_tokens=max_num_seqs, admission_lookahead=lookahead)

    assert StreamInfo.of("epoch", config).num_places == num_places
