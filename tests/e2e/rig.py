"""A real Kubernetes with KubeRay's operator and pods that run nothing, `penstock autoscale` as a process with a limited
token, and a Serve that is played."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
from kubernetes.aio.client import ApiException
from kubernetes.aio.client.exceptions import NotFoundException
from redis.asyncio import Redis
from redis.exceptions import RedisError

from bench.support.free_ports import free_port
from penstock.autoscale.kubernetes.elector import end
from penstock.autoscale.kubernetes.lease import Times
from penstock.autoscale.kubernetes.mirror import Mirror, list_pods, list_ray
from penstock.autoscale.kubernetes.resources import (
    CLUSTER_LABEL,
    WORKERS,
    Document,
    Pod,
    RayCluster,
    cluster_of,
    pod_of,
)
from penstock.autoscale.scaler import ScaledPool
from penstock.autoscale.serve_agent import CallExecutor, serve_calls
from penstock.base.redis import connect
from tests.cluster import Cluster
from tests.e2e.objects import Objects, open_objects
from tests.e2e.played_serve import Gateway, Gateways, PlayedServe
from tests.e2e.ray_objects import RBAC, SERVICE, a_ray_cluster, a_ray_service, account_of, server_of

LEAST = 4
"""Replicas, by the autoscaler's settings."""


@dataclass
class Rig:
    cluster: Cluster
    name: str
    """Name of the RayCluster; no other has had it."""
    api: Objects
    redis_url: str
    folder: Path
    serve: PlayedServe
    gateway: Gateways
    clusters: Mirror[RayCluster]
    pods: Mirror[Pod]
    counts: list[int]
    """Every `replicas` that the RayCluster's group has had, in order, as a watch brought it."""
    seen: list[Document]
    """Every state of the RayCluster that the watch brought."""
    is_of_service: bool
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Autoscalers, by port."""

    def start(self, port: int, most: int) -> None:
        config = self.folder / "penstock.yaml"
        config.write_bytes(config_of(self.gateway.scaled, most))
        host, _, api_port = server_of(self.cluster).removeprefix("https://").partition(":")
        environment = os.environ | {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": api_port,
            "PENSTOCK_REDIS_URL": self.redis_url,
        }
        what = ["--rayservice", SERVICE] if self.is_of_service else ["--raycluster", self.name]
        options = ["--namespace", "default", *what, "--lease", "scaling", "--config", str(config), "--port", str(port)]
        command = [
            sys.executable,
            "-m",
            "penstock.cli.main",
            "autoscale",
            *options,
            "--account",
            str(self.folder / "account"),
        ]
        with (self.folder / f"autoscaler-{port}.log").open("ab") as log:
            self.processes[port] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    async def start_two(self, most: int) -> tuple[int, int]:
        """Ports of the one that leads, and of the other."""
        ports = {free_port(), free_port()}
        for port in ports:
            self.start(port, most)
        leader = await self.leading()
        (other,) = ports - {leader}
        return leader, other

    async def leaders(self) -> list[int]:
        """Ports of the autoscalers that say they lead."""
        return [
            port
            for port in self.processes
            if 'penstock_autoscaler_is_leader{lease="scaling"} 1.0' in await self.metrics(port)
        ]

    async def leading(self) -> int:
        """The port of the one that leads."""
        async with asyncio.timeout(60):
            while True:
                leaders = await self.leaders()
                assert len(leaders) < 2
                if leaders:
                    return leaders[0]
                await asyncio.sleep(0.1)

    async def metrics(self, port: int) -> str:
        """Empty, where nobody answers."""
        return (await asyncio.to_thread(page, port, "/metrics"))[1]

    async def calls(self, port: int) -> dict[tuple[str, str, str], int]:
        """Number of calls to the Kubernetes API, by verb, resource and status."""
        found = {}
        for line in (await self.metrics(port)).splitlines():
            if line.startswith("penstock_kubernetes_calls_total{"):
                labels, _, value = line.removeprefix("penstock_kubernetes_calls_total{").partition("} ")
                named = dict(part.split("=") for part in labels.replace('"', "").split(","))
                found[named["verb"], named["resource"], named["code"]] = int(float(value))
        return found

    @property
    def replicas(self) -> int:
        return self.clusters.objects[self.name].groups[0].replicas

    @property
    def workers(self) -> set[str]:
        return {pod.name for pod in self.pods.objects.values() if pod.cluster == self.name and not pod.is_ending}

    async def _play(self) -> None:
        """Serve and the gateway, for as long as it runs."""
        reported_s = 0.0
        while True:
            self.serve.turn()
            if time.monotonic() - reported_s > 0.4:
                reported_s = time.monotonic()
                with suppress(RedisError, OSError):  # a busy machine: the next one is due soon
                    await self.gateway.report()
            await asyncio.sleep(0.05)


def config_of(scaled: ScaledPool, most: int) -> bytes:
    """A penstock.yaml with that pool, between LEAST replicas and `most`; JSON is YAML."""
    settings = msgspec.structs.replace(scaled.settings, min_replicas=LEAST, max_replicas=most)
    pool = {"name": scaled.name, "replicas": LEAST, "engine": {"max_num_seqs": scaled.max_rows}, "autoscale": settings}
    return msgspec.json.encode({"pools": [pool]})


def page(port: int, path: str) -> tuple[int, str]:
    """Status and body of one of an autoscaler's pages; 0 where nobody answers. A connection each, and no client
    library: this is asked all the time."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, HTTPException):
        return 0, ""
    finally:
        connection.close()


async def beat(api: Objects) -> None:
    """The heartbeat of nodes that have no kubelet: without it they count as lost after 50 s, and all their pods as not
    ready."""
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    names = [node["metadata"]["name"] for node in (await api.get("/api/v1/nodes"))["items"]]
    while True:
        for name in names:
            spec = {
                "holderIdentity": name,
                "leaseDurationSeconds": 40,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            }
            lease: Document = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": spec,
            }
            with suppress(ApiException):
                try:
                    found = await api.get(f"{path}/{name}")
                    await api.update(f"{path}/{name}", found | {"spec": spec})
                except NotFoundException:
                    await api.create(path, lease)
        await asyncio.sleep(5)


@asynccontextmanager
async def a_rig(
    cluster: Cluster,
    redis_url: str,
    folder: Path,
    replicas: int,
    is_of_service: bool = False,
    gateways: Callable[[Redis, PlayedServe], Gateways] = Gateway,
) -> AsyncIterator[Rig]:
    """A rig with a RayCluster of so many workers, all ready, and a Serve that has them all. is_of_service: the
    RayCluster is a RayService's active one."""
    cluster.kubectl("apply", "-f", "-", given=RBAC)
    account_of(cluster, folder / "account", cluster.kubectl("create", "token", "autoscaler").strip())
    client = connect(redis_url)
    await client.flushall()
    async with open_objects(account_of(cluster, folder / "admin")) as api:
        name = await a_ray_service(cluster, api, replicas) if is_of_service else a_ray_cluster(cluster, replicas)
        counts: list[int] = []
        seen: list[Document] = []

        def noted(document: Document) -> RayCluster:
            seen.append(document)
            found = cluster_of(document)
            if counts[-1:] != [found.groups[0].replicas]:
                counts.append(found.groups[0].replicas)
            return found

        clusters: Mirror[RayCluster] = Mirror(
            "rayclusters",
            list_ray(api.client, "default", "rayclusters", field_selector=f"metadata.name={name}"),
            noted,
            Random(1),
        )
        selected = f"{WORKERS},{CLUSTER_LABEL}={name}"
        pods: Mirror[Pod] = Mirror("pods", list_pods(api.client, "default", selected), pod_of, Random(2))
        serve = PlayedServe(pods, replicas)
        rig = Rig(
            cluster,
            name,
            api,
            redis_url,
            folder,
            serve,
            gateways(client, serve),
            clusters,
            pods,
            counts,
            seen,
            is_of_service,
        )
        parts = [beat(api), clusters.run(), pods.run(), rig._play(), serve_calls(client, name, CallExecutor(serve))]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await until(lambda: serve.num_running == replicas, 60)
            yield rig
        finally:
            for process in rig.processes.values():
                process.kill()
                process.wait()
            await end(tasks)
            await client.aclose()
            cluster.kubectl(
                "delete", *(["rayservice", SERVICE] if is_of_service else ["raycluster", name]), "--wait=false"
            )
            cluster.kubectl("delete", "lease", "scaling", "--ignore-not-found")


def num_turns(counts: Sequence[int]) -> int:
    """How often the way changes between up and down."""
    ways = [after > before for before, after in itertools.pairwise(counts)]
    return sum(way is not before for before, way in itertools.pairwise(ways))


async def until(is_so: Callable[[], Any], within_s: float) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.05)


ALLOWED = {
    ("list", "rayclusters"),
    ("watch", "rayclusters"),
    ("patch", "rayclusters"),
    ("list", "pods"),
    ("watch", "pods"),
    ("create", "events"),
    ("get", "leases"),
    ("update", "leases"),
}
"""What the autoscaler calls, of a RayCluster that was named to it."""


class Figures(NamedTuple):
    up_s: float
    down_s: float
    calls: dict[str, int]
    """Number of calls by verb, resource and status."""


async def up_and_down(rig: Rig, port: int, least: int, most: int, calm_s: float = 0.0) -> Figures:
    """A load that wants all that is allowed, then as few; and everything that must hold of the way. calm_s: so long as
    few are right, before that."""
    started_s = time.monotonic()
    rig.start(port, most)
    await rig.leading()
    await asyncio.sleep(calm_s)
    assert rig.counts == [least]
    before = rig.workers
    began_s = time.monotonic()
    rig.gateway.press()
    await until(lambda: rig.replicas == most, 30)
    await until(lambda: rig.serve.num_running == most, 180)
    up_s = time.monotonic() - began_s
    assert before <= rig.workers, "who was there has stayed"
    full = rig.workers

    began_s = time.monotonic()
    rig.gateway.release()
    await until(lambda: rig.replicas == least and len(rig.workers) == least, 300)
    down_s = time.monotonic() - began_s
    assert full - rig.workers == set(rig.serve.victims)
    assert len(rig.serve.victims) == most - least
    assert rig.serve.robbed == []
    assert num_turns(rig.counts) == 1, "no flapping"
    assert max(rig.counts) == most

    calls = await rig.calls(port)
    lived_s = time.monotonic() - started_s
    assert {(verb, kind) for verb, kind, _ in calls} <= ALLOWED
    assert not [key for key in calls if key[2] == "403"]
    steps = 1 + most - least
    assert sum(count for (verb, _, _), count in calls.items() if verb == "patch") <= 2 * steps
    assert (
        sum(count for (verb, _, _), count in calls.items() if verb in ("list", "watch"))
        <= 6 + 2 * steps + 3 * lived_s / 60
    )
    assert sum(count for (_, kind, _), count in calls.items() if kind == "leases") <= 6 + lived_s / Times().retry_s
    return Figures(round(up_s, 1), round(down_s, 1), {" ".join(key): value for key, value in calls.items()})
