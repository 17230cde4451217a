"""A client without a network: answers as a test programs it, on the real clock."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from penstock_loadtest.client.client import Answer, Clock
from penstock_loadtest.planned import Message, Planned
from penstock_loadtest.results.records import Outcome, Record

Serve = Callable[[Planned], Awaitable[Outcome]]


async def at_once(_: Planned) -> Outcome:
    return "finished"


async def never(_: Planned) -> Outcome:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


class StandIn:
    """The part of a Client that the runner uses. `serve` returns how a request ends, and takes its time for it."""

    def __init__(self, serve: Serve = at_once) -> None:
        self.clock = Clock()
        self.bodies: list[bytes] = []
        self.histories: dict[int, tuple[Message, ...]] = {}
        self.in_flight = self.most_in_flight = 0
        self._serve = serve

    def prepare(self, planned: Planned, history: Sequence[Message] = ()) -> bytes:
        self.histories[planned.index] = tuple(history)
        return f"{planned.prompt}".encode()

    async def send_body(self, planned: Planned, body: bytes, *, intended_s: float, deadline_s: float) -> Answer:
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        record = Record(
            index=planned.index,
            intended_s=intended_s,
            sent_s=self.clock.now(),
            session=planned.session,
            turn=planned.turn,
        )
        try:
            async with asyncio.timeout(deadline_s - self.clock.now()):
                record.outcome = await self._serve(planned)
        except (TimeoutError, asyncio.CancelledError) as error:
            record.is_cut = isinstance(error, asyncio.CancelledError)
        self.in_flight -= 1
        record.end_s = self.clock.now()
        record.answer_digest = "same" if record.outcome == "finished" else None
        return Answer(record, f"answer {planned.index}", body)


def blocked(seconds: float) -> None:
    """Occupy the whole process, as a late tester would be."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
