"""Keeps the worker groups of a RayCluster at what Serve wants; the only one that writes to it.

It is told what Serve says and compares: what KubeRay's operator, an upgrade of it or a person has written over our
numbers is put back the same way as a new target is carried out. One patch for all groups of a cluster, at most a few
tries; what did not succeed is due next time.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from penstock.autoscale.kubernetes.api import Api, ApiAway, ApiRefused, Conflict, Unfit
from penstock.autoscale.kubernetes.plan import Change, patch_of, plan
from penstock.autoscale.kubernetes.resources import Pod, RayCluster
from penstock.autoscale.kubernetes.watched import Watched
from penstock.wire.serve_agent import AppPlaces

TRIES = 3
GROUP = "/apis/ray.io/v1"

log = logging.getLogger("penstock.workers")


class Workers:
    def __init__(
        self, api: Api, namespace: str, clusters: Watched[RayCluster], pods: Watched[Pod], may_write: Callable[[], bool]
    ) -> None:
        """may_write: looked at right before every write, since what was read for it may have taken long (or this
        process was paused meanwhile)."""
        self._api = api
        self._path = f"{GROUP}/namespaces/{namespace}/rayclusters"
        self._clusters = clusters
        self._pods = pods
        self._may_write = may_write
        self._last: dict[tuple[str, str], int] = {}
        """By cluster and group: what we made it."""

    async def follow(self, name: str, apps: Iterable[AppPlaces]) -> bool:
        """Make that Ray cluster's groups what Serve wants of these applications; others stay. Whether nothing is left
        to do. Raises ApiAway, ApiRefused."""
        wanted = {app.app: app for app in apps}
        clusters, pods = self._clusters.objects, self._pods.objects
        refused = ""
        for _ in range(TRIES):
            changes = changes_of(clusters.get(name), pods.values(), wanted)
            if any(change.replicas < change.group.replicas for change in changes):
                pods = await self._pods.read()  # a pod that is named and not there any more would cost another one
                changes = changes_of(clusters.get(name), pods.values(), wanted)
            if not changes:
                return name in clusters
            if not self._may_write():
                return False
            try:
                await self._api.patch(f"{self._path}/{name}", patch_of(changes))
            except (Conflict, Unfit) as error:
                refused = error.message
                clusters = await self._clusters.read()
                continue
            self._note(name, changes)
            return True
        log.warning("workers not set", extra={"ray_cluster": name, "error": f"{TRIES} times: {refused}"})
        return False

    def _note(self, name: str, changes: Iterable[Change]) -> None:
        for group, replicas, to_delete in changes:
            ours = self._last.get((name, group.name))
            going = [pod for pod in to_delete if pod not in group.to_delete]
            line = {
                "ray_cluster": name,
                "group": group.name,
                "was": group.replicas,
                "replicas": replicas,
                "going": going,
            }
            log.info("workers", extra=line | {"put_back": ours is not None and ours != group.replicas})
            self._last[name, group.name] = replicas


def changes_of(cluster: RayCluster | None, pods: Iterable[Pod], wanted: Mapping[str, AppPlaces]) -> list[Change]:
    """Of all its groups. cluster None: it is not known (yet)."""
    if cluster is None:
        return []
    by_group: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.cluster == cluster.name:
            by_group.setdefault(pod.group, []).append(pod)
    found = [
        plan(group, by_group.get(group.name, ()), wanted[group.name])
        for group in cluster.groups
        if group.name in wanted
    ]
    return [change for change in found if change is not None]


async def follow_all(workers: Workers, places: Mapping[str, Iterable[AppPlaces]]) -> None:
    """Of every cluster on its own: what the API server refuses or fails to answer for one leaves the others their turn,
    and is due next time."""
    for name, apps in places.items():
        try:
            await workers.follow(name, apps)
        except (ApiAway, ApiRefused) as error:
            log.warning("workers not set", extra={"ray_cluster": name, "error": error.message})
