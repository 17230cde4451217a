"""The way to a target alone, at the size of a real pool: 4 -> 40 -> 4 replicas whose pods take 30 s to start, on 20
nodes that run nothing.

What asks for them is what a real gateway under load has reported (recorded), played by many.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.support.free_ports import free_port
from tests.cluster import Cluster, running_cluster
from tests.e2e.played_serve import RecordedGateways
from tests.e2e.recorded import SETTINGS
from tests.e2e.rig import a_rig, up_and_down

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

LEAST, MOST = SETTINGS.min_replicas, SETTINGS.max_replicas
POD_START_S = SETTINGS.start_s
CALM_S = 2 * SETTINGS.window_s
"""The first window teaches the load, the second is planned for."""

Record = Callable[[str, object], None]


@pytest.fixture
def fake_nodes() -> Iterator[Cluster]:
    with running_cluster(
        "--nodes", "fake", "--fake-nodes", "20", "--pod-start-seconds", str(POD_START_S), "--kuberay", must=True
    ) as running:
        yield running


async def test_forty_replicas_come_and_go_in_few_calls(
    fake_nodes: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    async with a_rig(fake_nodes, redis_url, tmp_path, LEAST, gateways=RecordedGateways) as rig:
        found = await up_and_down(rig, free_port(), LEAST, MOST, calm_s=CALM_S)

        assert found.up_s > POD_START_S
        record_property("up_s", found.up_s)
        record_property("down_s", found.down_s)
        record_property("api_calls", found.calls)
        assert isinstance(rig.gateway, RecordedGateways)
        record_property("reports_played", rig.gateway.players.num_played)
