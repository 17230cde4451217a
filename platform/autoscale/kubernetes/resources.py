"""What is kept of KubeRay's objects and of pods: the few fields that scaling reads. Data only; field names are
KubeRay's (ray.io/v1).

A worker group has the name of the Serve application whose replicas live there.
"""

from datetime import datetime
from typing import Any, NamedTuple

from penstock.autoscale.starts import PodTimes

Document = dict[str, Any]
"""An object of the Kubernetes API as it is in JSON."""

RAY_GROUP, RAY_VERSION = "ray.io", "v1"
"""API group and version of KubeRay's resources."""
CLUSTER_LABEL, GROUP_LABEL, TYPE_LABEL = "ray.io/cluster", "ray.io/group", "ray.io/node-type"
WORKERS = f"{TYPE_LABEL}=worker"
"""Label selector of the pods that run Ray workers."""
UNBOUNDED = 2**31 - 1


class Service(NamedTuple):
    """A RayService: the Ray clusters behind it."""

    active: str | None
    """Name of the Ray cluster that serves; None: there is none yet."""
    pending: str | None = None
    """Name of the Ray cluster that is being built to take its place."""


class Group(NamedTuple):
    """A worker group of a RayCluster."""

    place: int
    """Index in spec.workerGroupSpecs; 0 is the first."""
    name: str
    replicas: int
    """KubeRay's resource definition makes it 0 where it is not given."""
    min_replicas: int = 0
    max_replicas: int = UNBOUNDED
    to_delete: tuple[str, ...] = ()
    """Pods named in scaleStrategy.workersToDelete."""


class RayCluster(NamedTuple):
    name: str
    groups: tuple[Group, ...]
    uid: str = ""
    refused: str | None = None
    """What KubeRay's operator says where it could not make a pod; None: it could."""


class Pod(NamedTuple):
    name: str
    cluster: str
    group: str
    created: str
    """RFC 3339: sorts by time."""
    address: str | None = None
    is_ready: bool = False
    is_ending: bool = False
    times: PodTimes | None = None
    """How long its start took until its container ran; None: it does not run yet."""
    unplaced: str | None = None
    """What the scheduler says where no node has room; None: it has said nothing like that."""


def service_of(document: Document) -> Service:
    status = document.get("status") or {}
    return Service(_cluster_name(status, "activeServiceStatus"), _cluster_name(status, "pendingServiceStatus"))


def cluster_of(document: Document) -> RayCluster:
    groups = (document.get("spec") or {}).get("workerGroupSpecs") or []
    metadata = document["metadata"]
    return RayCluster(
        metadata["name"],
        tuple(_group(place, group) for place, group in enumerate(groups)),
        metadata.get("uid") or "",
        _message_of(document, "ReplicaFailure", "True"),
    )


def pod_of(document: Document) -> Pod:
    metadata, status = document["metadata"], document.get("status") or {}
    labels = metadata.get("labels") or {}
    conditions = status.get("conditions") or []
    return Pod(
        name=metadata["name"],
        cluster=labels.get(CLUSTER_LABEL, ""),
        group=labels.get(GROUP_LABEL, ""),
        created=metadata.get("creationTimestamp") or "",
        address=status.get("podIP") or None,
        is_ready=any(
            condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions
        ),
        is_ending=metadata.get("deletionTimestamp") is not None or status.get("phase") in ("Succeeded", "Failed"),
        times=_times_of(metadata, status),
        unplaced=_message_of(document, "PodScheduled", "False", "Unschedulable"),
    )


def _times_of(metadata: Document, status: Document) -> PodTimes | None:
    """The times of a pod's start. Returns None while its first container does not run or one of the times is not
    there."""
    scheduled: Document = next(
        (each for each in status.get("conditions") or [] if each.get("type") == "PodScheduled"), {}
    )
    container = (status.get("containerStatuses") or [{}])[0]
    moments = (
        metadata.get("creationTimestamp"),
        scheduled.get("lastTransitionTime") if scheduled.get("status") == "True" else None,
        ((container.get("state") or {}).get("running") or {}).get("startedAt"),
    )
    created, placed, ran = (None if moment is None else datetime.fromisoformat(moment) for moment in moments)
    if created is None or placed is None or ran is None:
        return None
    schedule_s = max(0.0, (placed - created).total_seconds())
    return PodTimes(schedule_s, max(0.0, (ran - placed).total_seconds()))


def _message_of(document: Document, kind: str, value: str, reason: str | None = None) -> str | None:
    """The message of a condition of that type and value, and that reason where one is named. Returns None if there is
    no such condition."""
    for condition in (document.get("status") or {}).get("conditions") or []:
        if (condition.get("type"), condition.get("status")) == (kind, value) and (
            reason is None or condition.get("reason") == reason
        ):
            return str(condition.get("message") or "")
    return None


def _group(place: int, spec: dict[str, Any]) -> Group:
    strategy = spec.get("scaleStrategy") or {}
    most: int | None = spec.get("maxReplicas")
    return Group(
        place=place,
        name=spec["groupName"],
        replicas=spec.get("replicas") or 0,
        min_replicas=spec.get("minReplicas") or 0,
        max_replicas=UNBOUNDED if most is None else most,
        to_delete=tuple(strategy.get("workersToDelete") or ()),
    )


def _cluster_name(status: dict[str, Any], which: str) -> str | None:
    return (status.get(which) or {}).get("rayClusterName") or None
