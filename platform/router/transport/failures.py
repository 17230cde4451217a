"""How much later a request that has failed without a valid key is answered.

Keys are guessed, and gateways kept busy, by many such requests; people mistype a few. So their answers wait: the more
of them came lately, from the same address or at all, the longer. What has shown a valid key never waits, whatever
others behind the same address have sent. Invariants: a wait is at most MAX_DELAY_S; memory is bounded.
"""

from collections.abc import Callable

from penstock.base.pace import Pace

ADDRESS_RATE, ADDRESS_BURST = 2.0, 10.0
"""Failures of one address per second, and at once, that are answered without a wait."""
GATEWAY_RATE, GATEWAY_BURST = 100.0, 200.0
"""The same for all addresses together."""
MAX_DELAY_S = 5.0
_ALL = ""


class Failures:
    """The failures of one gateway. clock: monotonic, seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = Pace(GATEWAY_RATE, GATEWAY_BURST)
        self._addresses = Pace(ADDRESS_RATE, ADDRESS_BURST)

    def count(self, address: str | None) -> float:
        """Count a failure; returns how long its answer has to wait, in seconds. address: of its client; None: not
        known, and then it counts among all only."""
        now_s = self._clock()
        delay_s = self._all.count(_ALL, now_s, MAX_DELAY_S)
        return delay_s if address is None else max(delay_s, self._addresses.count(address, now_s, MAX_DELAY_S))
