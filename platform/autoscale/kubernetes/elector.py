"""Takes part in an election by a Lease, for as long as it runs; see `lease` for the rules.

One call an attempt: a leader renews, another process reads and takes what is free. While the API server is away a
leader stops being one at its deadline. A Lease that nobody has held yet (the chart makes one, without a spec) is free;
where there is none it is created, as far as the rights go.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import ApiClient, ApiException, CoordinationV1Api, V1Lease, V1LeaseSpec, V1ObjectMeta
from kubernetes.aio.client.exceptions import ConflictException, NotFoundException

from penstock.autoscale.kubernetes.client import UNREADABLE, describe
from penstock.autoscale.kubernetes.lease import (
    Record,
    State,
    Times,
    is_leader,
    next_record,
    observe,
    record_written,
)

AGAIN_S = 2.0
"""Time after which a task that has not ended is cancelled once more."""
GIVE_BACK_S = 1.0
"""Longest time that giving the Lease back may take at the end."""
CHECK_S = 0.1
"""Time between two checks of the clock by who waits for a change of leader."""

log = logging.getLogger("penstock.elector")


class Elector:
    """One process's part in the election."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        name: str,
        me: str,
        times: Times | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: of the Lease. me: an identity that no other process has ever used for it."""
        self._leases = CoordinationV1Api(client)
        self._namespace = namespace
        self._name = name
        self._me = me
        self._times = times or Times()
        self._clock = clock
        self._state = State()
        self._lease: V1Lease | None = None
        """The Lease as it was last read or written; None where there is none. A write replaces exactly that; labels
        that others put there stay."""
        self._has_read = False
        """Whether what is remembered of the Lease may still be the server's, so that a write may succeed."""

    @property
    def term(self) -> int:
        """The leader's term: rises with every change of leader."""
        return self._state.observed.record.transitions if self._state.observed is not None else 0

    def is_leader(self, margin_s: float = 0.0) -> bool:
        """Whether this process is the leader, and will be for `margin_s` seconds more."""
        return is_leader(self._state, self._clock(), margin_s)

    async def run(self) -> None:
        """Takes part until cancelled; then the Lease is free for the others at once."""
        try:
            while True:
                await self._attempt()
                await asyncio.sleep(self._times.retry_s)
        finally:
            await self._give_back()

    async def wait_until_leader(self, is_leader: bool) -> None:
        """Wait until this process is the leader, or with `is_leader` False until it is not. Polls by the clock, because
        a leader that can't renew its Lease gets no event."""
        while True:
            if self.is_leader() is is_leader:
                return
            await asyncio.sleep(CHECK_S)

    async def _attempt(self) -> None:
        was_leader = self.is_leader()
        try:
            if not (was_leader and self._has_read):
                await self._read()
            record = next_record(self._state, self._me, self._times, self._clock(), _now())
            if record is not None:
                await self._write(record)
        except ConflictException:
            self._has_read = False
        except (ApiException, *UNREADABLE) as error:
            self._has_read = False
            log.warning(
                "lease not reached",
                extra={"lease": self._name, "error": describe(error), "is_leader": self.is_leader()},
            )
        if self.is_leader() != was_leader:
            log.info(
                "leader" if self.is_leader() else "no leader any more",
                extra={"lease": self._name, "me": self._me, "term": self.term},
            )

    async def _read(self) -> None:
        try:
            found = self._lease = await self._leases.read_namespaced_lease(self._name, self._namespace)
            version = found.metadata.resource_version
            self._state = observe(self._state, self._me, record_of(found), version, self._clock())
        except NotFoundException:
            self._lease = None
            self._state = self._state._replace(observed=None)
        self._has_read = True

    async def _write(self, record: Record) -> None:
        sent_s, lease = self._clock(), self._lease_of(record)
        if self._state.observed is None:
            found = await self._leases.create_namespaced_lease(self._namespace, lease)
        else:
            found = await self._leases.replace_namespaced_lease(self._name, self._namespace, lease)
        self._lease = found
        version = found.metadata.resource_version
        self._state = record_written(record, version, self._times, sent_s, self._clock())

    async def _give_back(self) -> None:
        if not self.is_leader():
            return
        self._state = self._state._replace(sure_until_s=float("-inf"))
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                try:
                    await self._write_free()
                except ConflictException:  # a renewal that was cancelled on its way has been applied
                    await self._read()
                    await self._write_free()
        except (ApiException, TimeoutError) as error:
            log.info("lease not given back", extra={"error": type(error).__name__})

    async def _write_free(self) -> None:
        """Writes that nobody holds the Lease, if it is still ours."""
        observed = self._state.observed
        if observed is not None and observed.record.holder == self._me:
            await self._write(observed.record._replace(holder="", renewed=_now()))

    def _lease_of(self, record: Record) -> V1Lease:
        """The Lease with that record in it, and all else as it was last read."""
        before = self._lease or V1Lease(metadata=V1ObjectMeta(name=self._name, namespace=self._namespace))
        fields = {
            "holder_identity": record.holder,
            "lease_duration_seconds": record.duration_s if record.holder else 1,
            "renew_time": datetime.fromisoformat(record.renewed),
            "lease_transitions": record.transitions,
        }
        spec = (before.spec or V1LeaseSpec()).model_copy(update=fields)
        if spec.acquire_time is not None:  # another's
            spec.acquire_time = micro_time(spec.acquire_time)
        return V1Lease(api_version="coordination.k8s.io/v1", kind="Lease", metadata=before.metadata, spec=spec)


def record_of(lease: V1Lease) -> Record:
    spec = lease.spec or V1LeaseSpec()
    return Record(
        holder=spec.holder_identity or "",
        transitions=spec.lease_transitions or 0,
        duration_s=spec.lease_duration_seconds or 1,
        renewed="" if spec.renew_time is None else spec.renew_time.isoformat(),
    )


def micro_time(moment: datetime) -> datetime:
    """A time that the API server takes as its MicroTime, which must have a fraction: the client writes none for a whole
    second."""
    return moment.replace(microsecond=moment.microsecond or 1)


def _now() -> str:
    return micro_time(datetime.now(UTC)).isoformat()


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks until they have ended: a client library may take one cancellation for its own timeout."""
    pending: Collection[asyncio.Task[Any]] = tasks
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)


@asynccontextmanager
async def run_elector(elector: Elector) -> AsyncIterator[None]:
    """Runs the elector while the context is open, and frees the Lease when it closes."""
    running = asyncio.create_task(elector.run(), name="elector")
    try:
        yield
    finally:
        await end([running])
