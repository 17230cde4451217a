"""What each sequence under way has been charged to its tenant's counter, and what it really costs. Pure.

When it is placed, its prompt is charged (less what the replica should hold of it), and as many output tokens as answers
have on the average are expected; both are corrected while it runs (`correct`, now and then: a token by itself costs
nothing here) and when it ends. A replica's refusal costs nothing; a prompt that was sent is charged, whether its
answer was waited for or not. Invariant: once an attempt has ended, its tenant has been charged its cost, no more.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.router.dispatch.shares.counters import VirtualCounters, cost_of
from penstock.tenancy.share import Share


class Progress(Protocol):
    """How far an attempt has come."""

    @property
    def num_computed_tokens(self) -> int:
        """Output tokens since it was placed."""

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that were in the replica's cache; None while that is not known."""


class Expected(NamedTuple):
    """What an attempt is expected to cost when it is placed."""

    num_tokens: int
    """Tokens to be computed, or found in a cache, before the next token: prompt and output so far."""
    num_cached_tokens: int
    """Tokens among them that the replica should hold."""
    num_output_tokens: float


@dataclass(slots=True)
class _Charge:
    """The charge of one attempt."""

    tenant: str
    rate: float
    expected: Expected
    progress: Progress
    charged: float = 0.0
    outstanding: float = 0.0
    """What is expected to come beyond that."""

    def cost(self) -> float:
        """Real cost so far; the prompt's counts whole."""
        progress, cached = self.progress, self.progress.num_cached_tokens
        cached = self.expected.num_cached_tokens if cached is None else cached
        return cost_of(self.expected.num_tokens, cached, progress.num_computed_tokens)


class Charges:
    """The sequences under way at one gateway, by the numbers of their arrival."""

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._live: dict[int, _Charge] = {}
        self._num_live: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._live)

    def num_live(self, tenant: str) -> int:
        """Sequences of a tenant under way."""
        return self._num_live.get(tenant, 0)

    def begin(self, arrival: int, tenant: str, share: Share, expected: Expected, progress: Progress) -> None:
        """Charge a sequence that is placed. Its attempt before, if there was one, ends."""
        self.end(arrival)
        charge = self._live[arrival] = _Charge(tenant, share.rate, expected, progress)
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1
        self._settle(charge, charge.cost(), cost_of(0, 0, expected.num_output_tokens))

    def correct(self) -> None:
        """Charge what sequences under way have cost by now."""
        for charge in self._live.values():
            cost = charge.cost()
            self._settle(charge, cost, max(0.0, charge.outstanding - max(0.0, cost - charge.charged)))

    def end(self, arrival: int, *, is_refused: bool = False) -> None:
        """Charge what an attempt has cost in the end. Sequences that are not under way are ignored. is_refused: nothing
        of it was computed."""
        charge = self._live.pop(arrival, None)
        if charge is None:
            return
        self._settle(charge, 0.0 if is_refused else charge.cost(), 0.0)
        num_live = self._num_live.pop(charge.tenant) - 1
        if num_live:
            self._num_live[charge.tenant] = num_live

    def _settle(self, charge: _Charge, cost: float, outstanding: float) -> None:
        if cost != charge.charged:
            self._counters.charge(charge.tenant, cost - charge.charged, charge.rate)
            charge.charged = cost
        if outstanding != charge.outstanding:
            self._counters.expect(charge.tenant, outstanding - charge.outstanding, charge.rate)
            charge.outstanding = outstanding
