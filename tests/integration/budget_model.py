"""A model of the ledger of a budget, which remembers every charge: what `budgets.lua` does, written another way."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from penstock.tenancy.charges import ASIDE_LEASES, BudgetRequest, RenewedCharge, UnsettledCharge
from penstock.tenancy.window import PARALLEL_WAIT_MS

OVER_KEPT_MS = 3_600_000


@dataclass
class Entry:
    """A charge under an id."""

    month: str
    counted: int
    charged: int
    lease_until_ms: int
    is_over: bool = False
    was_extended: bool = False
    is_full: bool = False


@dataclass
class BudgetModel:
    """The ledger. Months older than the one before the latest call's are forgotten."""

    lease_ms: int
    settled: dict[str, int] = field(default_factory=dict)
    """Charges whose ids are forgotten, by month."""
    entries: dict[str, Entry] = field(default_factory=dict)
    seen_ms: int | None = None

    def spent(self, month: str) -> int:
        held = sum(entry.counted for entry in self.entries.values() if entry.month == month)
        return self.settled.get(month, 0) + held

    def open(self, month: str) -> int:
        live = [entry for entry in self.entries.values() if entry.month == month and not entry.is_over]
        return sum(entry.counted - entry.charged for entry in live)

    def apply(self, request: BudgetRequest, request_id: str | None, now_ms: int) -> tuple[int | None, int, int]:
        """Returns how long the request must wait (None: it is admitted, or there is none), and spent and set aside."""
        month = month_of(now_ms)
        self._end_leases(now_ms)
        limit = None if request.limit is None else int(request.limit)
        for settled in request.settled:
            entry = self.entries.pop(settled.id, None)
            if entry is not None:
                self._add(entry.month, settled.nano)
        if request.aside is not None:
            self._set_aside(*request.aside, None, now_ms)
        for usage in request.unsettled:
            self._charge(usage, now_ms)
        for renewed in request.renewed:
            self._renew(renewed, now_ms)
        wait_ms = None
        if request_id is not None and limit is not None and request.nano and request_id not in self.entries:
            excess = self.spent(month) + request.nano - limit
            if excess <= 0:
                self.entries[request_id] = Entry(
                    month, request.nano, 0, now_ms + self.lease_ms, is_full=request.is_full
                )
            else:
                wait_ms = PARALLEL_WAIT_MS if excess <= self.open(month) else next_month_ms(now_ms) - now_ms
        aside = 0
        if request.aside is not None:
            aside = self._set_aside(*request.aside, limit, now_ms)
        return wait_ms, self.spent(month), aside

    def _add(self, month: str, nano: int) -> None:
        self.settled[month] = self.settled.get(month, 0) + nano

    def _end_leases(self, now_ms: int) -> None:
        was_quiet = self.seen_ms is not None and now_ms - self.seen_ms > self.lease_ms / 3
        self.seen_ms = now_ms
        for name, entry in list(self.entries.items()):
            if entry.lease_until_ms > now_ms:
                continue
            if entry.is_over:
                self._add(entry.month, entry.counted)
                del self.entries[name]
            elif was_quiet and not entry.was_extended:
                entry.was_extended, entry.lease_until_ms = True, now_ms + self.lease_ms
            else:
                if not entry.is_full:
                    entry.counted = entry.charged
                entry.charged, entry.is_over, entry.lease_until_ms = entry.counted, True, now_ms + OVER_KEPT_MS

    def _charge(self, usage: UnsettledCharge, now_ms: int) -> None:
        entry = self.entries.get(usage.id)
        month = month_of(now_ms - usage.age_ms)
        if not usage.is_running:
            month = month if entry is None else entry.month
            self.entries[usage.id] = Entry(
                month, usage.counted_nano, usage.counted_nano, now_ms + OVER_KEPT_MS, is_over=True
            )
        elif entry is None:
            charged = min(usage.charged_nano, usage.counted_nano)
            self.entries[usage.id] = Entry(
                month, usage.counted_nano, charged, now_ms + self.lease_ms, is_full=usage.is_full
            )

    def _renew(self, renewed: RenewedCharge, now_ms: int) -> None:
        entry = self.entries.get(renewed.id)
        if entry is not None:
            charged = min(renewed.charged_nano, renewed.reserved_nano)
            self.entries[renewed.id] = Entry(
                entry.month, renewed.reserved_nano, charged, now_ms + self.lease_ms, is_full=renewed.is_full
            )

    def _set_aside(self, name: str, nano: int, limit: int | None, now_ms: int) -> int:
        month = month_of(now_ms)
        entry = self.entries.get(name)
        has = entry.counted if entry is not None and entry.month == month else 0
        if nano > has and (limit is None or self.spent(month) + nano - has > limit):
            nano = has
        self.entries.pop(name, None)
        if nano:
            self.entries[name] = Entry(month, nano, 0, now_ms + ASIDE_LEASES * self.lease_ms)
        return nano


def month_of(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m")


def next_month_ms(ms: int) -> int:
    first = datetime.fromtimestamp(ms / 1000, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int((first + timedelta(days=32)).replace(day=1).timestamp() * 1000)
