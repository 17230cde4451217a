"""What happens when a pool can't have the pods that it wants: no node has room, a quota is used up. The scheduler, the
quota, KubeRay's operator and the API server are real; nodes run nothing, and Serve is played.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from redis.asyncio import Redis

from bench.support.free_ports import free_port
from penstock.autoscale.sentences import tell
from penstock.base.redis import connect
from penstock.cli.explain import read
from tests.cluster import Cluster, running_cluster
from tests.e2e.played_serve import AT_ONCE, Gateway, PlayedServe
from tests.e2e.rig import LEAST, Rig, a_rig, until

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

NODE_GPUS, MOST = 8, 10
QUOTA_GPUS = 6
UNPLACED_S = 4.0
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "gpus"},
    "spec": {"hard": {"requests.nvidia.com/gpu": str(QUOTA_GPUS)}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(
        "--nodes", "fake", "--fake-nodes", "1", "--pod-start-seconds", "1.0", "--kuberay", must=True
    ) as running:
        yield running


def an_impatient_pool(client: Redis, serve: PlayedServe) -> Gateway:
    settings = structs.replace(AT_ONCE.settings, unplaced_s=UNPLACED_S)
    return Gateway(client, serve, scaled=AT_ONCE._replace(settings=settings))


async def events_of(rig: Rig, reason: str) -> list[dict[str, Any]]:
    path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={rig.name},reason={reason}"
    found: list[dict[str, Any]] = (await rig.api.get(path))["items"]
    return found


async def until_told(rig: Rig, reason: str, number: int = 1) -> list[dict[str, Any]]:
    async with asyncio.timeout(60):
        while True:
            found = await events_of(rig, reason)
            if len(found) >= number:
                return found
            await asyncio.sleep(0.2)


async def explained(rig: Rig) -> str:
    """The sentences of `penstock autoscale explain`; the command itself is test_install's."""
    client = connect(rig.redis_url)
    try:
        (found,) = await read(client)
    finally:
        await client.aclose()
    return " ".join(tell(found))


def is_at(rig: Rig, replicas: int) -> Callable[[], bool]:
    return lambda: rig.replicas == replicas and len(rig.workers) == replicas


async def test_pods_that_no_node_has_room_for_are_said_given_up_and_tried_again(
    cluster: Cluster, redis_url: str, tmp_path: Path
) -> None:
    async with a_rig(cluster, redis_url, tmp_path, LEAST, gateways=an_impatient_pool) as rig:
        rig.start(free_port(), MOST)
        await rig.leading()
        rig.gateway.press()
        await until(lambda: rig.replicas == MOST, 60)
        (told,) = await until_told(rig, "ReplicasUnplaced")
        missed = await explained(rig)
        await until(is_at(rig, NODE_GPUS), 60)
        assert rig.serve.num_running == NODE_GPUS
        gone_back = await explained(rig)
        await until(lambda: rig.replicas == MOST, 60)
        changes = await until_told(rig, "TargetChanged", 3)

        assert told["type"] == "Warning"
        assert "2 replicas have no place (unschedulable): 0/" in told["message"]
        assert "Insufficient nvidia.com/gpu" in told["message"]
        assert "2 replicas have no place (unschedulable); the cluster says: 0/" in missed
        assert f"The target is {NODE_GPUS}" in gone_back
        assert "(by its configuration) to 8 (by what the cluster has room for)." in gone_back
        assert "More than have a place are tried again in " in gone_back
        assert any("by shortage (applied)" in event["message"] for event in changes)
        assert rig.counts[:4] == [LEAST, MOST, NODE_GPUS, MOST]
        assert rig.serve.robbed == []


async def test_a_quota_that_is_used_up_is_said_and_the_target_goes_back_until_there_is_more(
    cluster: Cluster, redis_url: str, tmp_path: Path
) -> None:
    cluster.kubectl("apply", "-f", "-", given=json.dumps(QUOTA))
    try:
        async with a_rig(cluster, redis_url, tmp_path, LEAST, gateways=an_impatient_pool) as rig:
            rig.start(free_port(), NODE_GPUS)
            await rig.leading()
            rig.gateway.press()
            (told, *_) = await until_told(rig, "ReplicasUnplaced")
            await until(is_at(rig, QUOTA_GPUS), 90)
            cluster.kubectl("delete", "resourcequota", "gpus")
            await until(is_at(rig, NODE_GPUS), 120)
            await until_told(rig, "ReplicasPlaced")

            assert "(quota)" in told["message"]
            assert "exceeded quota: gpus" in told["message"]
            assert rig.counts[:3] == [LEAST, NODE_GPUS, QUOTA_GPUS]
            assert rig.serve.robbed == []
    finally:
        cluster.kubectl("delete", "resourcequota", "gpus", "--ignore-not-found")
