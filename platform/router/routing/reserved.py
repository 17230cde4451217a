"""What the dispatch of a request knows of caps on providers' costs: it asks for a reservation before a call, and who
ends the call settles it. Protocols alone, so that dispatch needs no Redis; `providers.caps` keeps the ledgers.
"""

from typing import Protocol


class Reservation(Protocol):
    """What one call may cost, reserved before it is made."""

    def settle(self, cost_nano: int) -> None:
        """Record that the call is over and what it cost; 0: it was not made. The second time nothing happens."""


class Caps(Protocol):
    """Caps on what providers may cost."""

    def has(self, provider: str) -> bool:
        """Whether calls of a provider must be reserved."""

    async def reserve(self, provider: str, request_id: str, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Reserve what a call may cost. Raises CapReached, or Overloaded while caps can't be checked.

        prompt_tokens: as a model of our own counts them; max_tokens: the bound of the output.
        """
