"""The list of replicas: Ray Serve's own broadcast, so that nothing else needs to be up for discovery.

Serve's controller pushes the running replicas of a deployment, with what each publishes of itself, to whoever
long-polls for them. We poll as Serve's own router does, but without one. A RequestRouter subclass and `handle._init()`
show the same, yet come with queue probes of every new replica, metrics, and a poller shared by the process that
ends for good when the controller restarts; here a new one is begun. Both rest on private names of Ray, hence the narrow
version range. A deployment that does not exist yet is simply waited for.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

from penstock.wire.discovery import REPLICA_DEPLOYMENT, StartTimes, from_metadata
from penstock.wire.frames import PREVIOUS_PROTOCOL

CHECK_S = 0.5
"""Pause between two checks that the poller still lives."""

log = logging.getLogger("penstock.members")


class RunningReplica(NamedTuple):
    """A replica as Serve lists it; equal id and epoch are the same process."""

    replica_id: str
    pool: str
    address: str
    epoch: str
    model_digest: str
    max_model_len: int
    block_size: int
    protocol: int = PREVIOUS_PROTOCOL
    """Version of the stream's opening that the replica expects."""
    stream_key_id: str = ""
    """Hex digits by which the replica's stream secret is derived."""
    abilities: frozenset[str] = frozenset()
    """What the replica's engine can do; see `wire.frames.Ability`."""
    has_private_prefixes: bool = False
    """Whether its cache shares not even published prefixes between tenants."""
    start: StartTimes | None = None
    """How long its own phases of the start took; None: it does not say."""


class ReplicaDiscovery:
    """Follows Serve's list of running replicas.

    on_change: called on the loop with all members of all pools, whenever Serve's list of one has changed; by that a
    dead replica is gone within about a second of its death, a stopping one before it has drained, and a new one is
    there as soon as it is ready.
    """

    def __init__(
        self, router_id: str, apps: Mapping[str, str], on_change: Callable[[list[RunningReplica]], None]
    ) -> None:
        """apps: Serve application of each pool."""
        self._router_id = router_id
        self._apps = dict(apps)
        self._on_change = on_change
        self._by_pool: dict[str, list[RunningReplica]] = {}

    async def run(self) -> None:
        """Follow the list until cancelled."""
        client: LongPollClient | None = None
        try:
            while True:
                if client is None or not client.is_running:
                    client = await self._begin()
                await asyncio.sleep(CHECK_S)
        finally:
            if client is not None:
                client.stop()

    async def _begin(self) -> LongPollClient | None:
        """Start a poller. Returns None if Serve's controller is not there."""
        try:
            controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        except ValueError:
            return None
        log.info("discovery begins")
        listeners: Any = {
            (LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID(name=REPLICA_DEPLOYMENT, app_name=app)): partial(
                self.on_targets, pool
            )
            for pool, app in self._apps.items()
        }
        return LongPollClient(controller, listeners, asyncio.get_running_loop(), f"penstock:{self._router_id}")

    def on_targets(self, pool: str, targets: Any) -> None:
        """Take Serve's list of one pool: an object with `running_replicas`."""
        self._by_pool[pool] = [
            member for info in targets.running_replicas if (member := _read_member(pool, info)) is not None
        ]
        log.info("members", extra={"pool": pool, "replicas": [member.replica_id for member in self._by_pool[pool]]})
        self._on_change([member for members in self._by_pool.values() for member in members])


def _read_member(pool: str, info: Any) -> RunningReplica | None:
    published = from_metadata(info.replica_metadata)
    if published is None or published.pool != pool:
        log.warning("not a replica of this version", extra={"pool": pool, "replica": info.replica_id.unique_id})
        return None
    return RunningReplica(
        replica_id=info.replica_id.unique_id,
        pool=pool,
        address=published.address,
        epoch=published.epoch,
        model_digest=published.model_digest,
        max_model_len=published.max_model_len,
        block_size=published.block_size,
        protocol=published.protocol,
        stream_key_id=published.stream_key_id,
        abilities=frozenset(published.abilities),
        has_private_prefixes=published.has_private_prefixes,
        start=published.start,
    )
