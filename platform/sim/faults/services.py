"""What the autoscaler calls, with faults: Ray Serve's controller, the store of its records, its wall clock.

Nothing here waits: the time that a call would take is counted instead."""

from collections.abc import Callable, Mapping, Sequence

from penstock.autoscale.observation import ServeState
from penstock.autoscale.scaler import Actuator
from penstock.sim.faults.fault import Fault, find_fault


class FaultyActuator:
    """An actuator whose calls fail while a fault is on, with the errors of the real one."""

    def __init__(self, actuator: Actuator, faults: Sequence[Fault], clock: Callable[[], float]) -> None:
        self._actuator = actuator
        self._faults = faults
        self._clock = clock
        self.waited_s = 0.0
        """Seconds that calls have waited in vain since this was last set to 0."""

    async def read(self) -> Mapping[str, ServeState]:
        self._refuse("controller_away")
        return await self._actuator.read()

    async def set_target(self, pool: str, target: int) -> None:
        self._refuse("controller_away", "changes_fail")
        await self._actuator.set_target(pool, target)
        self._lose_answer()

    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool:
        self._refuse("controller_away", "changes_fail")
        is_done = await self._actuator.step_down(pool, victims, target)
        self._lose_answer()
        return is_done

    def _refuse(self, *kinds: str) -> None:
        if any(fault.kind in kinds and fault.is_on(self._clock()) for fault in self._faults):
            raise ValueError("the controller is away")

    def _lose_answer(self) -> None:
        fault = find_fault(self._faults, "changes_hang", self._clock())
        if fault is not None:
            self.waited_s += fault.by_s
            raise TimeoutError("the controller does not answer")


class RecordsInMemory:
    """The autoscaler's records, which outlive it."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    async def read(self, pool: str) -> bytes | None:
        return self._records.get(pool)

    async def write(self, pool: str, data: bytes) -> None:
        self._records[pool] = data


def wall_clock(faults: Sequence[Fault], clock: Callable[[], float]) -> Callable[[], float]:
    """The autoscaler's wall clock: the simulation's, and what it is ahead."""

    def read() -> float:
        now = clock()
        fault = find_fault(faults, "clock_off", now)
        return now + (0.0 if fault is None else fault.by_s)

    return read
