"""Requests that make steps raise, or kill their replica, among 32 streams of another tenant: `bench.poison` in short,
through whole platforms with real engines."""

from pathlib import Path

import pytest

from bench.poison import COLLISION_DELAYS_S, KINDS, NUM_STREAMS, Seen, run_collisions, run_kills, run_poisons
from penstock.router.dispatch.quarantine import MAX_LOSSES
from penstock.workers.engine.isolation import ROW_FAILED

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(600)]


def assert_nobody_else_noticed(seen: Seen) -> None:
    assert [answer.fault for answer in seen.alone.values() if answer.fault] == []
    assert len({answer.token_ids for answer in seen.alone.values()}) == NUM_STREAMS, "else nothing is compared"
    assert len(seen.beside) >= NUM_STREAMS
    assert seen.failed == []
    assert seen.num_different == 0


def test_no_stream_fails_or_differs_beside_requests_with_which_steps_raise(tmp_path: Path) -> None:
    seen = run_poisons(tmp_path, 4 * len(KINDS))

    assert_nobody_else_noticed(seen)
    assert [(each.kind, each.status) for each in seen.marked] == [(kind, 500) for kind in KINDS] * 4
    assert all(each.message.startswith(ROW_FAILED) for each in seen.marked)
    assert seen.lost_by == [0]


def test_a_request_that_kills_its_replica_kills_two_and_gets_its_id_and_no_stream_fails(tmp_path: Path) -> None:
    seen = run_kills(tmp_path, 1)

    assert_nobody_else_noticed(seen)
    assert seen.lost_by == [MAX_LOSSES]
    (refused,) = seen.marked
    assert refused.status == 500
    assert refused.request_id in refused.message


def test_streams_that_begin_when_it_comes_do_not_end_with_it(tmp_path: Path) -> None:
    seen = run_collisions(tmp_path, len(COLLISION_DELAYS_S))

    assert_nobody_else_noticed(seen)
    assert [each.status for each in seen.marked] == [500] * len(COLLISION_DELAYS_S)
    assert max(seen.lost_by) == MAX_LOSSES
