"""Where the presets' pods go on twenty nodes of eight GPUs and six without: GPUs, spread, priority, budgets, and what
the cluster says when a pod can't go."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.fleet import (
    CPU_NODES,
    GPU,
    GPU_NODES,
    Pods,
    Release,
    claim,
    every_node,
    fleet,
    names,
    neighbours,
    nodes,
    priority,
    storage,
    zones,
)
from tests.e2e.kube import ROOT, Kube, until

pytestmark = pytest.mark.timeout(600)

PODS = {"head": 1, "gateway": 3, "pool-edge": 2, "pool-cloud": 4, "redis": 1, "autoscaler": 2}
SERVING, REPLICA = 100_000, 10_000
"""What values-production.yaml says of the two priority classes."""
BUDGETED = ("gateway", "pool-edge", "pool-cloud", "autoscaler")
"""Parts of two pods or more. The head and Redis are one pod each: a budget would keep their node from ever being
drained."""


SECTION = re.search(
    r"^## When a pod stays Pending\n(.*?)^## ",
    (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
assert SECTION is not None
LOOK = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", SECTION[1], re.MULTILINE | re.DOTALL)[:1]
    for line in block.splitlines()
]
"""The document's commands for Pending pods."""
REASONS = {
    phrase for row in re.findall(r"^\| (`.*?) \|", SECTION[1], re.MULTILINE) for phrase in re.findall(r"`(.+?)`", row)
}
"""What it says that the cluster says."""
UNEVEN = "didn't match pod topology spread constraints"


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    with fleet() as found:
        storage(found)
        yield found


@pytest.fixture(scope="module")
def production(kube: Kube) -> Release:
    """Installed as the preset's own comment says, all pods running. Every test leaves it so."""
    priority(kube, "penstock-serving", SERVING)
    priority(kube, "penstock-replica", REPLICA)
    release = Release(kube, "penstock", "production")
    kube.kubectl("create", "namespace", release.namespace)
    claim(kube, release.namespace, "checkpoints", "ReadOnlyMany")
    claim(kube, release.namespace, "adapters", "ReadWriteMany")
    release.install("values-production.yaml")
    release.wait(PODS, pending={})
    return release


@pytest.fixture
def pods(production: Release) -> Pods:
    """Pods as installed, also behind a test that failed, and the gateways each on a node of its own, as they began:
    nobody moves what a drained node gave away."""
    for group in ("gateway", "pool-edge", "pool-cloud"):
        production.scale(group, PODS[group])
    while crowded := [node for node, count in nodes(production.wait(PODS, pending={})["gateway"]).items() if count > 1]:
        moved = next(pod for pod in production.pods()["gateway"] if pod["spec"]["nodeName"] in crowded)
        production.kube.kubectl("delete", "pod", moved["metadata"]["name"], "--namespace", production.namespace)
    return production.wait(PODS, pending={})


def gpus_of(pod: dict[str, Any]) -> int:
    return sum(int(container["resources"].get("limits", {}).get(GPU, 0)) for container in pod["spec"]["containers"])


def homeless(release: Release, part: str) -> list[dict[str, Any]]:
    return [pod for pod in release.pods("Pending").get(part, []) if "nodeName" not in pod["spec"]]


def on_gpu_nodes(pods: list[dict[str, Any]]) -> set[bool]:
    return {name.startswith("node-") for name in nodes(pods)}


def test_replicas_that_need_gpus_have_two_each_on_gpu_nodes_and_nobody_else_is_there(pods: Pods) -> None:
    assert {name: {gpus_of(pod) for pod in found} for name, found in pods.items()} == {
        name: {2 if name == "pool-cloud" else 0} for name in PODS
    }
    assert {name: on_gpu_nodes(found) for name, found in pods.items()} == {
        name: {name == "pool-cloud"} for name in PODS
    }


def test_gateways_replicas_and_autoscalers_are_spread_over_nodes_and_zones(pods: Pods) -> None:
    assert {name: max(nodes(pods[name]).values()) for name in BUDGETED} == dict.fromkeys(BUDGETED, 1)
    assert {name: sorted(zones(pods[name]).values()) for name in BUDGETED[:3]} == {
        "gateway": [1, 1, 1],
        "pool-edge": [1, 1],
        "pool-cloud": [1, 1, 2],
    }


def test_what_serves_everybody_goes_before_replicas(pods: Pods) -> None:
    found = {name: {pod["spec"]["priority"] for pod in found} for name, found in pods.items()}

    assert found == {name: {REPLICA if name.startswith("pool-") else SERVING} for name in PODS}


def test_a_pool_grows_to_its_most_with_two_replicas_on_each_gpu_node(production: Release, pods: Pods) -> None:
    """Two of 24 GiB fill a node of 64 GiB; one more than forty has no room."""
    production.scale("pool-cloud", 41)
    full = production.wait(PODS | {"pool-cloud": 40}, pending={"pool-cloud": 1})
    production.scale("pool-cloud", 4)

    assert set(nodes(full["pool-cloud"]).values()) == {2}
    assert len(nodes(full["pool-cloud"])) == GPU_NODES


def test_the_eviction_api_refuses_one_eviction_too_many(kube: Kube, production: Release, pods: Pods) -> None:
    """No pod takes the place of one that is evicted while all nodes are cordoned, as in a drain of all of them."""
    for part in BUDGETED:
        production.wait_for_budget(part)
    kube.kubectl("cordon", *every_node())
    try:
        granted = {part: production.evict(pods[part][0]) for part in BUDGETED}
        short = production.wait(
            {part: PODS[part] - (part in BUDGETED) for part in PODS}, pending=dict.fromkeys(BUDGETED, 1)
        )
        refused = {part: production.evict(pods[part][1]) or "" for part in BUDGETED}
    finally:
        kube.kubectl("uncordon", *every_node())
    back = production.wait(PODS, pending={})
    for part in BUDGETED:
        production.wait_for_budget(part)

    assert granted == dict.fromkeys(BUDGETED)
    assert all("TooManyRequests" in refused[part] and "disruption budget" in refused[part] for part in BUDGETED), (
        refused
    )
    assert all(names(short[part]) == names(pods[part][1:]) <= names(back[part]) for part in BUDGETED)
    assert production.evict(pods["gateway"][1]) is None, "somebody has come in the first one's place"


def test_single_pods_have_no_budget_and_let_their_node_be_drained(production: Release, pods: Pods) -> None:
    assert production.evict(pods["redis"][0]) is None
    assert production.evict(pods["head"][0]) is None


def test_surplus_replicas_stay_pending_when_gpus_are_taken_and_the_document_says_where_to_look(
    kube: Kube, production: Release, pods: Pods
) -> None:
    """Two GPUs are free on each node, for one replica; four replicas are too many."""
    with neighbours(kube, GPU_NODES, {GPU: "6"}):
        production.scale("pool-cloud", GPU_NODES + 4)
        full = production.wait(PODS | {"pool-cloud": GPU_NODES}, pending={"pool-cloud": 4})
        surplus = names(production.pods("Pending")["pool-cloud"])
        until(
            lambda: surplus <= {event["involvedObject"]["name"] for event in production.events("FailedScheduling")},
            "an event for each surplus pod",
        )
        said = [
            kube.run("bash", "-c", command.replace("--namespace penstock", f"--namespace {production.namespace}"))
            for command in LOOK
        ]
    production.wait(PODS | {"pool-cloud": GPU_NODES + 4}, pending={})
    production.scale("pool-cloud", 4)

    pending, events, described = said
    assert set(nodes(full["pool-cloud"]).values()) == {1}
    assert {line.split()[0] for line in pending.splitlines()[1:]} == surplus
    assert all(any(name in line and f"Insufficient {GPU}" in line for line in events.splitlines()) for name in surplus)
    assert len(re.findall(rf"^  {GPU} +8 +8$", described, re.MULTILINE)) == GPU_NODES, "allocated"


def test_gateways_that_must_be_spread_wait_for_the_full_node(kube: Kube, production: Release, pods: Pods) -> None:
    full = sorted(set(every_node()[GPU_NODES:]) - set(nodes(pods["gateway"])))[0]
    with neighbours(kube, 1, {"cpu": "8"}, nodeName=full):
        production.scale("gateway", CPU_NODES)
        production.wait(PODS | {"gateway": CPU_NODES - 1}, pending={"gateway": 1})
        until(
            lambda: any(UNEVEN in event["message"] for event in production.events("FailedScheduling")),
            "an event says why",
        )
    found = production.wait(PODS | {"gateway": CPU_NODES}, pending={})
    production.scale("gateway", PODS["gateway"])

    assert UNEVEN in REASONS
    assert set(nodes(found["gateway"]).values()) == {1}


def test_gateways_take_the_place_of_replicas_when_nodes_are_full(production: Release, pods: Pods) -> None:
    """Twelve of 2 cores on six nodes of 8, where edge replicas of 4 cores have all that is free."""
    production.scale("pool-edge", 2 * CPU_NODES)
    until(
        lambda: len(production.pods()["pool-edge"]) + len(homeless(production, "pool-edge")) == 2 * CPU_NODES,
        "each replica is placed, or refused",
    )
    full = production.pods()
    assert homeless(production, "pool-edge"), "nodes are full"
    production.scale("gateway", 2 * CPU_NODES)
    until(lambda: len(production.pods()["gateway"]) == 2 * CPU_NODES, "every gateway is there")
    after = production.pods()
    victims = {event["involvedObject"]["name"] for event in production.events("Preempted")}
    production.scale("gateway", PODS["gateway"])
    production.scale("pool-edge", PODS["pool-edge"])

    assert set(nodes(after["gateway"]).values()) == {2}, "tainted nodes don't count for the spread"
    assert victims
    assert names(full["pool-edge"]) - names(after["pool-edge"]) <= victims, (
        "who came in a victim's place may be one too"
    )
    assert all("-pool-edge-" in victim for victim in victims)
    for part in ("head", "redis", "autoscaler", "pool-cloud"):
        assert names(after[part]) == names(full[part])
    assert len(after["pool-edge"]) >= PODS["pool-edge"] - 1, "the budget holds for preemption too"


def test_the_gpu_preset_has_a_gpu(kube: Kube) -> None:
    release = Release(kube, "small", "small")
    release.install("values-gpu-small.yaml")
    found = release.wait({"head": 1, "gateway": 2, "pool-llama": 1, "redis": 1, "autoscaler": 2}, pending={})

    assert [gpus_of(pod) for pod in found["pool-llama"]] == [1]
    assert {name for name, pods in found.items() if on_gpu_nodes(pods) == {True}} == {"pool-llama"}


def test_the_demo_needs_no_gpu(kube: Kube) -> None:
    release = Release(kube, "demo", "penstock")
    release.install("values-demo.yaml")
    found = release.wait(
        {"head": 1, "gateway": 2, "pool-edge": 1, "pool-cloud": 1, "redis": 1, "autoscaler": 2}, pending={}
    )

    assert not any(gpus_of(pod) for pods in found.values() for pod in pods)
    assert {on for pods in found.values() for on in on_gpu_nodes(pods)} == {False}


def test_parts_go_where_they_are_sent(kube: Kube) -> None:
    """Two GPUs for a replica, on nodes of a label; everything else on others, of a label and a taint of their own."""
    kube.kubectl("label", "nodes", "node-0", "node-1", "gpu=big")
    kube.kubectl("label", "nodes", "cpu-0", "cpu-1", "for=penstock")
    kube.kubectl("taint", "nodes", "cpu-0", "cpu-1", "for=penstock:NoSchedule")
    mine = "{nodeSelector: {for: penstock}, tolerations: [{key: for, operator: Exists}]}"
    values = "\n".join(f"{part}: {mine}" for part in ("head", "gateway", "autoscaler", "redis"))
    release = Release(kube, "sent", "sent")
    release.install(
        "values-gpu-small.yaml",
        "--set",
        "pools[0].pod.gpus=2",
        "--set",
        "pools[0].pod.nodeSelector.gpu=big",
        values=values,
    )
    found = release.wait({"head": 1, "gateway": 2, "pool-llama": 1, "redis": 1, "autoscaler": 2}, pending={})
    kube.kubectl("taint", "nodes", "cpu-0", "cpu-1", "for-")
    replicas = found.pop("pool-llama")
    job = [event["message"] for event in release.events("Scheduled") if "sent-penstock-tenants" in event["message"]]

    assert [gpus_of(pod) for pod in replicas] == [2]
    assert set(nodes(replicas)) <= {"node-0", "node-1"}
    assert {node for pods in found.values() for node in nodes(pods)} == {"cpu-0", "cpu-1"}
    assert job[0].rpartition(" ")[2] in {"cpu-0", "cpu-1"}


def test_every_reason_in_the_document_is_one_that_the_cluster_gives(kube: Kube) -> None:
    """One release in which every part is wrong in a way of its own."""
    values = f"""
head: {{resources: {{requests: {{memory: 1Ti}}, limits: {{memory: 1Ti}}}}}}
gateway: {{resources: {{requests: {{cpu: "100"}}}}}}
autoscaler: {{priorityClassName: missing}}
redis: {{persistence: {{storageClass: missing}}}}
podDefaults: {{tolerations: [{{key: {GPU}, operator: Exists}}]}}
pools:
- {{name: many, served_names: [a], engine: {{device: cuda}}, pod: {{gpus: 9}}}}
- {{name: taint, served_names: [a], engine: {{device: cuda}}, pod: {{tolerations: []}}}}
- {{name: label, served_names: [a], pod: {{nodeSelector: {{disk: missing}}}}}}
"""
    release = Release(kube, "wrong", "wrong")
    release.install("values-demo.yaml", "--no-hooks", values=values)
    wanted = REASONS - {UNEVEN}

    def missing() -> set[str]:
        said = kube.run("bash", "-c", LOOK[1].replace("--namespace penstock", f"--namespace {release.namespace}"))
        return {reason for reason in wanted if reason not in said}

    assert len(wanted) == 7
    until(lambda: not missing(), "nothing is missing")
