"""The autoscaler as a process of its own beside a RayService: composition root of `penstock autoscale`.

Any number of them may run; the one that holds the Lease looks and acts, the others watch and wait. A new leader knows
nothing of the load: it learns it within a window, and until then moves nothing down. Whatever is away (the API server,
Redis, the hand, Serve), the last targets hold.
"""

import asyncio
import logging
import os
import signal
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import redis.asyncio
from redis.exceptions import RedisError

from penstock.autoscale.journal import Journal
from penstock.autoscale.kubernetes.api import ACCOUNT, CALL_S, Api, account_of
from penstock.autoscale.kubernetes.elector import Elector, end, standing
from penstock.autoscale.kubernetes.lease import Times
from penstock.autoscale.kubernetes.pages import Pages, serve_pages
from penstock.autoscale.kubernetes.resources import WORKERS, Pod, RayCluster, Service, cluster_of, pod_of, service_of
from penstock.autoscale.kubernetes.watched import Watched
from penstock.autoscale.kubernetes.workers import GROUP, Workers, follow_all
from penstock.autoscale.observe import Reports
from penstock.autoscale.remote import RemoteServe
from penstock.autoscale.scaler import ScaledPool, Scaler
from penstock.base.environment import REDIS_URL, redis_url
from penstock.base.errors import ConfigError
from penstock.base.metrics import Metrics
from penstock.base.redis import connect
from penstock.wire.serve_agent import ANSWER_S, AppPlaces

PERIOD_S = 1.0
"""Between two looks."""
RAY_CLUSTERS_OF = "ray.io/originated-from-cr-name"
"""Label of the Ray clusters that a RayService has made."""

log = logging.getLogger("penstock.autoscale")


class Options(NamedTuple):
    namespace: str
    rayservice: str | None
    """Whose Ray clusters to scale: the active one, and the one that is to take its place."""
    raycluster: str | None
    """Instead: this one."""
    lease: str
    port: int
    """Of /healthz and /metrics."""
    account: Path = ACCOUNT
    times: Times = Times()


class Autoscaler:
    """What one process holds, wired."""

    def __init__(
        self, options: Options, pools: Sequence[ScaledPool], api: Api, client: redis.asyncio.Redis, metrics: Metrics
    ) -> None:
        random = Random()
        name = f"{os.environ.get('HOSTNAME', 'autoscaler')}_{uuid.uuid4().hex[:8]}"
        ray = f"{GROUP}/namespaces/{options.namespace}"
        named = f"metadata.name={options.rayservice or options.raycluster}"
        query = (
            {"fieldSelector": named}
            if options.raycluster
            else {"labelSelector": f"{RAY_CLUSTERS_OF}={options.rayservice}"}
        )
        self.services: Watched[Service] = Watched(api, f"{ray}/rayservices", service_of, random, fieldSelector=named)
        self.clusters: Watched[RayCluster] = Watched(api, f"{ray}/rayclusters", cluster_of, random, **query)
        self.pods: Watched[Pod] = Watched(
            api, f"/api/v1/namespaces/{options.namespace}/pods", pod_of, random, labelSelector=WORKERS
        )
        self.elector = Elector(api, options.namespace, options.lease, name, options.times)
        self.pages = Pages(metrics, options.lease, self.elector.is_leader)
        self._name = name
        self._options = options
        self._pools = pools
        self._client = client
        self._serve = RemoteServe(client, {pool.name: pool.app_name for pool in pools}, self._active, self._mandate)
        self._workers = Workers(
            api, options.namespace, self.clusters, self.pods, lambda: self.elector.is_leader(CALL_S)
        )

    async def lead(self) -> None:
        """Looks and acts whenever this is the leader, until cancelled."""
        while True:
            await self.elector.until(is_leader=True)
            scaler = Scaler(self._name, self._pools, Reports(self._client), self._serve, Journal(None))
            turns = asyncio.create_task(self._turns(scaler), name="turns")
            try:
                await self.elector.until(is_leader=False)
            finally:
                await end([turns])

    async def _turns(self, scaler: Scaler) -> None:
        """Until cancelled, whatever a turn raises."""
        while True:
            began_s = time.monotonic()
            try:
                await scaler.reconcile()
                await self._follow()
            except Exception:  # the top: one turn that fails must not be the last
                log.exception("turn failed")
            self.pages.turned()
            await asyncio.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))

    async def _follow(self) -> None:
        service = self._service()
        places: dict[str, list[AppPlaces]] = {}
        for cluster in filter(None, (service.active, service.pending)):
            try:
                places[cluster] = await self._serve.locate(cluster)
            except (TimeoutError, ValueError) as error:
                log.info("hand not reached", extra={"ray_cluster": cluster, "error": str(error)})
        if self.elector.is_leader(ANSWER_S):
            await follow_all(self._workers, places)
        if service.active in places:
            try:
                await self._serve.remember(places[service.active])
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("targets not remembered", extra={"error": type(error).__name__})

    def _service(self) -> Service:
        if self._options.rayservice is None:
            return Service(self._options.raycluster)
        return self.services.objects.get(self._options.rayservice, Service(None))

    def _active(self) -> str | None:
        return self._service().active

    def _mandate(self) -> int:
        if not self.elector.is_leader(ANSWER_S):
            raise TimeoutError("not sure to be the leader for long enough")
        return self.elector.term


async def autoscale(options: Options, pools: Sequence[ScaledPool]) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigError at once where something is missing, and what ends one of its
    tasks."""
    url = redis_url()
    if url is None:
        raise ConfigError(f"{REDIS_URL} is not set: the autoscaler hears of the load through Redis")
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    metrics = Metrics()
    client = connect(url)
    account = account_of(os.environ, options.account)
    async with Api(
        account, count=lambda verb, kind, status: metrics.kubernetes_calls.labels(verb, kind, status).inc()
    ) as api:
        scaler = Autoscaler(options, pools, api, client, metrics)
        log.info(
            "autoscaler ready",
            extra={"of": options.rayservice or options.raycluster, "pools": [pool.name for pool in pools]},
        )
        async with standing(scaler.elector):
            watched = [
                scaler.clusters.run(),
                scaler.pods.run(),
                *([scaler.services.run()] if options.rayservice is not None else []),
            ]
            parts = [*watched, scaler.lead(), serve_pages(scaler.pages, options.port), stopped.wait()]
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await end(tasks)
    await client.aclose()
