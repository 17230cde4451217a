"""`penstock autoscale` against a real Kubernetes API and KubeRay's operator: the way to a target, who may act, and what
happens when others write too. test_outages has what fails, test_rights what its token can do. Nodes run nothing, Serve
is played; the rest is real.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from bench.support.free_ports import free_port
from penstock.autoscale.kubernetes.client import Account, open_client
from penstock.autoscale.kubernetes.mirror import Mirror, list_ray
from penstock.autoscale.kubernetes.resources import RayCluster, cluster_of
from penstock.autoscale.kubernetes.workers import Workers
from penstock.wire.serve_agent import AppPlaces
from tests.cluster import Cluster, running_cluster
from tests.e2e.ray_objects import APP, RAY_CLUSTERS, server_of
from tests.e2e.rig import Rig, a_rig, num_turns, until, up_and_down

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

POD_START_S = 2.0
LEAST, MOST = 4, 10
LEASE_S = 15.0
RETRY_S = 2.0
"""Seconds between two attempts of an elector."""
MARGIN_S = 8.0
"""Seconds that a busy machine may take longer."""

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(
        "--nodes", "fake", "--fake-nodes", "5", "--pod-start-seconds", str(POD_START_S), "--kuberay", must=True
    ) as running:
        yield running


async def test_a_pool_goes_up_and_down_and_exactly_the_drained_victims_go(
    cluster: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    async with a_rig(cluster, redis_url, tmp_path, LEAST) as rig:
        found = await up_and_down(rig, free_port(), LEAST, MOST)

        record_property("up_s", found.up_s)
        record_property("down_s", found.down_s)
        record_property("api_calls", found.calls)


async def test_what_somebody_else_writes_is_put_back(cluster: Cluster, redis_url: str, tmp_path: Path) -> None:
    """KubeRay's operator does that when it is upgraded."""
    async with a_rig(cluster, redis_url, tmp_path, LEAST) as rig:
        rig.start(free_port(), MOST)
        await rig.leading()
        await write_over(rig, LEAST + 3)
        await until(lambda: len(rig.counts) > 1, 30)
        await until(lambda: rig.replicas == LEAST and len(rig.workers) == LEAST, 60)
        assert rig.serve.robbed == [], "those that had no replica went"


async def write_over(rig: Rig, replicas: int) -> None:
    await rig.api.patch(
        f"{RAY_CLUSTERS}/{rig.name}",
        [{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": replicas}],
    )


async def test_a_write_over_what_has_changed_is_refused_and_made_again(
    cluster: Cluster, redis_url: str, tmp_path: Path
) -> None:
    calls: Counter[tuple[str, ...]] = Counter()
    async with (
        a_rig(cluster, redis_url, tmp_path, 1) as rig,
        open_client(Account(server_of(cluster), tmp_path / "account"), lambda *call: calls.update([call])) as client,
    ):
        named = f"metadata.name={rig.name}"
        late: Mirror[RayCluster] = Mirror(
            "rayclusters", list_ray(client, "default", "rayclusters", field_selector=named), cluster_of, Random(3)
        )
        late.objects = await late.read()
        await write_over(rig, 2)

        assert await Workers(client, "default", late, rig.pods, lambda: True).follow(rig.name, [AppPlaces(APP, 3, [])])

        assert calls["patch", "rayclusters", "422"] >= 1
        assert calls["patch", "rayclusters", "200"] == 1
        await until(lambda: rig.replicas == 3, 10)


async def test_one_of_two_acts_and_the_other_takes_over_within_the_leases_time(
    cluster: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    async with a_rig(cluster, redis_url, tmp_path, LEAST) as rig:
        first, second = await rig.start_two(MOST)
        await answering(rig, second)

        rig.processes[first].kill()
        rig.processes[first].wait()
        killed_s = time.monotonic()
        rig.gateway.press()
        assert await rig.leading() == second
        took_s = time.monotonic() - killed_s
        record_property("takeover_s", round(took_s, 1))
        assert LEASE_S - RETRY_S - 1 < took_s < LEASE_S + RETRY_S + MARGIN_S
        await until(lambda: rig.serve.num_running == MOST, 60)
        assert ("patch", "rayclusters", "200") in await rig.calls(second)

        assert num_turns(rig.counts) == 0, rig.counts
        assert rig.serve.robbed == []

        rig.start(first, MOST)
        await answering(rig, first)
        rig.processes[second].terminate()
        ended_s = time.monotonic()
        assert rig.processes[second].wait(20) == 0
        assert await rig.leading() == first
        record_property("handover_s", round(time.monotonic() - ended_s, 1))
        assert time.monotonic() - ended_s < LEASE_S - 5, "who ends gives the Lease back"


async def answering(rig: Rig, port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            if await rig.metrics(port):
                return
            await asyncio.sleep(0.1)
