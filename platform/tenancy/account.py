"""One tenant at one gateway: its requests by what Redis knows of them, and the gateway's own ledger. No I/O.

Invariant: whatever was admitted here is in the ledger, and in one of `running`, `settled` and `unreported` until Redis
has its settlement.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.tenancy.charges import Charges
from penstock.tenancy.window import LimitLedger, LimitRequest, UnsettledUsage, Window

MAX_SETTLED = 65536
"""Most settlements of one tenant that are kept while Redis is away."""


@dataclass(slots=True)
class UnreportedRequest:
    """A request that this gateway admitted by itself and that Redis does not know."""

    at_ms: int
    """Time of the admission, by the gateway's clock."""
    tokens: int
    """Tokens reserved, and from the request's end on tokens used."""
    is_running: bool = True
    sequences: int = 1
    """Sequences of the request, as long as it runs."""


@dataclass(slots=True)
class Account:
    """The state of one tenant at one gateway."""

    ledger: LimitLedger
    """All that this gateway admitted; it decides while Redis is away."""
    charges: Charges
    """What concerns the tenant's budget."""
    running: set[str] = field(default_factory=set)
    """Requests that Redis holds and that are not over."""
    settled: dict[str, int] = field(default_factory=dict)
    """Tokens used by the requests that Redis may hold and that are over."""
    unreported: dict[str, UnreportedRequest] = field(default_factory=dict)
    """Requests that Redis does not know, by id."""
    renewing: dict[str, int | None] = field(default_factory=dict)
    """Requests whose renewal is under way; a number: the request ended meanwhile, and used so many tokens."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever reports the unreported requests, or changes what is set aside: each is charged once, and before
    anything else is admitted."""
    renewed_at_ms: int = 0
    """Time of the last renewal of the running requests' leases."""
    num_reserving: int = 0
    """Reservations under way, which appear nowhere else in this account yet."""

    @property
    def is_idle(self) -> bool:
        """True when the account holds nothing and can be forgotten."""
        is_busy = self.running or self.settled or self.unreported or self.num_reserving
        return self.ledger.is_empty and self.charges.is_idle and not is_busy

    def end_reservation(self) -> None:
        """Count one reservation less under way."""
        self.num_reserving -= 1

    def settle(self, request_id: str, used_tokens: int) -> None:
        """Record that a request is over; the ledger is the caller's to settle."""
        unreported = self.unreported.get(request_id)
        if unreported is not None and unreported.is_running:
            unreported.tokens, unreported.is_running = used_tokens, False
        elif request_id in self.running:
            self.running.discard(request_id)
            self.settled[request_id] = used_tokens
            if request_id in self.renewing:
                self.renewing[request_id] = used_tokens

    def list_unsettled(self, now_ms: int, window: Window) -> list[UnsettledUsage]:
        """The unreported requests for Redis: running ones one by one, the others summed up by their age."""
        over: dict[int, tuple[int, int]] = {}
        usages = []
        for request_id, unreported in self.unreported.items():
            age_ms = now_ms - unreported.at_ms
            if unreported.is_running:
                usages.append(UnsettledUsage(request_id, age_ms, 1, unreported.tokens, True, unreported.sequences))
            else:
                age = window.bucket(age_ms)
                requests, tokens = over.get(age, (0, 0))
                over[age] = requests + 1, tokens + unreported.tokens
        return [
            *usages,
            *(
                UnsettledUsage("", age * window.bucket_ms, *counts, False)
                for age, counts in over.items()
                if age <= window.num_buckets
            ),
        ]

    def mark_reported(self, were_running: Mapping[str, bool]) -> None:
        """Redis knows these requests now.

        were_running: whether each was under way when it was reported; some may have ended since.
        """
        for request_id, was_running in were_running.items():
            unreported = self.unreported.pop(request_id, None)
            if unreported is None:
                continue
            if was_running and unreported.is_running:
                self.running.add(request_id)
            elif was_running:
                self.settled[request_id] = unreported.tokens

    def put_back(self, settled: dict[str, int]) -> None:
        """Keep settlements that Redis may not have got. Past MAX_SETTLED the oldest requests keep their whole
        reservation until it leaves the window."""
        self.settled = settled | self.settled
        while len(self.settled) > MAX_SETTLED:
            del self.settled[next(iter(self.settled))]

    def renew(self, now_ms: int, window: Window) -> list[str]:
        """Renew the leases of what is under way in the ledger; returns the requests whose leases Redis should renew.

        What has left the window is forgotten.
        """
        oldest_ms = now_ms - window.bucket_ms * (window.num_buckets + 1)
        self.unreported = {
            request_id: unreported
            for request_id, unreported in self.unreported.items()
            if unreported.is_running or unreported.at_ms > oldest_ms
        }
        under_way = [
            *self.running,
            *(request_id for request_id, unreported in self.unreported.items() if unreported.is_running),
        ]
        self.ledger.apply(LimitRequest(renewed=under_way), now_ms)
        self.renewed_at_ms = now_ms
        return self.begin_renewal(self.running)

    def begin_renewal(self, request_ids: Iterable[str]) -> list[str]:
        """Note that the leases of these are to be renewed; returns them. `end_renewal` must follow."""
        self.renewing = dict.fromkeys(request_ids)
        return [*self.renewing]

    def end_renewal(self) -> None:
        """Settle again what ended while its renewal was under way, whether that worked or not.

        Its settlement may have gone by another connection and before the renewal, and then Redis holds it again. A
        second settlement of the same request changes nothing.
        """
        for request_id, used_tokens in self.renewing.items():
            if used_tokens is not None:
                self.settled.setdefault(request_id, used_tokens)
        self.renewing = {}
