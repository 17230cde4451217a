"""How much each adapter will be used, guessed from the past: its uses, of which one counts half as much for each
`half_life` uses of any adapter since.

Age is counted in uses and not in seconds, so that the guess is the same at every rate of requests. Pure. This is LRFU
(Lee et al. 2001) on a clock of accesses: with a short half-life the order is that of the last use, with a long one that
of the number of uses. Invariant: at most MAX_KNOWN adapters are remembered; who is not has the value 0.
"""

MAX_KNOWN = 4096
"""Adapters whose uses are remembered, also while they are in no slot; the least used are forgotten first."""
_MAX_WEIGHT = 2.0**500


class PredictedUse:
    """Values by digest. Only their order has a meaning."""

    def __init__(self, half_life: float) -> None:
        """half_life: uses of any adapter after which a use counts half."""
        self._growth: float = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        """Weight of the next use: instead of old uses losing value, new ones gain it."""
        self._values: dict[str, float] = {}

    def note(self, digest: str) -> None:
        """Count a use."""
        self._weight *= self._growth
        self._values[digest] = self._values.get(digest, 0.0) + self._weight
        if self._weight > _MAX_WEIGHT:
            self._values = {each: value / self._weight for each, value in self._values.items()}
            self._weight = 1.0
        if len(self._values) > MAX_KNOWN:
            for each in sorted(self._values, key=self._values.__getitem__)[: MAX_KNOWN // 2]:
                del self._values[each]

    def of(self, digest: str) -> float:
        return self._values.get(digest, 0.0)

    def forget(self, digest: str) -> None:
        """Forget a deleted adapter."""
        self._values.pop(digest, None)
