"""Keeps the worker groups of a RayCluster at Serve's targets; the only writer of them on our side.

It compares the groups with Serve's state: what KubeRay's operator, an upgrade of it or a person has written over our
numbers is put back the same way as a new target is carried out. One patch for all groups of a cluster, at most a few
tries; what did not succeed is due next time.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from kubernetes.aio.client import ApiClient, ApiException, CustomObjectsApi
from kubernetes.aio.client.exceptions import ConflictException, UnprocessableEntityException

from penstock.autoscale.kubernetes.client import JSON_PATCH, describe
from penstock.autoscale.kubernetes.mirror import Mirror
from penstock.autoscale.kubernetes.plan import Change, patch_of, plan
from penstock.autoscale.kubernetes.resources import RAY_GROUP, RAY_VERSION, Pod, RayCluster
from penstock.wire.serve_agent import AppPlaces

TRIES = 3

log = logging.getLogger("penstock.workers")


class Workers:
    """The worker groups of all Ray clusters in a namespace."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        clusters: Mirror[RayCluster],
        pods: Mirror[Pod],
        may_write: Callable[[], bool],
    ) -> None:
        """may_write: checked right before every write, since what was read for it may have taken long (or this process
        was paused meanwhile)."""
        self._objects = CustomObjectsApi(client)
        self._namespace = namespace
        self._clusters = clusters
        self._pods = pods
        self._may_write = may_write
        self._last: dict[tuple[str, str], int] = {}
        """Replicas that we last wrote, by cluster and group."""

    async def follow(self, name: str, apps: Iterable[AppPlaces]) -> bool:
        """Brings the groups of that Ray cluster to Serve's targets for these applications; other groups stay. Returns
        whether nothing is left to do. Raises ApiException."""
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
                await self._patch(name, changes)
            except (ConflictException, UnprocessableEntityException) as error:
                refused = describe(error)
                clusters = await self._clusters.read()
                continue
            self._note(name, changes)
            return True
        log.warning("workers not set", extra={"ray_cluster": name, "error": f"{TRIES} times: {refused}"})
        return False

    async def _patch(self, name: str, changes: Iterable[Change]) -> None:
        await self._objects.patch_namespaced_custom_object(
            RAY_GROUP,
            RAY_VERSION,
            self._namespace,
            "rayclusters",
            name,
            patch_of(changes),
            _content_type=JSON_PATCH,
        )

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
    """The changes that the cluster's groups need. cluster: None if it is not known (yet); then there are no changes."""
    if cluster is None:
        return []
    by_group: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.cluster == cluster.name:
            by_group.setdefault(pod.group, []).append(pod)
    found = [
        plan(group, by_group.get(group.name, ()), wanted[group.name], is_refused=cluster.refused is not None)
        for group in cluster.groups
        if group.name in wanted
    ]
    return [change for change in found if change is not None]


async def follow_all(workers: Workers, places: Mapping[str, Iterable[AppPlaces]]) -> None:
    """Follows every cluster on its own: what the API server refuses or fails to answer for one leaves the others their
    turn, and is due next time."""
    for name, apps in places.items():
        try:
            await workers.follow(name, apps)
        except ApiException as error:
            log.warning("workers not set", extra={"ray_cluster": name, "error": describe(error)})
