"""Faults about a live autoscaler: what is on now stands in a file, and what passes between the autoscaler and the
world meets it.

`bench.support.faults` calls `wrap` in the autoscaler's process. Reports from Redis, changes of Serve's target and the
wall clock go through here, all else is production's. The kinds are those of `penstock.sim.faults.fault`; what needs no
hand in the process (a killed autoscaler, a controller that stands still, a cluster that is full) is done from outside.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penstock.autoscale.observation import ServeState
from penstock.autoscale.scaler import Actuator
from penstock.wire.scaling import LAPSE_MS, report_key

VARIABLE = "PENSTOCK_BENCH_SCALING_FAULTS"
"""Names the file."""
REPORTS = report_key("")


class FaultFile:
    """The faults that are on: kinds with their seconds (`by_s`), none where the file is not there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, faults: Mapping[str, float]) -> None:
        partial_path = self._path.with_suffix(".tmp")
        partial_path.write_text(json.dumps(dict(faults)), encoding="utf-8")
        partial_path.rename(self._path)

    def read(self) -> dict[str, float]:
        try:
            found: dict[str, float] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found


class ReportsOnTheWay:
    """What Redis answers where gateways write no report, the same one, or late ones. Pure."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, bytes | None]] = {}
        """The last answer that was new, and when, by key."""
        self._coming: dict[str, list[tuple[float, bytes | None]]] = {}
        """Answers that are under way, and since when, by key."""

    def tell(self, key: str, data: bytes | None, faults: Mapping[str, float], now: float) -> bytes | None:
        """The answer for a key where Redis has `data` at `now`. A report that no other follows is gone after
        LAPSE_MS."""
        if "reports_frozen" in faults or "reports_missing" in faults:
            at_s, told = self._told.setdefault(key, (now, data))
            is_gone = "reports_missing" in faults and now - at_s >= LAPSE_MS / 1000
            return None if is_gone else told
        late_s, coming = faults.get("reports_late", 0.0), self._coming.setdefault(key, [])
        coming.append((now, data))
        while coming and coming[0][0] <= now - late_s:
            self._told[key] = now, coming.pop(0)[1]
        return self._told.get(key, (now, None))[1]


class FaultyRedis:
    """A client of Redis that gives reports as `ReportsOnTheWay` says."""

    def __init__(self, client: Any, faults: FaultFile) -> None:
        self._client = client
        self._faults = faults
        self._reports = ReportsOnTheWay()

    async def get(self, key: str) -> bytes | None:
        data: bytes | None = await self._client.get(key)
        if not key.startswith(REPORTS):
            return data
        return self._reports.tell(key, data, self._faults.read(), time.monotonic())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class FaultyChanges:
    """An actuator whose changes of a target are refused, or done without an answer."""

    def __init__(self, actuator: Actuator, faults: FaultFile) -> None:
        self._actuator = actuator
        self._faults = faults

    async def read(self) -> Mapping[str, ServeState]:
        return await self._actuator.read()

    async def set_target(self, pool: str, target: int) -> None:
        self._refuse()
        await self._actuator.set_target(pool, target)
        await self._lose_answer()

    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool:
        self._refuse()
        is_done = await self._actuator.step_down(pool, victims, target)
        await self._lose_answer()
        return is_done

    def _refuse(self) -> None:
        if "changes_fail" in self._faults.read():
            raise ValueError("the controller refuses")

    async def _lose_answer(self) -> None:
        wait_s = self._faults.read().get("changes_hang")
        if wait_s is not None:
            await asyncio.sleep(wait_s)
            raise TimeoutError("the controller does not answer")


def wrap(module: Any) -> None:
    """Put faults between the autoscaler of `penstock.autoscale.loop` and the world. Raises KeyError without
    VARIABLE."""
    faults = FaultFile(Path(os.environ[VARIABLE]))
    reports, actuator = module.Reports, module.ServeActuator
    module.Reports = lambda client: reports(FaultyRedis(client, faults))
    module.ServeActuator = lambda apps: FaultyChanges(actuator(apps), faults)
    module.Scaler = partial(module.Scaler, unix_clock=lambda: time.time() + faults.read().get("clock_off", 0.0))
