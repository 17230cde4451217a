"""values-production on twenty nodes of eight GPUs, which start pods and run nothing: where its pods go, and what protects them."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import running_cluster
from tests.e2e.kube import Kube

pytestmark = pytest.mark.timeout(600)

NAMESPACE = "production"
NODES = 20
IMAGE = ("--set", "image.repository=registry.example.com/penstock")
PODS_S = 180
PODS = {"head": 1, "gateway": 3, "pool-edge": 2, "pool-cloud": 4, "redis": 1, "autoscaler": 2}


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    with running_cluster("--nodes", "fake", "--fake-nodes", str(NODES), "--pod-start-seconds", "1", "--kuberay") as found:
        yield Kube(found.inside, None)


@pytest.fixture(scope="module")
def pods(kube: Kube) -> dict[str, list[dict[str, Any]]]:
    """Of the installed preset, by what they are, once all of them run."""
    for name, value in (("penstock-serving", 100000), ("penstock-replica", 10000)):
        kube.apply({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value})
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    for name, mode in (("checkpoints", "ReadOnlyMany"), ("adapters", "ReadWriteMany"), ("data-penstock-redis-0", "ReadWriteOnce")):
        volume(kube, name, mode)
    kube.run("helm", "install", "penstock", "deploy/helm", "--namespace", NAMESPACE, "--values", "deploy/helm/values-production.yaml", *IMAGE, timeout_s=120)
    deadline = time.monotonic() + PODS_S
    while counts(found := running(kube)) != PODS:
        assert time.monotonic() < deadline, counts(found)
        time.sleep(1)
    return found


def counts(found: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    return {name: len(pods) for name, pods in found.items()}


def running(kube: Kube) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    options = ("--selector=app.kubernetes.io/part-of=penstock", "--field-selector=status.phase=Running", "--namespace", NAMESPACE)
    for pod in kube.get("pods", *options)["items"]:
        labels = pod["metadata"]["labels"]
        component = labels["app.kubernetes.io/component"]
        found.setdefault(labels["ray.io/group"] if component == "pool" else component, []).append(pod)
    return found


def volume(kube: Kube, name: str, mode: str) -> None:
    """A claim, and the volume for it."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "", "volumeName": name}
    bound = {"namespace": NAMESPACE, "name": name}
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {"capacity": {"storage": "1Gi"}, "accessModes": [mode], "storageClassName": "", "hostPath": {"path": "/tmp"}, "claimRef": bound},
        },
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec},
    )


def nodes(pods: list[dict[str, Any]]) -> Counter[str]:
    return Counter(pod["spec"]["nodeName"] for pod in pods)


def test_every_pod_has_a_node(pods: dict[str, list[dict[str, Any]]]) -> None:
    assert counts(pods) == PODS
    assert all(pod["spec"].get("nodeName") for found in pods.values() for pod in found)


def test_gateways_are_spread_and_so_are_replicas_as_far_as_there_are_nodes(pods: dict[str, list[dict[str, Any]]]) -> None:
    assert max(nodes(pods["gateway"]).values()) == 1
    assert max(nodes(pods["pool-cloud"]).values()) == 1
    assert max(nodes(pods["autoscaler"]).values()) == 1


def test_gpus_are_given_to_the_cloud_pool_alone(pods: dict[str, list[dict[str, Any]]]) -> None:
    gpus = {
        name: sum(int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0)) for pod in found for container in pod["spec"]["containers"])
        for name, found in pods.items()
    }

    assert {name: count for name, count in gpus.items() if count} == {"pool-cloud": PODS["pool-cloud"]}


def test_what_serves_everybody_goes_before_replicas(pods: dict[str, list[dict[str, Any]]]) -> None:
    priorities = {name: {pod["spec"]["priority"] for pod in found} for name, found in pods.items()}

    assert priorities == {name: {10000 if name.startswith("pool-") else 100000} for name in PODS}


def test_budgets_allow_one_eviction_at_a_time(kube: Kube, pods: dict[str, list[dict[str, Any]]]) -> None:
    kube.kubectl("wait", "pdb", "--all", "--namespace", NAMESPACE, "--for=jsonpath={.status.disruptionsAllowed}=1", "--timeout=60s")
    budgets = {each["metadata"]["name"]: each["status"] for each in kube.get("pdb", "--namespace", NAMESPACE)["items"]}

    assert {name.removeprefix("penstock-"): (status["currentHealthy"], status["disruptionsAllowed"]) for name, status in budgets.items()} == {
        "gateway": (3, 1),
        "pool-edge": (2, 1),
        "pool-cloud": (4, 1),
        "autoscaler": (2, 1),
    }, json.dumps(budgets)
