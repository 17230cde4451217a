"""A data centre of nodes that start pods and run nothing: twenty of eight GPUs each, tainted as device plugins have
them, and six without, in three zones. And what tests need there: releases, counts put where the autoscaler puts them,
evictions, what the scheduler said.
"""

import asyncio
import json
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster import Cluster, running_cluster
from tests.e2e.kube import Kube
from tests.e2e.objects import open_objects
from tests.e2e.ray_objects import account_of
from tests.e2e.rig import beat

GPU_NODES, CPU_NODES, ZONES = 20, 6, 3
GPU = "nvidia.com/gpu"
PATIENCE_S = 120.0
IMAGE = ("--set", "image.repository=registry.example.com/penstock")
VOLUMES = 12

Pods = dict[str, list[dict[str, Any]]]
"""Pods by part: head, gateway, pool-NAME, redis, autoscaler."""


class Release(NamedTuple):
    kube: Kube
    name: str
    namespace: str

    def install(self, preset: str, *options: str, values: str = "") -> None:
        """values: YAML over the preset; options: over both."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.kube.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "labels": labels}}
        )
        files = ("--values", f"deploy/helm/{preset}", "--values=-")
        self.kube.run(
            "helm",
            "install",
            self.name,
            "deploy/helm",
            "--namespace",
            self.namespace,
            *files,
            *IMAGE,
            *options,
            given=values,
            timeout_s=PATIENCE_S,
        )

    def pods(self, phase: str = "Running") -> Pods:
        found: Pods = {}
        options = (
            f"--selector=app.kubernetes.io/instance={self.name}",
            f"--field-selector=status.phase={phase}",
            "--namespace",
            self.namespace,
        )
        for pod in self.kube.get("pods", *options)["items"]:
            labels = pod["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            if component != "tenants" and "deletionTimestamp" not in pod["metadata"]:
                found.setdefault(labels["ray.io/group"] if component == "pool" else component, []).append(pod)
        return found

    def wait(self, running: dict[str, int], pending: dict[str, int] | None = None) -> Pods:
        """Waits until exactly so many pods of each part run, and so many stay Pending (None: any number)."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found, waiting = self.pods(), counts(self.pods("Pending"))
            if counts(found) == running and pending in (None, waiting):
                return found
            assert time.monotonic() < deadline, (counts(found), waiting)
            time.sleep(0.5)

    def scale(self, group: str, replicas: int) -> None:
        """Sets a group's replicas in the RayCluster, as the autoscaler does."""
        cluster = self.kube.get("rayclusters", "--namespace", self.namespace)["items"][0]
        index = [each["groupName"] for each in cluster["spec"]["workerGroupSpecs"]].index(group)
        patch = [{"op": "replace", "path": f"/spec/workerGroupSpecs/{index}/replicas", "value": replicas}]
        name = cluster["metadata"]["name"]
        self.kube.kubectl(
            "patch", "raycluster", name, "--namespace", self.namespace, "--type=json", f"--patch={json.dumps(patch)}"
        )

    def wait_for_budget(self, part: str) -> None:
        """Waits until the budget allows one eviction."""
        budget = f"pdb/{self.name}-{part}"
        self.kube.kubectl(
            "wait",
            budget,
            "--namespace",
            self.namespace,
            "--for=jsonpath={.status.disruptionsAllowed}=1",
            "--timeout=60s",
        )

    def evict(self, pod: dict[str, Any]) -> str | None:
        """Asks for it as `kubectl drain` does. None: granted; else the refusal."""
        metadata = {"name": pod["metadata"]["name"], "namespace": self.namespace}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{metadata['name']}/eviction"
        asked = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})
        done = subprocess.run(
            self.kube.enter("kubectl", "create", "--raw", path, "--filename=-"),
            input=asked,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return None if done.returncode == 0 else done.stderr

    def events(self, reason: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.kube.get(
            "events", "--namespace", self.namespace, f"--field-selector=reason={reason}"
        )["items"]
        return found


def counts(found: Pods) -> dict[str, int]:
    return {name: len(pods) for name, pods in found.items()}


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {str(pod["metadata"]["name"]) for pod in pods}


def nodes(pods: list[dict[str, Any]]) -> Counter[str]:
    return Counter(str(pod["spec"]["nodeName"]) for pod in pods)


def zones(pods: list[dict[str, Any]]) -> Counter[str]:
    return Counter(zone_of(str(pod["spec"]["nodeName"])) for pod in pods)


def zone_of(node: str) -> str:
    return f"zone-{int(node.rpartition('-')[2]) % ZONES}"


@contextmanager
def fleet() -> Iterator[Kube]:
    with running_cluster(
        "--nodes", "fake", "--fake-nodes", str(GPU_NODES), "--pod-start-seconds", "1", "--kuberay", must=True
    ) as found:
        kube = Kube(found.inside, found)
        kube.apply(*(cpu_node(f"cpu-{number}") for number in range(CPU_NODES)))
        kube.kubectl("taint", "nodes", "--selector=type=kwok", f"{GPU}=present:NoSchedule")
        for zone in range(ZONES):
            there = [name for name in every_node() if zone_of(name) == f"zone-{zone}"]
            kube.kubectl("label", "nodes", *there, f"topology.kubernetes.io/zone=zone-{zone}")
        kube.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=60s")
        with beating(found):
            yield kube


def every_node() -> list[str]:
    return [*(f"node-{number}" for number in range(GPU_NODES)), *(f"cpu-{number}" for number in range(CPU_NODES))]


def cpu_node(name: str) -> dict[str, object]:
    room = {"cpu": "8", "memory": "64Gi", "pods": "110"}
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {"allocatable": room, "capacity": room},
    }


@contextmanager
def beating(cluster: Cluster) -> Iterator[None]:
    """Nodes without a kubelet count as lost after 50 s, unless somebody renews their Leases."""

    async def main(folder: Path) -> None:
        async with open_objects(account_of(cluster, folder)) as api:
            await beat(api)

    async def ended(task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])

    with tempfile.TemporaryDirectory() as folder:
        loop = asyncio.new_event_loop()
        task = loop.create_task(main(Path(folder) / "admin"))
        thread = threading.Thread(target=loop.run_until_complete, args=(ended(task),))
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()
        assert task.cancelled(), task.exception()


def storage(kube: Kube) -> None:
    """A default class, and volumes for whoever claims one."""
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"}
    provisioner = "kubernetes.io/no-provisioner"
    kube.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "disk", "annotations": annotations},
            "provisioner": provisioner,
        }
    )
    modes = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": modes,
        "storageClassName": "disk",
        "hostPath": {"path": "/nowhere"},
    }
    for number in range(VOLUMES):
        kube.apply(
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"disk-{number}"}, "spec": spec}
        )


def claim(kube: Kube, namespace: str, name: str, mode: str) -> None:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
    )


def priority(kube: Kube, name: str, value: int) -> None:
    kube.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value}
    )


@contextmanager
def neighbours(kube: Kube, replicas: int, resources: dict[str, str], **placement: object) -> Iterator[None]:
    """Pods of somebody else, which nobody here may preempt."""
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "neighbours"}})
    priority(kube, "neighbours", 1_000_000)
    container = {"name": "work", "image": "none", "resources": {"requests": resources, "limits": resources}}
    tolerations = [{"key": GPU, "operator": "Exists"}]
    pod = {
        "priorityClassName": "neighbours",
        "terminationGracePeriodSeconds": 0,
        "tolerations": tolerations,
        "containers": [container],
        **placement,
    }
    template = {"metadata": {"labels": {"app": "work"}}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": "work"}}, "template": template}
    kube.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "work", "namespace": "neighbours"},
            "spec": spec,
        }
    )
    try:
        kube.kubectl("rollout", "status", "deployment/work", "--namespace", "neighbours", "--timeout=60s")
        yield
    finally:
        kube.kubectl("delete", "deployment", "work", "--namespace", "neighbours", "--cascade=foreground", "--wait")
