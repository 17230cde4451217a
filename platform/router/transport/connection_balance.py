"""Connections spread over the gateways behind one address: the fuller ones have some of their clients connect anew.

Not who places connections: a load balancer of connections, such as a Service of Kubernetes, does, each at random, and
clients keep theirs for hours. Of 64 connections at four gateways the fullest then has 1.27 times its part on average,
and a gateway that was replaced has none. Here each gateway tells the others how many requests are under way (with what
it has given to tenants, `tenancy.service_exchange`), and one that has more than the mean ends some connections with
their answers, which the client's next request then opens elsewhere. Invariants: no answer is cut, no request is
refused; of one look at the others follow at most half as many ends as there are requests too many.
"""

import math
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOLERANCE = 1.05
"""Requests under way, beside the mean of the gateways, up to which nothing is moved."""
STEP = 0.5
"""Part of the surplus that one look moves: some of what is moved comes back, and the next look is a second later."""
SMOOTHING = 0.5
"""Weight of the newest count in the mean over the latest looks."""


class Spread:
    """How many requests are under way at one gateway, and how many connections it is to end. Pure."""

    def __init__(self) -> None:
        self.num_underway = 0
        """Posts under way."""
        self._mean: float | None = None
        self._num_to_end = 0

    def sample(self) -> float:
        """Count the requests under way once more; returns their mean over the latest counts."""
        newest = float(self.num_underway)
        self._mean = newest if self._mean is None else self._mean + SMOOTHING * (newest - self._mean)
        return self._mean

    def compare(self, others: Sequence[float]) -> None:
        """Decide how many connections to end, by what the other gateways have sampled; what was left to end from the
        time before is not added."""
        own = self._mean or 0.0
        mean = (own + sum(others)) / (1 + len(others))
        surplus = own - mean
        self._num_to_end = math.ceil(STEP * surplus) if surplus >= 1.0 and own > TOLERANCE * mean else 0

    def take(self) -> bool:
        """Returns whether the connection of the answer that now begins is to end with it."""
        if not self._num_to_end:
            return False
        self._num_to_end -= 1
        return True


class SpreadingApp:
    """An ASGI app around another, which counts posts, and ends connections as `spread` says."""

    def __init__(self, app: ASGIApp, spread: Spread) -> None:
        self._app = app
        self._spread = spread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        spread = self._spread
        spread.num_underway += 1
        try:
            await self._app(scope, receive, add_close_header(send) if spread.take() else send)
        finally:
            spread.num_underway -= 1


def add_close_header(send: Send) -> Send:
    """`send`, with a header by which the connection ends with the response."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_closing
