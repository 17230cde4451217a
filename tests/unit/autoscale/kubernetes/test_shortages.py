"""Shortages by the conditions that Kubernetes' scheduler and KubeRay's operator write."""

from typing import Any

from penstock.autoscale.kubernetes.resources import cluster_of, pod_of
from penstock.autoscale.kubernetes.shortages import MAX_MESSAGE, find_shortages
from penstock.autoscale.limits.shortage import Shortage

NO_NODE = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
NO_QUOTA = 'pods "rc-pool-a-worker-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1'


def pod(name: str, group: str = "pool-a", condition: tuple[str, str, str, str] | None = None, **more: Any) -> Any:
    labels = {"ray.io/cluster": "rc", "ray.io/group": group}
    conditions = (
        [] if condition is None else [dict(zip(("type", "status", "reason", "message"), condition, strict=True))]
    )
    return pod_of({"metadata": {"name": name, "labels": labels, **more}, "status": {"conditions": conditions}})


def ray_cluster(refusal: str | None = None, **replicas: int) -> Any:
    groups = [{"groupName": f"pool-{name}", "replicas": count} for name, count in replicas.items()]
    conditions = [{"type": "RayClusterProvisioned", "status": "True", "message": "ready"}]
    if refusal is not None:
        conditions += [
            {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreateWorkerPod", "message": refusal}
        ]
    return cluster_of(
        {
            "metadata": {"name": "rc", "uid": "u"},
            "spec": {"workerGroupSpecs": groups},
            "status": {"conditions": conditions},
        }
    )


PLACED = ("PodScheduled", "True", "", "")
UNPLACED = ("PodScheduled", "False", "Unschedulable", NO_NODE)


def test_pods_that_no_node_has_room_for_are_counted_with_the_schedulers_words() -> None:
    pods = [pod("1", condition=PLACED), pod("2"), pod("3", condition=UNPLACED), pod("4", condition=UNPLACED)]

    assert find_shortages(ray_cluster(a=4), pods) == {"pool-a": Shortage("unschedulable", 2, 2, NO_NODE)}


def test_pods_that_a_quota_refuses_are_those_that_a_group_lacks() -> None:
    pods = [pod("1", condition=PLACED), pod("2", "pool-b", PLACED)]

    assert find_shortages(ray_cluster(NO_QUOTA, a=3, b=1), pods) == {"pool-a": Shortage("quota", 1, 2, NO_QUOTA)}
    refused = find_shortages(ray_cluster("denied by policy", a=3), pods)
    assert refused["pool-a"].kind == "refused"


def test_where_all_have_a_place_or_are_only_on_their_way_there_is_no_shortage() -> None:
    assert find_shortages(ray_cluster(a=3), [pod("1", condition=PLACED), pod("2")]) == {}
    assert find_shortages(ray_cluster(NO_QUOTA, a=1), [pod("1", condition=PLACED)]) == {}
    assert find_shortages(None, [pod("1", condition=UNPLACED)]) == {}


def test_pods_that_end_and_those_of_other_clusters_do_not_count() -> None:
    ending = pod("1", condition=UNPLACED, deletionTimestamp="2026-11-24T00:00:00Z")
    other = pod("2", condition=UNPLACED)._replace(cluster="other")

    assert find_shortages(ray_cluster(a=2), [ending, other]) == {}


def test_a_long_message_is_cut() -> None:
    found = find_shortages(ray_cluster("exceeded quota " * 100, a=1), [])

    assert len(found["pool-a"].message) == MAX_MESSAGE
