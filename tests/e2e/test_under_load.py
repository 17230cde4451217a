"""What may be done to a platform while it serves: scaled, changed, given a new image, rolled back, robbed of its parts.
Nobody's request fails."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from penstock.autoscale.kubernetes.lease import Times
from tests.e2e.images import another
from tests.e2e.kube import documents, until
from tests.e2e.load import assert_none_failed, load
from tests.e2e.parts import ended
from tests.e2e.release import Release

pytestmark = pytest.mark.timeout(1500)

SWITCH_S = 600.0
"""Seconds for a second Ray cluster beside the first, on two cores, and the end of the old one."""
RESUMED = re.compile(r'^penstock_route_attempts_total\{.*reason="resume".*\} (\S+)$', re.MULTILINE)
ANSWERED = re.compile(r"^penstock_requests_total\{.*\} (\S+)$", re.MULTILINE)
NEXT = "localhost/penstock:e2e-next"


@contextmanager
def watching(
    release: Release, folder: Path, cluster: str | None = None
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Every state of a RayCluster, in turn. cluster: its name; None: the active one."""
    path = folder / "watched"
    command = release.kube.enter(
        "kubectl",
        "--namespace",
        release.namespace,
        "get",
        "raycluster",
        cluster or release.active(),
        "--watch",
        "--output=json",
    )
    with path.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out)
        try:
            yield lambda: list(documents(path.read_text(encoding="utf-8")))
        finally:
            process.terminate()
            process.wait(10)


def group(cluster: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] == name)
    return found


def ready(release: Release) -> dict[str, int]:
    """Pods of the platform that serve, by what they are."""
    found: dict[str, int] = {}
    selector = f"--selector=app.kubernetes.io/instance={release.name}"
    for pod in release.kube.get("pods", selector, "--namespace", release.namespace)["items"]:
        conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
        labels = pod["metadata"]["labels"]
        if conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]:
            part = labels.get("ray.io/group", labels["app.kubernetes.io/component"])
            found[part] = found.get(part, 0) + 1
    return found


WHOLE = {"headgroup": 1, "gateway": 2, "pool-edge": 1, "pool-cloud": 1, "redis": 1, "autoscaler": 2}


def settled(release: Release) -> None:
    """Waits until exactly the pods of values-demo are ready."""
    until(lambda: ready(release) == WHOLE, "exactly the pods of values-demo", SWITCH_S)


def upgraded(release: Release, *values: str) -> None:
    release.helm("upgrade", release.name, "deploy/helm", *release.values(*values), "--wait", "--timeout=300s")


def test_the_autoscaler_takes_a_pool_up_and_down_by_the_active_ray_cluster(
    release: Release, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settled(release)
    with watching(release, tmp_path) as states:
        with load(release, tmp_path, *LONG_LOAD) as heavy:
            up_s = until(lambda: ready(release).get("pool-cloud") == 2, "two replicas of the pool")
        before = set(release.pods("pool"))
        (tmp_path / "light").mkdir()
        with load(release, tmp_path / "light") as light:
            down_s = until(lambda: ready(release) == WHOLE, "one replica of the pool")
        seen = [group(state, "pool-cloud") for state in states()]
    counts = [count for count, _ in groupby(state["replicas"] for state in seen)]
    named = set(seen[-1]["scaleStrategy"]["workersToDelete"])

    record_property("figures", f"1 -> 2 in {up_s:.0f} s, 2 -> 1 in {down_s:.0f} s under load")
    assert counts == [1, 2, 1]
    assert named == before - set(release.pods("pool")), "the one that was named is the one that is gone"
    assert_none_failed(heavy, 10)
    assert_none_failed(light, 10)


LONG = [
    {"name": "long", "prompts": {"tokens": {"constant": 64}}, "output_tokens": {"constant": 96}, "ignore_eos": True}
]
LONG_LOAD = ("loop=closed", "concurrency=20", "kinds=" + json.dumps(LONG))
"""Settings of a load that wants both replicas of the scaled pool."""


def test_a_change_of_values_rolls_in_place(
    release: Release, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settled(release)
    cluster, pods = release.active(), unscaled(release)
    with load(release, tmp_path) as found:
        upgraded(
            release,
            "gateway.config.max_queue=77",
            "pools[0].served_names={demo,changed}",
            "pools[1].served_names={demo,other}",
        )
        took_s = until(
            lambda: all({"changed", "other"} <= {*names} for names in served(release)), "the new names at every gateway"
        )
        until(lambda: applications(release) == {"RUNNING"}, "all applications run")
        settled(release)

    record_property(
        "figures",
        f"every gateway has the new values after {took_s:.0f} s, {found.outcomes['finished']} requests meanwhile",
    )
    assert release.active() == cluster
    assert unscaled(release) == pods
    assert_none_failed(found, 10)


def unscaled(release: Release) -> set[str]:
    """Pods that the autoscaler has no reason to touch."""
    return {*release.pods("gateway"), *(pod for pod in release.pods("pool") if "pool-edge" in pod)}


def served(release: Release) -> list[list[str]]:
    """Names of models, gateway by gateway."""
    pods = [release.kube.get("pod", name, "--namespace", release.namespace) for name in release.pods("gateway")]
    return [
        release.kube.client("models", url=f"http://{pod['status']['podIP']}:8000", key=release.key()) for pod in pods
    ]


def applications(release: Release) -> set[str]:
    status = release.kube.get("rayservice", release.service, "--namespace", release.namespace)["status"]
    return {each["status"] for each in status["activeServiceStatus"]["applicationStatuses"].values()}


def test_a_new_image_takes_over_and_is_rolled_back(
    release: Release, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settled(release)
    first = release.active()
    if release.kube.own is None:
        pytest.skip("a second image is made on the tests' own cluster only")
    another(release.kube, release.images.penstock, NEXT, tmp_path)
    with load(release, tmp_path) as found:
        upgraded(release, f"image.tag={NEXT.rpartition(':')[2]}")
        new_s = until(lambda: release.active() != first, "the new Ray cluster is active", SWITCH_S)
        second = release.active()
        until(lambda: clusters(release) == {second}, "the old Ray cluster is gone", SWITCH_S)
        settled(release)
        images = {release.image(pod) for part in ("gateway", "pool", "head") for pod in release.pods(part)}
        release.helm("rollback", release.name, "--wait", "--timeout=300s")
        back_s = until(lambda: release.active() != second, "the image of before is active", SWITCH_S)
        until(lambda: clusters(release) == {release.active()}, "the new image's Ray cluster is gone", SWITCH_S)
        settled(release)

    record_property(
        "figures",
        (
            f"new image active after {new_s:.0f} s, rolled back after {back_s:.0f} s, {found.outcomes['finished']} "
            "requests meanwhile"
        ),
    )
    assert images == {NEXT}
    assert {release.image(pod) for pod in release.pods("gateway")} == {release.images.penstock}
    assert_none_failed(found, 100)


def clusters(release: Release) -> set[str]:
    return {
        each["metadata"]["name"] for each in release.kube.get("rayclusters", "--namespace", release.namespace)["items"]
    }


@pytest.mark.parametrize("part", ["gateway", "pool", "head"])
def test_a_pod_is_deleted(
    release: Release, tmp_path: Path, part: str, record_property: Callable[[str, object], None]
) -> None:
    """Each has work on it. The head goes at once, as if its node had gone; the others as `kubectl drain` does it."""
    settled(release)
    with load(release, tmp_path, *BUSY) as found:
        until(lambda: found.finished() > 2 and running(release, "edge") > 0, "there is work")
        pod = (
            busiest(release)
            if part == "gateway"
            else next(name for name in release.pods(part) if "pool-cloud" not in name)
        )
        others = set(release.pods("gateway") + release.pods("pool")) - {pod}
        release.kubectl(
            "delete", "pod", pod, "--wait=false", *(["--grace-period=0", "--force"] if part == "head" else [])
        )
        release.kubectl("wait", f"pod/{pod}", "--for=delete", "--timeout=180s", timeout_s=200.0)
        until(
            lambda: all(ready(release).get(name, 0) >= count for name, count in WHOLE.items()),
            "another has taken its place",
        )
        least = found.finished() + 5
        until(lambda: found.finished() > least, "the load goes on")

    record_property("figures", f"{part}: {found.outcomes['finished']} requests, {found.outcomes['failed']} failed")
    assert others <= set(release.pods("gateway") + release.pods("pool")), "no other pod was replaced"
    assert_none_failed(found, 5)


BUSY = ("loop=closed", "concurrency=3", "kinds=" + json.dumps(LONG))
"""Three streams at any time."""


def busiest(release: Release) -> str:
    """The gateway that has answered most: clients keep their connections."""
    return max(metrics(release).items(), key=lambda item: sum(float(value) for value in ANSWERED.findall(item[1])))[0]


def running(release: Release, pool: str) -> float:
    """Sequences on the pool's replicas."""
    return max(
        float(value)
        for page in metrics(release).values()
        for value in re.findall(rf'^penstock_running_sequences{{pool="{pool}"}} (\S+)$', page, re.MULTILINE)
    )


def metrics(release: Release) -> dict[str, str]:
    """Metrics of each gateway, by pod."""
    found = {
        name: release.kube.get("pod", name, "--namespace", release.namespace)["status"]["podIP"]
        for name in release.pods("gateway")
    }
    return {
        name: str(release.kube.client("page", url=f"http://{address}:8001", path="/metrics"))
        for name, address in found.items()
    }


def test_the_leading_autoscaler_is_killed(
    release: Release, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The leader's pod goes at once. The other leads within the Lease's time, and no pool changes."""
    settled(release)
    before = set(release.pods("pool"))
    leader = holder(release)
    with load(release, tmp_path) as found:
        release.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
        took_s = until(lambda: holder(release) not in ("", leader), "another leads", TAKEN_S)
        other = holder(release)
        settled(release)

    record_property("figures", f"another leads after {took_s:.0f} s")
    assert other in release.pods("autoscaler")
    assert set(release.pods("pool")) == before
    assert_none_failed(found, 2)


TAKEN_S = Times().duration_s + Times().retry_s + 5.0


def holder(release: Release) -> str:
    """The pod whose autoscaler the Lease names."""
    lease = release.kube.get("lease", f"{release.service}-autoscaler", "--namespace", release.namespace)
    return str(lease["spec"].get("holderIdentity") or "").rpartition("_")[0]


def test_kuberays_operator_is_killed_and_comes_back(release: Release, tmp_path: Path) -> None:
    settled(release)
    if release.kube.own is None:
        pytest.skip("the operator of somebody's cluster is left alone")
    before = clusters(release), set(release.pods("gateway") + release.pods("pool"))
    with load(release, tmp_path) as found:
        with ended(release.kube.own, "kuberay-operator"):
            least = found.finished() + 5
            until(lambda: found.finished() > least, "requests are answered without an operator")
        release.kubectl(
            "delete", "service", f"{release.service}-serve-svc", "--wait"
        )  # KubeRay's own, which nobody uses
        least = found.finished() + 10
        until(lambda: found.finished() > least, "and with the new one")
        release.kubectl("wait", f"service/{release.service}-serve-svc", "--for=create", "--timeout=120s")

    assert (clusters(release), set(release.pods("gateway") + release.pods("pool"))) == before
    assert_none_failed(found, 15)


def test_a_replica_killed_while_it_streams_loses_no_stream(release: Release, tmp_path: Path) -> None:
    """The replica's sequences go on elsewhere, from the token where they were; a stream that can't would end with an
    error that says so."""
    settled(release)
    with load(release, tmp_path, *BUSY) as found:
        until(lambda: found.finished() > 2 and running(release, "edge") > 0, "the load is there")
        before = resumed(release)
        edge = next(pod for pod in release.pods("pool") if "pool-edge" in pod)
        release.kubectl("exec", edge, "--", "pkill", "-KILL", "-f", "ServeReplica:pool")
        least = found.finished() + 20
        until(lambda: found.finished() > least, "the load goes on")

    assert resumed(release) > before, "it was streaming"
    assert_none_failed(found, 20)


def resumed(release: Release) -> float:
    """Streams that went on at another replica."""
    return sum(float(value) for page in metrics(release).values() for value in RESUMED.findall(page))
