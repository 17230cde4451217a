import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from kubernetes.aio.client import ApiClient, CoreV1Api
from kubernetes.aio.client.exceptions import ServiceException

from penstock.autoscale.kubernetes.mirror import Mirror, list_ray
from penstock.autoscale.kubernetes.resources import Pod, RayCluster, cluster_of, pod_of
from penstock.autoscale.kubernetes.workers import Workers, follow_all
from penstock.wire.serve_agent import AppPlaces, Place
from tests.unit.autoscale.kubernetes.api_fake import FakeServer, client_of

PATH = "/apis/ray.io/v1/namespaces/n/rayclusters"


def a_cluster(server: FakeServer, replicas: int) -> None:
    server.put(
        "rc1",
        {"workerGroupSpecs": [{"groupName": "gateway", "replicas": 2}, {"groupName": "pool-a", "replicas": replicas}]},
    )


def counts(server: FakeServer) -> list[int]:
    return [group["replicas"] for group in server.objects["rc1"]["spec"]["workerGroupSpecs"]]


def wanting(target: int) -> list[AppPlaces]:
    return [AppPlaces("pool-a", target, [Place("r1", "RUNNING", "10.0.0.1")])]


class Rig:
    """A cluster whose mirror is filled by the test: no watch runs."""

    def __init__(self, client: ApiClient, server: FakeServer, may_write: Callable[[], bool] = lambda: True) -> None:
        self.server = server
        self.clusters: Mirror[RayCluster] = Mirror(
            "rayclusters", list_ray(client, "n", "rayclusters"), cluster_of, Random(1)
        )
        self.pods: Mirror[Pod] = Mirror(
            "pods", partial(CoreV1Api(client).list_namespaced_pod_without_preload_content, "n"), pod_of, Random(1)
        )
        self.workers = Workers(client, "n", self.clusters, self.pods, may_write)
        self.update_mirror()

    def update_mirror(self) -> None:
        self.clusters.objects["rc1"] = cluster_of(self.server.objects["rc1"])


async def test_all_that_is_due_goes_in_one_patch_and_nothing_more_is_sent(tmp_path: Path) -> None:
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server)

        assert await rig.workers.follow("rc1", wanting(3))

        assert counts(server) == [2, 3]
        a_cluster(server, 3)
        rig.update_mirror()
        assert await rig.workers.follow("rc1", wanting(3))
        assert server.seen == [f"PATCH {PATH}/rc1"]


async def test_after_a_conflict_it_reads_again_and_decides_anew(tmp_path: Path) -> None:
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server)
        a_cluster(server, 7)  # somebody else's, not heard of yet

        assert await rig.workers.follow("rc1", wanting(9))
        assert server.seen == [f"PATCH {PATH}/rc1", f"GET {PATH}", f"PATCH {PATH}/rc1"]
        assert counts(server) == [2, 9]


async def test_what_others_write_elsewhere_is_no_conflict(tmp_path: Path) -> None:
    """KubeRay writes its status all the time."""
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server)
        server.put("rc1", server.objects["rc1"]["spec"] | {"theirs": 7})

        assert await rig.workers.follow("rc1", wanting(9))
        assert server.seen == [f"PATCH {PATH}/rc1"]
        assert (counts(server), server.objects["rc1"]["spec"]["theirs"]) == ([2, 9], 7)


async def test_the_mirror_is_the_watchs_alone(tmp_path: Path) -> None:
    """An answer that comes behind what the watch has brought would put it back to the past, for ever if nothing more
    happens."""
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server)
        newest = rig.clusters.objects["rc1"]._replace(groups=())
        server.script.append(409)
        following = asyncio.create_task(rig.workers.follow("rc1", wanting(2)))
        await asyncio.sleep(0)
        rig.clusters.objects["rc1"] = newest

        assert await following
        assert rig.clusters.objects["rc1"] is newest


async def test_who_conflicts_all_the_time_gets_a_few_tries_only(tmp_path: Path) -> None:
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server)
        server.script.extend([409, 200] * 3)

        assert not await rig.workers.follow("rc1", wanting(2))
        assert [line.split()[0] for line in server.seen] == ["PATCH", "GET"] * 3


async def test_pods_are_read_again_before_one_is_named(tmp_path: Path) -> None:
    """The mirror has a pod that is gone: KubeRay would take another in its place."""
    server = FakeServer()
    a_cluster(server, 2)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server)
        labels = {"ray.io/cluster": "rc1", "ray.io/group": "pool-a"}
        rig.pods.objects["gone"] = pod_of({"metadata": {"name": "gone", "labels": labels}})

        await rig.workers.follow("rc1", wanting(1))

        assert server.seen == ["GET /api/v1/namespaces/n/pods"], "and then there was none to name"


async def test_who_has_lost_the_lease_while_it_read_does_not_write(tmp_path: Path) -> None:
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server, may_write=iter([True, False]).__next__)
        server.script.append(409)

        assert not await rig.workers.follow("rc1", wanting(2))
        assert [line.split()[0] for line in server.seen] == ["PATCH", "GET"]


async def test_a_cluster_that_is_not_known_yet_is_left_alone(tmp_path: Path) -> None:
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        assert not await Rig(client, server).workers.follow("rc2", wanting(2))
        assert server.seen == []


async def test_what_the_server_does_not_answer_is_due_next_time(tmp_path: Path) -> None:
    server = FakeServer()
    a_cluster(server, 1)
    async with client_of(server, tmp_path) as client:
        rig = Rig(client, server)
        server.script.extend([503, 503])
        with pytest.raises(ServiceException):
            await rig.workers.follow("rc1", wanting(2))
        await follow_all(rig.workers, {"rc1": wanting(2)})
        assert counts(server) == [2, 1]

        await follow_all(rig.workers, {"rc2": wanting(2), "rc1": wanting(2)})
        assert counts(server) == [2, 2]
