"""`penstock autoscale` while others fail or write: Kubernetes' API server stopped, killed and forgetful, somebody who
writes the RayCluster all the time, KubeRay's operator restarted and upgraded. The last target holds, nothing flaps,
nobody acts who does not lead. The rig is test_scaling's: a real API server and a real operator, autoscalers as
processes with their Role's token; nodes run nothing, Serve is played.
"""

import asyncio
import itertools
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from kubernetes.aio.client import ApiException
from kubernetes.aio.watch import Watch

from bench.support.free_ports import free_port
from penstock.autoscale.kubernetes.elector import end
from penstock.autoscale.kubernetes.mirror import list_ray
from penstock.autoscale.kubernetes.resources import Document
from tests.cluster import Cluster, running_cluster
from tests.e2e.objects import Objects
from tests.e2e.parts import Part, ended, pid_of, stopped
from tests.e2e.ray_objects import LEASE, RAY_CLUSTERS
from tests.e2e.rig import Rig, a_rig, num_turns, page, until

pytestmark = [pytest.mark.platform, pytest.mark.timeout(240)]

LEAST, MOST = 4, 8
OUTAGE_S = 30.0
DEADLINE_S = 10.0
"""A leader that can't renew is none any more."""
LEASE_S = 15.0
CALL_S, RETRY_S = 5.0, 2.0
"""Longest call of an elector, and the pause between two attempts."""
MARGIN_S = 8.0
"""Seconds that a busy machine may take longer."""
TURN_S, NUM_TURNS = 1.0, 3
LEADS = 'penstock_autoscaler_is_leader{lease="scaling"} 1.0'
STAMP = "ray.io/kuberay-version"
"""KubeRay's annotation of what it has written: an operator that finds another version than its own writes the
RayService's numbers over the active RayCluster (shouldUpdateCluster and modifyRayCluster of its
rayservice_controller.go)."""

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(
        "--nodes", "fake", "--fake-nodes", "3", "--pod-start-seconds", "1", "--kuberay", must=True
    ) as running:
        yield running


def total(calls: dict[tuple[str, str, str], int], verb: str, kind: str, code: str = "") -> int:
    return sum(count for key, count in calls.items() if key[:2] == (verb, kind) and (not code or key[2] == code))


def test_a_ray_clusters_way_is_told_by_its_turns() -> None:
    assert [num_turns(counts) for counts in ([4], [4, 8], [8, 7, 4], [8, 5, 8], [4, 5, 4, 5])] == [0, 0, 0, 1, 2]


async def test_an_api_server_that_stands_still_for_half_a_minute_changes_nothing(
    cluster: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    """The server stops on the way down, the load changes meanwhile, and the way goes on from there when it is back."""
    async with a_rig(cluster, redis_url, tmp_path, MOST) as rig:
        ports = await rig.start_two(MOST)
        await until(lambda: rig.replicas < MOST, 60)
        lease = (await rig.api.get(LEASE))["spec"]
        before = [await rig.calls(port) for port in ports]

        with stopped(cluster, "kube-apiserver"):
            began_s = time.monotonic()
            while leaders := await rig.leaders():
                assert len(leaders) == 1
                await asyncio.sleep(0.1)
            lost_s = time.monotonic() - began_s
            counts, target = list(rig.counts), rig.serve.target
            rig.gateway.press()
            while time.monotonic() - began_s < OUTAGE_S:
                assert await rig.leaders() == [], "nobody leads whom the Lease does not say"
                assert rig.serve.target == target, "the last target holds"
                assert [(await asyncio.to_thread(page, port, "/healthz"))[0] for port in ports] == [200, 200], (
                    "the kubelet has no reason to restart them"
                )
                await asyncio.sleep(0.5)
        back_s = time.monotonic()
        leader = await rig.leading()
        again_s = time.monotonic() - back_s
        calls = [await rig.calls(port) for port in ports]
        await until(lambda: rig.serve.num_running == MOST, 60)
        up_s = time.monotonic() - back_s

        assert counts == rig.counts[: len(counts)]
        assert num_turns(rig.counts) <= 1, rig.counts
        assert min(rig.counts) >= min(target, *counts), "nothing went on below the last target"
        assert rig.serve.robbed == []
        assert lost_s < DEADLINE_S + 1
        assert again_s < CALL_S + RETRY_S + MARGIN_S
        after = (await rig.api.get(LEASE))["spec"]
        assert after["leaseTransitions"] <= lease["leaseTransitions"] + 1
        (other,) = set(ports) - {leader}
        if after["holderIdentity"] == lease["holderIdentity"]:
            assert total(await rig.calls(other), "patch", "rayclusters") == 0, "who never led never wrote"
        num_away = [sum(count for key, count in found.items() if key[2] == "away") for found in calls]
        assert max(num_away) <= 2 + OUTAGE_S / CALL_S
        tried = sum(sum(found.values()) for found in calls) - sum(sum(found.values()) for found in before)
        figures = {"lost_s": lost_s, "leader_again_s": again_s, "up_s": up_s}
        record_property(
            "api_server_stopped",
            {key: round(value, 1) for key, value in figures.items()} | {"calls": tried, "counts": rig.counts},
        )


async def test_a_leader_that_was_paused_finds_that_it_is_none(
    cluster: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    """Here not the server but the leader stands still, for longer than its Lease. When it goes on it knows that its
    time is over, and of no load since."""
    async with a_rig(cluster, redis_url, tmp_path, LEAST) as rig:
        first, second = await rig.start_two(MOST)
        before = await rig.calls(first)

        with standing_still(rig.processes[first]):
            began_s = time.monotonic()
            await page_with(LEADS, rig, second)
            taken_s = time.monotonic() - began_s
            rig.gateway.press()
            await until(lambda: rig.serve.num_running == MOST, 60)
        assert LEADS not in await page_with("is_leader", rig, first)
        await until(lambda: (rig.counts[-1], rig.serve.target) == (MOST, MOST), 10)
        for _ in range(4 * NUM_TURNS):
            assert await rig.leading() == second
            await asyncio.sleep(TURN_S / 4)
        assert total(await rig.calls(first), "patch", "rayclusters") == total(before, "patch", "rayclusters") == 0
        assert num_turns(rig.counts) == 0, rig.counts
        assert rig.serve.robbed == []
        record_property("leader_paused", {"taken_over_s": round(taken_s, 1)})
        assert taken_s < LEASE_S + RETRY_S + MARGIN_S


async def page_with(what: str, rig: Rig, port: int) -> str:
    """Metrics of the autoscaler on `port`, as soon as `what` is in them."""
    async with asyncio.timeout(60):
        while True:
            found = await rig.metrics(port)
            if what in found:
                return found
            await asyncio.sleep(0.1)


@contextmanager
def standing_still(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def writing_all_the_time(api: Objects, path: str, pause_s: float) -> AsyncIterator[list[int]]:
    """Somebody else's fields of the RayCluster and of the very group that is scaled, changed without an end. Yields the
    number of writes so far."""
    done = [0]

    async def write() -> None:
        for number in itertools.count(1):
            fields: dict[str, object] = {
                "/metadata/annotations": {"other": str(number)},
                "/spec/workerGroupSpecs/0/maxReplicas": 1000 + number,
            }
            await api.patch(path, [{"op": "add", "path": place, "value": value} for place, value in fields.items()])
            done[0] = number
            await asyncio.sleep(pause_s)

    writer = asyncio.create_task(write())
    try:
        yield done
        if writer.done():
            writer.result()
    finally:
        await end([writer])


async def test_beside_somebody_who_writes_all_the_time_the_way_is_made_and_nothing_of_theirs_is_lost(
    cluster: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    async with a_rig(cluster, redis_url, tmp_path, LEAST) as rig:
        port = free_port()
        rig.start(port, MOST)
        await rig.leading()
        lease = await rig.api.patch(LEASE, [{"op": "add", "path": "/metadata/labels", "value": {"other": "label"}}])
        async with writing_all_the_time(rig.api, f"{RAY_CLUSTERS}/{rig.name}", PAUSE_S) as done:
            began_s = time.monotonic()
            rig.gateway.press()
            await until(lambda: rig.serve.num_running == MOST, 60)
            up_s = time.monotonic() - began_s
            rig.gateway.release()
            await until(lambda: rig.replicas == LEAST and len(rig.workers) == LEAST, 90)
            took_s = time.monotonic() - began_s
            num_written = done[0]

        await until(lambda: other_fields(rig.seen[-1])[0] >= num_written, 10)
        theirs = [other_fields(document) for document in rig.seen]
        assert all(annotation == most for annotation, most in theirs), "a patch takes nothing along that is not its own"
        assert [most for _, most in theirs] == sorted(most for _, most in theirs), "nor brings back what was"
        assert num_turns(rig.counts) == 1, rig.counts
        assert rig.serve.robbed == []
        calls = await rig.calls(port)
        figures = {"writes_per_s": round(num_written / took_s), "up_s": round(up_s, 1), "took_s": round(took_s, 1)}
        record_property("conflicts", figures | name_codes(calls))
        assert num_written > MOST - LEAST, "or it has met nobody"
        assert total(calls, "update", "leases", "409") >= 1
        after = await rig.api.get(LEASE)
        assert after["metadata"]["labels"] == {"other": "label"}
        assert [after["spec"][key] for key in ("holderIdentity", "leaseTransitions")] == [
            lease["spec"][key] for key in ("holderIdentity", "leaseTransitions")
        ]
        assert after["spec"]["renewTime"] > lease["spec"]["renewTime"], "it goes on leading"
        num_patched = sum(total(calls, "patch", "rayclusters", code) for code in ("200", "409", "422"))
        assert num_patched <= 2 * (MOST - LEAST) + 2, "what others write elsewhere costs no further try"


PAUSE_S = 0.02
"""Seconds between two writes of somebody else."""


def other_fields(document: Document) -> tuple[int, int]:
    """The two that somebody else writes, as their number."""
    return int(document["metadata"].get("annotations", {}).get("other", 0)), document["spec"]["workerGroupSpecs"][0][
        "maxReplicas"
    ] - 1000


def name_codes(calls: dict[tuple[str, str, str], int]) -> dict[str, int]:
    return {" ".join(key): count for key, count in calls.items() if key[1] == "rayclusters"}


async def test_a_server_that_died_and_has_forgotten_is_listed_once_more(
    cluster: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    """Watches are cut in the middle; the versions they had reached are compacted away; meanwhile nothing is known, and
    nothing is done."""
    async with a_rig(cluster, redis_url, tmp_path, LEAST) as rig:
        port = free_port()
        rig.start(port, MOST)
        await rig.leading()
        rig.gateway.press()
        await until(lambda: rig.serve.num_running == MOST, 60)
        old = rig.seen[0]["metadata"]["resourceVersion"]
        before = await rig.calls(port)

        began_s = time.monotonic()
        with ended(cluster, "kube-apiserver") as server:
            compact(cluster)
        await answered(rig.api, server)
        away_s = time.monotonic() - began_s
        with pytest.raises(ApiException, match="410"):
            await watched_from(rig.api, old)
        await rig.leading()
        await until(lambda: rig.clusters.is_current and rig.pods.is_current, 30)
        assert (rig.serve.target, rig.counts[-1]) == (MOST, MOST), "the last target holds"
        await rig.api.patch(
            f"{RAY_CLUSTERS}/{rig.name}",
            [{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": MOST + 1}],
        )
        await until(lambda: MOST + 1 in rig.counts, 30)
        await until(lambda: rig.replicas == MOST, 30)
        seen_s = time.monotonic() - began_s - away_s

        calls = await rig.calls(port)
        lists = {
            kind: total(calls, "list", kind, "200") - total(before, "list", kind, "200")
            for kind in ("rayclusters", "pods")
        }
        tries = {kind: total(calls, "watch", kind) - total(before, "watch", kind) for kind in ("rayclusters", "pods")}
        record_property(
            "forgotten",
            {"away_s": round(away_s, 1), "back_to_work_s": round(seen_s, 1), "lists": lists, "watches": tries},
        )
        assert 1 <= lists["rayclusters"] <= 2
        assert 1 <= lists["pods"] <= 3, "one more to name who goes"
        assert max(tries.values()) <= 4 + away_s
        assert seen_s < 10 + MARGIN_S, "the longest pause of a watch, and a turn"
        assert rig.serve.robbed == []
        assert num_turns(rig.counts) == 1, rig.counts


def compact(cluster: Cluster) -> None:
    """etcd forgets all but the latest version, by its own JSON gateway."""
    command = Path(f"/proc/{pid_of(cluster, 'etcd')}/cmdline").read_text().split("\0")
    with httpx.Client(base_url=command[command.index("--listen-client-urls") + 1], trust_env=False) as etcd:
        latest = etcd.post("/v3/kv/range", json={"key": "AA=="}).raise_for_status().json()["header"]["revision"]
        etcd.post("/v3/kv/compaction", json={"revision": latest, "physical": True}).raise_for_status()


async def answered(api: Objects, server: Part) -> None:
    async with asyncio.timeout(60):
        while True:
            server.keep()
            with suppress(ApiException):
                await api.get(RAY_CLUSTERS)
                return
            await asyncio.sleep(0.1)


async def watched_from(api: Objects, version: str) -> None:
    """Raises what the server answers, or brings, first."""
    rayclusters = list_ray(api.client, "default", "rayclusters")

    async def opened(_preload_content: bool, **query: object) -> object:
        return await rayclusters(**query)

    async for event in Watch(return_type="object").stream(opened, resource_version=version, timeout_seconds=10):
        pytest.fail(f"the server still has {version}: {event}")


async def test_a_restarted_and_upgraded_operator_is_answered_by_our_number_at_once(
    cluster: Cluster, redis_url: str, tmp_path: Path, record_property: Record
) -> None:
    """The real operator, which finds the stamp of another version on the active RayCluster: that is what an upgrade is
    to it. The pods that it takes away at its own number are lost before anybody can say no; those that it adds go
    again, none that has a replica."""
    async with a_rig(cluster, redis_url, tmp_path, STATED, is_of_service=True) as rig:
        port = free_port()
        rig.start(port, MOST)
        await rig.leading()
        rig.gateway.press()
        await until(lambda: rig.serve.num_running == MOST, 60)

        counts, before = len(rig.counts), await rig.calls(port)
        with ended(cluster, "kuberay-operator") as operator:
            pass
        await reconciled(operator)
        assert len(rig.counts) == counts, "a restart alone writes nothing"

        below = await upgraded(rig, MOST)
        assert rig.counts[counts:] == [STATED, MOST], "its number, then ours"
        num_robbed = len(rig.serve.robbed)
        assert num_robbed <= MOST - STATED
        await until(lambda: rig.serve.num_running == MOST, 60)
        assert rig.serve.target == MOST
        calls = await rig.calls(port)
        assert total(calls, "patch", "rayclusters", "200") - total(before, "patch", "rayclusters", "200") == 1

        rig.gateway.release()
        await until(lambda: rig.replicas == LEAST and len(rig.workers) == LEAST, 90)
        counts = len(rig.counts)
        above = await upgraded(rig, LEAST)
        await until(lambda: len(rig.workers) == LEAST, 30)
        assert rig.counts[counts] == STATED
        assert num_turns(rig.counts[counts - 1 :]) == 1, "its number, then ours"
        assert len(rig.serve.robbed) == num_robbed, "of those that were too many none had a replica"
        record_property(
            "operator_upgraded",
            {"put_back_up_s": below, "put_back_down_s": above, "lost": num_robbed, "counts": rig.counts},
        )


STATED = 6
"""The RayService's number."""


async def reconciled(operator: Part) -> None:
    """The operator that has just been started has had a look at the RayService."""

    def has_looked() -> bool:
        operator.keep()
        return "Reconciling the Serve applications" in operator.said

    await until(has_looked, 30)


async def upgraded(rig: Rig, ours: int) -> float:
    """Seconds from the new operator's write to our number."""
    with ended(rig.cluster, "kuberay-operator") as operator:
        place = f"/metadata/annotations/{STAMP.replace('/', '~1')}"
        await rig.api.patch(f"{RAY_CLUSTERS}/{rig.name}", [{"op": "replace", "path": place, "value": "v1.5.1"}])
        num_counts = len(rig.counts)
    await reconciled(operator)
    await until(lambda: STATED in rig.counts[num_counts:], 10)
    began_s = time.monotonic()
    await until(lambda: rig.replicas == ours, 30)
    took_s = time.monotonic() - began_s
    await until(lambda: rig.seen[-1]["metadata"]["annotations"][STAMP] != "v1.5.1", 10)
    assert took_s < MARGIN_S
    return round(took_s, 1)
