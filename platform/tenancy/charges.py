"""What one gateway knows of the charges against one budget: a tenant's, or the cap on what providers may cost. No I/O.

Not the ledger, which is Redis' (`budgets.lua`); here is what Redis must be told, and what this gateway may give out
while Redis is away: a sum that it has set aside in Redis before, which nobody else can spend, for as long as Redis
holds it. So gateways never exceed a budget together while each reaches Redis again before its leases end; one that was
cut off for longer reports what it has given out when Redis may have given that to others. Amounts are in 1e-9 of the
currency's unit (`_nano`).
Invariant: what was reserved here is in one of `running`, `settled` and `alone` until Redis has its settlement; until
`aside_until_ms`, `aside_nano` is never more than what Redis holds for this gateway, and after it nothing is given out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

SET_ASIDE = 50
"""A gateway sets aside this part of what is left of a budget, divided by the number of gateways."""
ASIDE_LEASES = 4
"""Leases of a request for which Redis holds what is set aside after it was asked for last; `budgets.lua` has the same
number. Longer, so that a gateway outlasts a restart of Redis; a dead gateway keeps that much from others meanwhile."""
MAX_ALONE = 4096
"""Most requests of one budget that a gateway admits while Redis is away: they are reported one by one, in one call."""


def month_name(now: float) -> str:
    """The month that holds a Unix time in UTC, such as 2026-11."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m")


def month_end(now: float) -> float:
    """Unix time at which the next month begins, UTC."""
    first = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1).timestamp()


class SettledCharge(NamedTuple):
    """A request that is over, and what it is charged."""

    id: str
    nano: int


class UnsettledCharge(NamedTuple):
    """A request that a gateway has admitted by itself."""

    id: str
    age_ms: int
    """Time since the admission, which decides about the month."""
    counted_nano: int
    """Sum reserved by what is running, or charged for what is over."""
    charged_nano: int
    """Charge so far."""
    is_running: bool
    is_full: bool = False
    """Whether all of it stays charged if its gateway dies; else what it was charged by the last renewal."""


class RenewedCharge(NamedTuple):
    """A request that is still under way."""

    id: str
    reserved_nano: int
    charged_nano: int
    """Charge so far: what stays if nothing more is heard of its gateway."""
    is_full: bool = False


class Aside(NamedTuple):
    """What a gateway wants to have set aside."""

    id: str
    nano: int


class BudgetRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a gateway reports about one budget, and perhaps what a request may come to. Applied in the order of the
    fields. Every part of it may be repeated: what was applied once changes nothing the second time."""

    settled: Sequence[SettledCharge] = ()
    aside: Aside | None = None
    """None: it stays as it is."""
    unsettled: Sequence[UnsettledCharge] = ()
    renewed: Sequence[RenewedCharge] = ()
    nano: int = 0
    """Most that the request to be admitted may come to."""
    is_full: bool = False
    """Whether all of that stays charged if this gateway dies while the request runs."""
    limit: str | None = None
    """Budget of a month, as text: Redis' Lua has no integers of 64 bits. None: there is none any more."""


@dataclass(slots=True)
class _Running:
    """A request that Redis holds."""

    reserved_nano: int
    is_full: bool
    charged_nano: int = 0
    told_nano: int = 0
    """What Redis was told of that."""


@dataclass(slots=True)
class _Alone:
    """A request that this gateway has admitted by itself."""

    at_ms: int
    counted_nano: int
    """Sum reserved, and from its end on charged."""
    is_full: bool
    charged_nano: int = 0
    is_running: bool = True


@dataclass(slots=True)
class Charges:
    """The charges of one gateway against one budget."""

    aside_id: str
    limit_nano: int | None = None
    """Budget of a month, as it was when the last request came; None: there is none."""
    spent_nano: int = 0
    """Sum charged or reserved this month, as Redis told last."""
    aside_nano: int = 0
    aside_until_ms: int = 0
    """Time by the gateway's clock until which Redis holds `aside_nano` for it."""
    has_asked: bool = False
    """Whether this gateway has asked for something to be set aside."""
    running: dict[str, _Running] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    """Charges of the requests that Redis may hold and that are over."""
    alone: dict[str, _Alone] = field(default_factory=dict)
    """Requests that Redis does not know, by id."""

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.settled or self.alone or self.aside_nano)

    @property
    def alone_nano(self) -> int:
        return sum(each.counted_nano for each in self.alone.values())

    # what becomes of a request

    def begin(self, request_id: str, nano: int, *, is_full: bool) -> None:
        """Note a request that Redis has admitted."""
        if nano and self.limit_nano is not None:
            self.running[request_id] = _Running(nano, is_full)

    def may_begin_alone(self, nano: int, now_ms: int) -> bool:
        """Whether what is set aside suffices for one more request, and nobody else has it yet."""
        if self.limit_nano is None or not nano:
            return True
        is_held = now_ms < self.aside_until_ms
        return is_held and len(self.alone) < MAX_ALONE and self.alone_nano + nano <= self.aside_nano

    def begin_alone(self, request_id: str, nano: int, now_ms: int, *, is_full: bool) -> None:
        """Admit a request without Redis."""
        if nano and self.limit_nano is not None:
            self.alone[request_id] = _Alone(now_ms, nano, is_full)

    def note(self, request_id: str, nano: int) -> None:
        """A request that runs has come to so much by now."""
        found = self.running.get(request_id) or self.alone.get(request_id)
        if found is not None:
            found.charged_nano = nano

    def settle(self, request_id: str, nano: int) -> None:
        """A request is over. Unknown ones are ignored."""
        alone = self.alone.get(request_id)
        if alone is not None and alone.is_running:
            alone.counted_nano, alone.charged_nano, alone.is_running = nano, nano, False
        elif self.running.pop(request_id, None) is not None:
            self.settled[request_id] = nano

    def doubt(self, request_id: str) -> None:
        """Redis may hold a request, or not: its answer did not come."""
        if self.limit_nano is not None:
            self.settled[request_id] = 0

    # what Redis is told

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget, or something to tell of one that was taken away."""
        return self.limit_nano is not None or not self.is_idle

    @property
    def has_news(self) -> bool:
        return bool(self.settled or self.alone)

    def take(self, request: BudgetRequest | None, renewed: Iterable[str]) -> BudgetRequest | None:
        """A request with what Redis does not know of the requests that it holds; `put_back` it where it does not
        arrive. None: there is nothing, nor a budget. renewed: requests whose leases are renewed."""
        if not self.has_budget:
            return None
        settled, self.settled = self.settled, {}
        return msgspec.structs.replace(
            BudgetRequest() if request is None else request,
            settled=[SettledCharge(*each) for each in settled.items()],
            renewed=self.list_renewed(renewed),
            limit=None if self.limit_nano is None else str(self.limit_nano),
        )

    def put_back(self, request: BudgetRequest, most: int) -> None:
        """Keep settlements that Redis may not have got. Past `most` the oldest requests keep what Redis has of them at
        the end of their lease."""
        self.settled = {each.id: each.nano for each in request.settled} | self.settled
        for renewed in request.renewed:
            if (found := self.running.get(renewed.id)) is not None:
                found.told_nano = 0
        while len(self.settled) > most:
            del self.settled[next(iter(self.settled))]

    def list_unsettled(self, now_ms: int) -> list[UnsettledCharge]:
        return [
            UnsettledCharge(
                request_id, now_ms - each.at_ms, each.counted_nano, each.charged_nano, each.is_running, each.is_full
            )
            for request_id, each in self.alone.items()
        ]

    def mark_reported(self, reported: Iterable[UnsettledCharge]) -> None:
        """Redis knows these requests now; some may have ended since."""
        for each in reported:
            alone = self.alone.pop(each.id, None)
            if alone is None:
                continue
            if alone.is_running:
                self.running[each.id] = _Running(each.counted_nano, each.is_full, alone.charged_nano)
            elif each.is_running:
                self.settled[each.id] = alone.counted_nano

    def list_untold(self) -> list[str]:
        """Requests that run and have come to something else than Redis was told."""
        return [request_id for request_id, each in self.running.items() if each.charged_nano != each.told_nano]

    def list_renewed(self, request_ids: Iterable[str]) -> list[RenewedCharge]:
        """What Redis is told of requests that run."""
        renewed = []
        for request_id in request_ids:
            if (found := self.running.get(request_id)) is not None:
                found.told_nano = found.charged_nano
                renewed.append(RenewedCharge(request_id, found.reserved_nano, found.charged_nano, found.is_full))
        return renewed

    # what is set aside

    def ask_aside(self, nano: int, reported: Sequence[UnsettledCharge] = ()) -> Aside:
        """What to ask of Redis in the next call, one call at a time. Until its answer this gateway has the smaller of
        the two sums, less what Redis is told of in the same call; if none comes, too."""
        self.has_asked = True
        self.aside_nano = max(0, min(self.aside_nano - sum(each.counted_nano for each in reported), nano))
        return Aside(self.aside_id, self.aside_nano if reported else nano)

    def confirm_aside(self, nano: int, asked_ms: int, lease_ms: int) -> None:
        """Note Redis' answer to `ask_aside`. asked_ms: a time before Redis was asked. lease_ms: of a request."""
        self.aside_nano, self.aside_until_ms = nano, asked_ms + ASIDE_LEASES * lease_ms

    def wanted_aside(self, num_gateways: int) -> int:
        """What this gateway should have set aside for when Redis is away, where it was asked for charges lately."""
        if self.limit_nano is None:
            return 0
        left_nano = max(0, self.limit_nano - self.spent_nano + self.aside_nano)
        return left_nano // (SET_ASIDE * num_gateways)
