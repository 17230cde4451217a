"""The autoscaler as a process of its own beside a RayService: composition root of `penstock autoscale`.

Any number of them may run; the one that holds the Lease observes and acts, the others watch and wait. A new leader
takes over the records of the one before and learns the load within a window; until then it moves nothing down. Whatever
does not answer (the API server, Redis, the serve agent, Serve), the last targets hold.
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
from kubernetes.aio.client import ApiClient
from redis.exceptions import RedisError

from penstock.autoscale.journal import Journal
from penstock.autoscale.kubernetes.client import ACCOUNT, CALL_S, account_of, open_client
from penstock.autoscale.kubernetes.elector import Elector, end, run_elector
from penstock.autoscale.kubernetes.events import EventLog
from penstock.autoscale.kubernetes.lease import Times
from penstock.autoscale.kubernetes.mirror import Mirror, list_pods, list_ray
from penstock.autoscale.kubernetes.pages import Pages, serve_pages
from penstock.autoscale.kubernetes.resources import WORKERS, Pod, RayCluster, Service, cluster_of, pod_of, service_of
from penstock.autoscale.kubernetes.shortages import find_shortages
from penstock.autoscale.kubernetes.workers import Workers, follow_all
from penstock.autoscale.limits.shortage import Shortage
from penstock.autoscale.observe import Reports
from penstock.autoscale.records.store import RedisRecords
from penstock.autoscale.remote import RemoteServe
from penstock.autoscale.scaler import ScaledPool, Scaler
from penstock.autoscale.starts import PodTimes
from penstock.base.environment import REDIS_URL, redis_url
from penstock.base.errors import ConfigError
from penstock.base.metrics import Metrics
from penstock.base.redis import connect
from penstock.wire.serve_agent import ANSWER_S, AppPlaces

PERIOD_S = 1.0
"""Time from the beginning of one turn to that of the next."""
RAY_CLUSTERS_OF = "ray.io/originated-from-cr-name"
"""Label of the Ray clusters that a RayService has made."""

log = logging.getLogger("penstock.autoscale")


class Options(NamedTuple):
    """What `penstock autoscale` was given on its command line."""

    namespace: str
    rayservice: str | None
    """RayService whose Ray clusters are scaled: the active one, and the one that is to take its place."""
    raycluster: str | None
    """RayCluster that is scaled instead, where no RayService is named."""
    lease: str
    port: int
    """TCP port of /healthz and /metrics."""
    account: Path = ACCOUNT
    times: Times = Times()


class Autoscaler:
    """Everything that one process holds, wired."""

    def __init__(
        self,
        options: Options,
        pools: Sequence[ScaledPool],
        kubernetes: ApiClient,
        client: redis.asyncio.Redis,
        metrics: Metrics,
        budget_gpus: int | None = None,
    ) -> None:
        random = Random()
        name = f"{os.environ.get('HOSTNAME', 'autoscaler')}_{uuid.uuid4().hex[:8]}"
        named = f"metadata.name={options.rayservice or options.raycluster}"
        selected = (
            {"field_selector": named}
            if options.raycluster
            else {"label_selector": f"{RAY_CLUSTERS_OF}={options.rayservice}"}
        )
        self.services: Mirror[Service] = Mirror(
            "rayservices",
            list_ray(kubernetes, options.namespace, "rayservices", field_selector=named),
            service_of,
            random,
        )
        self.clusters: Mirror[RayCluster] = Mirror(
            "rayclusters", list_ray(kubernetes, options.namespace, "rayclusters", **selected), cluster_of, random
        )
        self.pods: Mirror[Pod] = Mirror("pods", list_pods(kubernetes, options.namespace, WORKERS), pod_of, random)
        self.elector = Elector(kubernetes, options.namespace, options.lease, name, options.times)
        self.pages = Pages(metrics, options.lease, self.elector.is_leader)
        self._name = name
        self._options = options
        self._pools = pools
        self._budget_gpus = budget_gpus
        self._client = client
        self._serve = RemoteServe(client, {pool.name: pool.app_name for pool in pools}, self._active, self._leader_term)
        self._events = EventLog(kubernetes, options.namespace)
        self._workers = Workers(
            kubernetes, options.namespace, self.clusters, self.pods, lambda: self.elector.is_leader(CALL_S)
        )

    async def lead(self) -> None:
        """Observes and acts whenever this process is the leader, until cancelled."""
        while True:
            await self.elector.wait_until_leader(is_leader=True)
            scaler = Scaler(
                self._name,
                self._pools,
                Reports(self._client),
                self._serve,
                Journal(None),
                records=RedisRecords(self._client),
                budget_gpus=self._budget_gpus,
                shortages=self._shortages,
                pod_times=self._pod_times,
            )
            turns = asyncio.create_task(self._turns(scaler), name="turns")
            try:
                await self.elector.wait_until_leader(is_leader=False)
            finally:
                await end([turns])

    async def _turns(self, scaler: Scaler) -> None:
        """Takes a turn each period until cancelled, whatever a turn raises."""
        while True:
            began_s = time.monotonic()
            try:
                await scaler.reconcile()
                await self._follow()
                await self._tell_events(scaler)
            except Exception:  # the top: one turn that fails must not be the last
                log.exception("turn failed")
            self.pages.note_turn()
            await asyncio.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))

    async def _follow(self) -> None:
        service = self._service()
        places: dict[str, list[AppPlaces]] = {}
        for cluster in filter(None, (service.active, service.pending)):
            try:
                places[cluster] = await self._serve.locate(cluster)
            except (TimeoutError, ValueError) as error:
                log.info("serve agent not reached", extra={"ray_cluster": cluster, "error": str(error)})
        if self.elector.is_leader(ANSWER_S):
            await follow_all(self._workers, places)
        if service.active in places:
            try:
                await self._serve.remember(places[service.active])
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("targets not remembered", extra={"error": type(error).__name__})

    async def _tell_events(self, scaler: Scaler) -> None:
        cluster = self.clusters.objects.get(self._active() or "")
        if cluster is not None and self.elector.is_leader(CALL_S):
            await self._events.tell(cluster, scaler.explanations)

    def _shortages(self) -> dict[str, Shortage]:
        """The shortages of the active Ray cluster, by application: its worker groups have their names."""
        return find_shortages(self.clusters.objects.get(self._active() or ""), self.pods.objects.values())

    def _pod_times(self) -> dict[str, PodTimes]:
        """How long the newest ready pod of each worker group of the active Ray cluster took, by application."""
        name = self._active()
        own = [pod for pod in self.pods.objects.values() if pod.cluster == name and pod.is_ready]
        return {pod.group: pod.times for pod in sorted(own, key=lambda pod: pod.created) if pod.times is not None}

    def _service(self) -> Service:
        if self._options.rayservice is None:
            return Service(self._options.raycluster)
        return self.services.objects.get(self._options.rayservice, Service(None))

    def _active(self) -> str | None:
        return self._service().active

    def _leader_term(self) -> int:
        """The term under which the leader acts. Raises TimeoutError when it may not act any more."""
        if not self.elector.is_leader(ANSWER_S):
            raise TimeoutError("not sure to be the leader for long enough")
        return self.elector.term


async def autoscale(options: Options, pools: Sequence[ScaledPool], budget_gpus: int | None = None) -> None:
    """Runs until SIGTERM or SIGINT. budget_gpus: GPUs of all pools together. Raises ConfigError at once where something
    is missing, and what ends one of its tasks."""
    url = redis_url("autoscaler")
    if url is None:
        raise ConfigError(f"{REDIS_URL} is not set: the autoscaler learns the load through Redis")
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    metrics = Metrics()
    client = connect(url)
    account = account_of(os.environ, options.account)
    async with open_client(
        account, lambda verb, resource, status: metrics.kubernetes_calls.labels(verb, resource, status).inc()
    ) as kubernetes:
        scaler = Autoscaler(options, pools, kubernetes, client, metrics, budget_gpus)
        log.info(
            "autoscaler ready",
            extra={"of": options.rayservice or options.raycluster, "pools": [pool.name for pool in pools]},
        )
        async with run_elector(scaler.elector):
            mirrors = [
                scaler.clusters.run(),
                scaler.pods.run(),
                *([scaler.services.run()] if options.rayservice is not None else []),
            ]
            parts = [*mirrors, scaler.lead(), serve_pages(scaler.pages, options.port), stopped.wait()]
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await end(tasks)
    await client.aclose()
