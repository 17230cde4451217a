"""How many worker pods a group should have, and which of them go. Pure, and without memory: a plan follows from Serve's
state alone.

Serve's target is the truth. Pods are added for it at once. They are taken away only by name, and only such as have no
replica in any state: a victim has drained and ended before its pod is named. A pod whose replica is on its way out is
kept, and never a reason for a new one.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from penstock.autoscale.kubernetes.resources import Document, Group, Pod
from penstock.wire.serve_agent import AppPlaces

STOPPING = "STOPPING"


class Change(NamedTuple):
    """A change of one worker group."""

    group: Group
    """The group as it was read."""
    replicas: int
    """Number of pods from now on."""
    to_delete: tuple[str, ...]
    """Names of pods that go, those named before included."""


def plan(group: Group, pods: Iterable[Pod], app: AppPlaces, *, is_refused: bool = False) -> Change | None:
    """The change that a group needs. Returns None if it is right as it is, or can't be made right yet. pods: those of
    the group. is_refused: pods are refused, by a quota say: those that the group lacks are given up first, without a
    name: no pod of theirs is there, or will be made meanwhile."""
    pods = list(pods)
    num_stopping = sum(replica.state == STOPPING for replica in app.replicas)
    keep = max(app.target, min(group.replicas, app.target + num_stopping))
    keep = min(max(keep, group.min_replicas), group.max_replicas)
    named = [name for name in group.to_delete if any(pod.name == name for pod in pods)]
    if keep > group.replicas:
        return Change(group, keep, tuple(named))
    staying = sum(not pod.is_ending and pod.name not in named for pod in pods)
    num_given_up = min(group.replicas - keep, max(0, group.replicas - staying)) if is_refused else 0
    occupied = {replica.address for replica in app.replicas}
    going = free_pods(pods, named, occupied)[: group.replicas - keep - num_given_up]
    if not going and not num_given_up:
        return None
    return Change(group, group.replicas - num_given_up - len(going), (*named, *going))


def free_pods(pods: Sequence[Pod], named: Collection[str], occupied: Collection[str | None]) -> list[str]:
    """Names of pods without a replica, in the order in which they go: those that are not there yet, then the newest."""
    free = [
        pod
        for pod in pods
        if not pod.is_ending and pod.name not in named and (pod.address is None or pod.address not in occupied)
    ]
    by_age = sorted(free, key=lambda pod: (pod.created, pod.name), reverse=True)
    return [pod.name for pod in sorted(by_age, key=lambda pod: pod.is_ready)]


def patch_of(changes: Iterable[Change]) -> list[Document]:
    """A JSON patch that applies only where these groups are as they were read; else the server answers 422. What others
    write meanwhile, KubeRay its status all the time, is no reason to refuse it, and stays: a patch that named the
    object's resourceVersion would hardly get through."""
    operations: list[Document] = []
    for change in changes:
        path, before = f"/spec/workerGroupSpecs/{change.group.place}", change.group
        operations += [
            {"op": "test", "path": f"{path}/groupName", "value": before.name},
            {"op": "test", "path": f"{path}/replicas", "value": before.replicas},
            *(
                [{"op": "test", "path": f"{path}/scaleStrategy/workersToDelete", "value": list(before.to_delete)}]
                if before.to_delete
                else []
            ),
            {"op": "add", "path": f"{path}/replicas", "value": change.replicas},
            {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": list(change.to_delete)}},
        ]
    return operations
