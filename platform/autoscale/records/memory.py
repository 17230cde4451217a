"""The times at which pools' records are read and written. Not where, and not what is in them.

Invariants: records are read once, as soon as the store answers; a pool's is written when more than its times has
changed, at most every WRITE_S, at once when its target rises or a deadline is in danger for the first time, and every
REFRESH_S in any case; a record that can't be read is as none.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from penstock.autoscale.policy import State
from penstock.autoscale.records.record import PoolRecord, decode, encode, is_same, is_urgent, make_record

WRITE_S = 5.0
"""Least seconds between two writes of a pool's record that is not urgent."""
REFRESH_S = 30.0
"""Seconds after which a record is written though nothing but its times has changed."""

log = logging.getLogger("penstock.autoscale")


class RecordStore(Protocol):
    async def read(self, pool: str) -> bytes | None: ...
    async def write(self, pool: str, data: bytes) -> None: ...


class Memory:
    """The records of an autoscaler's pools. clock: monotonic seconds. Each call raises what the store raises."""

    def __init__(self, store: RecordStore, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._unix_clock = unix_clock
        self.is_read = False
        """Whether the records of the autoscaler before this one have been read."""
        self._written: dict[str, tuple[float, PoolRecord]] = {}
        """Each pool's record as it was last written, and when."""

    async def recall(self, pools: Iterable[str]) -> dict[str, PoolRecord]:
        """Records that another autoscaler left, of the pools that have one; nothing from the second time on."""
        if self.is_read:
            return {}
        found = {pool: await self._store.read(pool) for pool in pools}
        self.is_read = True
        records = {pool: _decode(pool, data) for pool, data in found.items() if data is not None}
        return {pool: record for pool, record in records.items() if record is not None}

    async def keep(self, pool: str, target: int | None, state: State) -> None:
        """Writes a pool's record if that is due. target: the last that was decided on fresh reports."""
        now = self._clock()
        if not self.is_read:
            return
        record = make_record(target, state, now, self._unix_clock())
        if (written := self._written.get(pool)) is not None:
            written_s, before = written
            pause_s = 0.0 if is_urgent(before, record) else REFRESH_S if is_same(before, record) else WRITE_S
            if now - written_s < pause_s:
                return
        await self._store.write(pool, encode(record))
        self._written[pool] = now, record


def _decode(pool: str, data: bytes) -> PoolRecord | None:
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        log.warning("record ignored", extra={"pool": pool, "error": str(error)})
        return None
