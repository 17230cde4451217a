"""What one attempt at an answer has cost: its seconds of a replica's steps, or a provider's price. Plain data.

Not who computes it: the carrier writes it, also after the reader has gone, since a replica that is told to stop still
tells what the sequence has had of its last steps. Invariant: once it is settled, it does not change.
"""

from dataclasses import dataclass

from penstock.wire.accounts import PlacePrices
from penstock.wire.frames import Delta
from penstock.wire.money import price_of_time_nano


@dataclass(slots=True)
class Spending:
    prices: PlacePrices
    """Where it is spent, and what was to be paid there when the attempt began."""
    step_s: float = 0.0
    """The sequence's share of a replica's steps, seconds."""
    provided_nano: int = 0
    """Cost of a provider's answer, 1e-9 of the unit of prices."""
    is_settled: bool = False
    """Whether nothing more will come."""

    @property
    def cost_nano(self) -> int | None:
        """Cost so far, 1e-9 of the unit of prices; None: the place has no price."""
        prices = self.prices
        if prices.per_hour is not None:
            return price_of_time_nano(self.step_s, prices.per_hour)
        return self.provided_nano if prices.input is not None else None

    def take(self, delta: Delta) -> None:
        """Take what a delta tells, which may come after the reader has gone."""
        self.step_s = delta.step_s
        self.is_settled = delta.finish is not None

    def settle(self) -> None:
        """Note that nothing more will come."""
        self.is_settled = True


NOWHERE = PlacePrices(place="")
"""The prices of an answer that nobody has begun."""
