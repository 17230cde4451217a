"""Takes part in an election by a Lease, for as long as it runs; see `lease` for the rules.

One call an attempt: a leader renews, another reads and takes what is free. While the API server is away a leader stops
being one at its deadline. A Lease that nobody has held yet (the chart makes one, without a spec) is free; where there
is none it is made, as far as the rights go.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from penstock.autoscale.kubernetes.api import Api, ApiAway, ApiRefused, Conflict, Document, Missing
from penstock.autoscale.kubernetes.lease import Record, State, Times, is_leader, noticed, wanted, written

AGAIN_S = 2.0
CHECK_S = 0.1
"""Between two looks at the clock by who waits for a change."""

log = logging.getLogger("penstock.elector")


class Elector:
    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        me: str,
        times: Times | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: of the Lease. me: unlike any other process that has ever stood for it."""
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._name = name
        self._me = me
        self._times = times or Times()
        self._clock = clock
        self._state = State()
        self._document: Document = {}
        """The Lease as it was last read or written, empty where there is none. It is written over exactly that; labels
        that others put there stay."""
        self._has_read = False
        """What is remembered of the Lease is worth a try to write over."""

    @property
    def term(self) -> int:
        """Rises with every change of leader."""
        return self._state.seen.record.transitions if self._state.seen is not None else 0

    def is_leader(self, margin_s: float = 0.0) -> bool:
        """And will be for so long."""
        return is_leader(self._state, self._clock(), margin_s)

    async def run(self) -> None:
        """Until cancelled; then the Lease is free for the others at once."""
        try:
            while True:
                await self._attempt()
                await asyncio.sleep(self._times.retry_s)
        finally:
            await self._give_back()

    async def until(self, is_leader: bool) -> None:
        """It is so. By the clock: a leader that can't renew hears nothing."""
        while True:
            if self.is_leader() is is_leader:
                return
            await asyncio.sleep(CHECK_S)

    async def _attempt(self) -> None:
        was_leader = self.is_leader()
        try:
            if not (was_leader and self._has_read):
                await self._read()
            record = wanted(self._state, self._me, self._times, self._clock(), _now())
            if record is not None:
                await self._write(record)
        except Conflict:
            self._has_read = False
        except (ApiAway, ApiRefused) as error:
            self._has_read = False
            log.warning(
                "lease not reached", extra={"lease": self._name, "error": error.message, "is_leader": self.is_leader()}
            )
        if self.is_leader() != was_leader:
            log.info(
                "leader" if self.is_leader() else "no leader any more",
                extra={"lease": self._name, "me": self._me, "term": self.term},
            )

    async def _read(self) -> None:
        try:
            found = self._document = await self._api.get(f"{self._path}/{self._name}")
            self._state = noticed(
                self._state, self._me, record_of(found), found["metadata"]["resourceVersion"], self._clock()
            )
        except Missing:
            self._document = {}
            self._state = self._state._replace(seen=None)
        self._has_read = True

    async def _write(self, record: Record) -> None:
        seen, sent_s = self._state.seen, self._clock()
        document = self._document_of(record)
        if seen is None:
            found = await self._api.create(self._path, document)
        else:
            found = await self._api.update(f"{self._path}/{self._name}", document)
        self._document = found
        self._state = written(record, found["metadata"]["resourceVersion"], self._times, sent_s, self._clock())

    async def _give_back(self) -> None:
        if not self.is_leader() or self._state.seen is None:
            return
        record = self._state.seen.record
        self._state = self._state._replace(sure_until_s=float("-inf"))
        try:
            async with asyncio.timeout(1.0):
                await self._write(record._replace(holder="", renewed=_now()))
        except (ApiAway, ApiRefused, TimeoutError) as error:
            log.info("lease not given back", extra={"error": type(error).__name__})

    def _document_of(self, record: Record) -> Document:
        metadata = {"name": self._name, "namespace": self._namespace} | self._document.get("metadata", {})
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": record.duration_s if record.holder else 1,
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": (self._document.get("spec") or {}) | spec,
        }


def record_of(document: Document) -> Record:
    spec: dict[str, Any] = document.get("spec") or {}
    return Record(
        holder=spec.get("holderIdentity") or "",
        transitions=spec.get("leaseTransitions") or 0,
        duration_s=spec.get("leaseDurationSeconds") or 1,
        renewed=spec.get("renewTime") or "",
    )


def _now() -> str:
    """Kubernetes' MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel them until they have ended: a client library may take one cancellation for its own timeout."""
    pending: Collection[asyncio.Task[Any]] = tasks
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)


@asynccontextmanager
async def standing(elector: Elector) -> AsyncIterator[None]:
    """Runs it beside what is inside, and gives the Lease back behind it."""
    running = asyncio.create_task(elector.run(), name="elector")
    try:
        yield
    finally:
        await end([running])
