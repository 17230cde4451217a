"""A real gateway with another choice of a replica, and conversations whose answers tokenize back."""

import itertools
from collections import defaultdict

import pytest

from bench.routing.loads import BLOCK
from bench.routing_live import reuse
from bench.routing_live.live_platform import live_platform
from bench.routing_live.policies import PINNED
from penstock_loadtest.results.records import Record
from penstock_loadtest.workload.plan import draw_plan

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(400)]


def test_pinned_sessions_keep_to_their_replicas_and_find_there_all_that_was_said() -> None:
    scenario = reuse.make_scenario(0, 1, 3.0)
    with live_platform() as platform:
        platform.route_by(PINNED)
        run = platform.play(scenario, draw_plan(scenario))

    sessions: dict[str | None, list[Record]] = defaultdict(list)
    for record in sorted(run.records, key=lambda each: each.turn):
        sessions[record.session].append(record)
    assert run.turns_not_sent == 0
    assert {record.outcome for record in run.records} == {"finished"}
    assert len({turns[0].replica for turns in sessions.values()}) == 4
    for turns in sessions.values():
        assert len({record.replica for record in turns}) == 1
        for before, record in itertools.pairwise(turns):
            assert before.prompt_tokens is not None
            assert record.cached_tokens == (before.prompt_tokens + before.tokens - 1) // BLOCK * BLOCK
