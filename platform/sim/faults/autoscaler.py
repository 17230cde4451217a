"""The process of the autoscaler in a simulation: its turns, and its end and new beginning while a fault is on."""

from collections.abc import Callable, Coroutine, Sequence

from penstock.autoscale.observe import ReportAges
from penstock.autoscale.scaler import Source
from penstock.sim.faults.fault import Fault
from penstock.sim.faults.reports import SimulatedReports
from penstock.sim.faults.services import FaultyActuator


class SimulatedAutoscaler:
    """One autoscaler after the other. make: begins one that reads from that source, and returns what is its turn."""

    def __init__(
        self,
        make: Callable[[Source], Callable[[], Coroutine[object, None, None]]],
        reports: SimulatedReports,
        actuator: FaultyActuator,
        faults: Sequence[Fault],
    ) -> None:
        self._make = make
        self._reports = reports
        self._actuator = actuator
        self._ends = [fault for fault in faults if fault.kind == "autoscaler_down"]
        self._num_ended = 0
        self._turn = make(reports)
        self._free_s = 0.0
        """Time until which the last turn waits for an answer."""

    def take_turn(self, now: float) -> None:
        """Lets the autoscaler have its turn, if it is there and the one before is over."""
        if any(fault.is_on(now) for fault in self._ends):
            return
        num_ended = sum(fault.at_s <= now for fault in self._ends)
        if num_ended > self._num_ended:
            self._num_ended, self._free_s = num_ended, now
            self._reports.ages = ReportAges()
            self._turn = self._make(self._reports)
        if now < self._free_s:
            return
        _finish_at_once(self._turn())
        self._free_s, self._actuator.waited_s = now + self._actuator.waited_s, 0.0


def _finish_at_once(coroutine: Coroutine[object, None, None]) -> None:
    """Run a coroutine in which nothing waits."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("a simulated source or actuator waited")
