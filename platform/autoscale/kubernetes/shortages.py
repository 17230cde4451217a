"""Worker pods that Kubernetes does not place, by the conditions that it and KubeRay's operator write. Pure.

The scheduler says of a pod that no node has room for it (PodScheduled: False, Unschedulable). A pod that a quota or an
admission refuses is never made: then the operator says so of the RayCluster (ReplicaFailure: True), with the API
server's words, and the groups that lack pods are those that it means.
"""

from collections.abc import Iterable

from penstock.autoscale.kubernetes.resources import Group, Pod, RayCluster
from penstock.autoscale.limits.shortage import Shortage

QUOTA = "exceeded quota"
"""The API server's words where a ResourceQuota refuses an object."""
MAX_MESSAGE = 300
"""Longest message that is kept, in characters."""


def find_shortages(cluster: RayCluster | None, pods: Iterable[Pod]) -> dict[str, Shortage]:
    """The shortages of the cluster's worker groups, by group. cluster: None if it is not known; then there are none."""
    if cluster is None:
        return {}
    own = [pod for pod in pods if pod.cluster == cluster.name and not pod.is_ending]
    found = {
        group.name: _find_shortage(cluster, group, [pod for pod in own if pod.group == group.name])
        for group in cluster.groups
    }
    return {name: shortage for name, shortage in found.items() if shortage is not None}


def _find_shortage(cluster: RayCluster, group: Group, pods: list[Pod]) -> Shortage | None:
    unplaced = [pod for pod in pods if pod.unplaced is not None]
    num_placed = len(pods) - len(unplaced)
    num_missing = group.replicas - num_placed
    if num_missing <= 0:
        return None
    if cluster.refused is not None and group.replicas > len(pods):
        return Shortage(
            "quota" if QUOTA in cluster.refused else "refused", num_placed, num_missing, _cut(cluster.refused)
        )
    if not unplaced:
        return None
    return Shortage("unschedulable", num_placed, len(unplaced), _cut(unplaced[0].unplaced or ""))


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"
