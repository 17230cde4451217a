"""Kubernetes Events about the pools of a RayCluster, for `kubectl describe` and `kubectl get events`.

One for every change of a target, one when replicas find no place, one when they have. What can't be written is lost,
and scaling goes on: an Event is news, not state.
"""

import logging
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from kubernetes.aio.client import ApiClient, ApiException, CoreV1Api

from penstock.autoscale.kubernetes.client import describe
from penstock.autoscale.kubernetes.resources import RAY_GROUP, RAY_VERSION, Document, RayCluster
from penstock.wire.explanation import PoolExplanation

COMPONENT = "penstock-autoscaler"
UNPLACED, PLACED, CHANGED = "ReplicasUnplaced", "ReplicasPlaced", "TargetChanged"

log = logging.getLogger("penstock.events")


class News(NamedTuple):
    """What an Event says."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


class EventLog:
    """Writes Events. Remembers what it has said of each pool, so that each thing is said once."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._api = CoreV1Api(client)
        self._namespace = namespace
        self._last: dict[str, PoolExplanation] = {}

    async def tell(self, cluster: RayCluster, explanations: Iterable[PoolExplanation]) -> None:
        """Writes what is new in the pools' explanations, as Events of that Ray cluster."""
        for found in explanations:
            before, self._last[found.pool] = self._last.get(found.pool), found
            for news in find_news(before, found):
                await self._write(event_of(cluster, self._namespace, news, datetime.now(UTC)))

    async def _write(self, event: Document) -> None:
        try:
            await self._api.create_namespaced_event(self._namespace, event)
        except ApiException as error:
            log.warning("event not written", extra={"reason": event["reason"], "error": describe(error)})


def find_news(before: PoolExplanation | None, found: PoolExplanation) -> list[News]:
    """What is new of a pool. before: its explanation of the turn before; None: there was none."""
    known = () if before is None else before.changes
    news = [
        News(
            "Normal",
            CHANGED,
            f"pool {found.pool}: target {change.was} to {change.target}, by {change.reason} ({change.outcome})",
        )
        for change in found.changes
        if change not in known
    ]
    had = None if before is None else before.shortage
    if found.shortage is not None and (had is None or had.kind != found.shortage.kind):
        what = f"{found.shortage.num_unplaced} replicas have no place ({found.shortage.kind})"
        news.append(News("Warning", UNPLACED, f"pool {found.pool}: {what}: {found.shortage.message}"))
    if found.shortage is None and had is not None:
        news.append(News("Normal", PLACED, f"pool {found.pool}: no replica waits for a place any more"))
    return news


def event_of(cluster: RayCluster, namespace: str, news: News, moment: datetime) -> Document:
    """The Event, as Kubernetes' API takes it (core/v1)."""
    stamp = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    involved: Mapping[str, str] = {
        "apiVersion": f"{RAY_GROUP}/{RAY_VERSION}",
        "kind": "RayCluster",
        "name": cluster.name,
        "namespace": namespace,
        "uid": cluster.uid,
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{cluster.name}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
        "involvedObject": dict(involved),
        "type": news.kind,
        "reason": news.reason,
        "message": news.message,
        "count": 1,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }
