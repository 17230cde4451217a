"""The way to a target alone, at the size of a real pool: 4 -> 40 -> 4 replicas whose pods take 30 s to start, on 20 nodes that run nothing."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.platform_process import free_port
from tests.cluster import Cluster, running_cluster
from tests.e2e.rig import a_rig, up_and_down

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

LEAST, MOST = 4, 40
POD_START_S = 30.0

Record = Callable[[str, object], None]


@pytest.fixture
def fake_nodes() -> Iterator[Cluster]:
    with running_cluster("--nodes", "fake", "--fake-nodes", "20", "--pod-start-seconds", str(POD_START_S), "--kuberay", must=True) as running:
        yield running


def test_forty_replicas_come_and_go_in_few_calls(fake_nodes: Cluster, redis_url: str, tmp_path: Path, record_property: Record) -> None:
    async def main() -> None:
        async with a_rig(fake_nodes, redis_url, tmp_path, LEAST) as rig:
            found = await up_and_down(rig, free_port(), LEAST, MOST)

            assert found.up_s > POD_START_S
            record_property("up_s", found.up_s)
            record_property("down_s", found.down_s)
            record_property("api_calls", found.calls)

    asyncio.run(main())
