"""Gateways' reports on their way to the autoscaler, with faults on the way. Stands for Redis.

Production's `ReportAges` tells their ages. Invariant: a report that no other follows is gone after LAPSE_MS, as its key
in Redis.
"""

from collections.abc import Callable, Sequence

from msgspec import structs

from penstock.autoscale.observe import AgedReport, ReportAges
from penstock.sim.faults.fault import Fault
from penstock.wire.scaling import LAPSE_MS, GatewayReport, PoolFlow, PoolReport, ReplicaReport, Targets


class SimulatedReports:
    """The autoscaler's source. gateways: number of them, each of which reports an equal part of the load."""

    def __init__(self, gateways: int, faults: Sequence[Fault], clock: Callable[[], float]) -> None:
        self._gateways = gateways
        self._faults = faults
        self._clock = clock
        self._written: dict[int, list[tuple[float, GatewayReport]]] = {place: [] for place in range(gateways)}
        """Each gateway's reports and when they arrive, the latest arrived one first."""
        self.ages = ReportAges()

    def write(self, report: GatewayReport) -> None:
        """Takes what all gateways together would report now."""
        now = self._clock()
        for place, written in self._written.items():
            on = {fault.kind: fault for fault in self._faults if fault.is_on(now) and fault.gateway in (None, place)}
            self._settle(written, now)
            if "reports_missing" in on:
                continue
            if "reports_frozen" in on:
                if written and written[0][0] <= now:
                    written[0] = now, written[0][1]
                continue
            late_s = on["reports_late"].by_s if "reports_late" in on else 0.0
            written.append((now + late_s, _part_of(report, place, self._gateways)))

    async def read(self) -> list[AgedReport]:
        """The latest report of every gateway that has one."""
        now, found = self._clock(), list[GatewayReport]()
        for written in self._written.values():
            self._settle(written, now)
            if written and written[0][0] <= now < written[0][0] + LAPSE_MS / 1000:
                found.append(written[0][1])
        return self.ages.note(found, now)

    async def publish(self, targets: Targets) -> None:
        """Take the targets, which only a real gateway shows."""

    def _settle(self, written: list[tuple[float, GatewayReport]], now: float) -> None:
        """Leaves the newest of the reports that have arrived, and those that are under way behind it."""
        arrived = [place for place, (at_s, _) in enumerate(written) if at_s <= now]
        if arrived:
            del written[: arrived[-1]]


def _part_of(report: GatewayReport, place: int, parts: int) -> GatewayReport:
    """What gateway number `place` of so many reports of it; the parts add up to the whole."""
    if parts == 1:
        return report

    def part(count: int) -> int:
        return (count + place) // parts

    def pool_part(row: PoolReport) -> PoolReport:
        flow = PoolFlow(*(part(getattr(row.flow, name)) for name in PoolFlow.__struct_fields__))
        num_waiting = part(row.num_waiting)
        return PoolReport(row.pool, flow, num_waiting, row.oldest_wait_s if num_waiting else 0.0)

    def replica_part(row: ReplicaReport) -> ReplicaReport:
        return structs.replace(row, hit_tokens=part(row.hit_tokens))

    return GatewayReport(
        f"{report.gateway}-{place}",
        report.number,
        [pool_part(row) for row in report.pools],
        [replica_part(row) for row in report.replicas],
    )
