"""Sends a plan. Open loop: each request leaves at its intended time, whatever the server does; closed loop: so many at
once.

A run has four parts: sending; drain, until the last answer or `drain_s`; the cut of what is still under way; repeats of
a sample of the finished requests. Ctrl-C (`stop`) goes to the cut at once, SIGTERM (`enough`) to the drain. Being late
once makes nothing late for good: what is due leaves at once, with its lateness recorded. Nothing is kept of a request
that has ended, but for the sample.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from penstock_loadtest.client.client import Answer, Client
from penstock_loadtest.client.schedule import Schedule
from penstock_loadtest.errors import LoadtestError, ScenarioInvalid
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.records import Record
from penstock_loadtest.run.prefetch import PrefetchQueue
from penstock_loadtest.run.sample import Repeatable, Sampler
from penstock_loadtest.run.sessions import Sessions, Turn
from penstock_loadtest.scenario import Scenario

FILL_S = 10.0
"""Most seconds spent on preparing the first requests before the run starts."""
REPEATS_AT_ONCE = 8
INFINITE_S = float("inf")


class RunFacts(NamedTuple):
    """Facts of a run that its records don't hold. Times are the clock's."""

    sent: int
    turns_not_sent: int
    """Later turns of sessions that never left: a turn before them did not finish, or the run ended first."""
    most_in_flight: int
    last_sent_s: float
    ended_s: float
    """Time at which the last request had ended or was cut; repeats come after it."""
    is_interrupted: bool
    repeats: list[tuple[Record, Record]]
    """First and second time of the requests that were sent twice; the second has an index of its own, beyond the
    plan's."""
    plan_error: LoadtestError | None
    """The plan broke off there, or had nothing to send; what it had yielded before was run to its end."""


class Ready(NamedTuple):
    """A request that may leave."""

    planned: Planned
    body: bytes
    due_s: float


async def run_load(
    scenario: Scenario,
    planned: Iterator[Planned],
    client: Client,
    *,
    on_sent: Callable[[Planned], None],
    on_ended: Callable[[Answer], None],
    stop: asyncio.Event,
    enough: asyncio.Event | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> RunFacts:
    """Run the plan; the client's clock starts once the first requests are prepared. Raises what preparing those raises,
    before any is sent.

    stop: when it is set, what is under way is cut. enough: nothing more is sent, and what is under way may end.
    What `on_sent` or `on_ended` raises ends the run, and is raised.
    """
    async with PrefetchQueue(planned, client.prepare) as prefetched:
        await prefetched.wait_filled(FILL_S, stop)
        client.clock.start()
        on_start()
        try:
            async with asyncio.TaskGroup() as group:
                run = _Run(
                    scenario,
                    prefetched,
                    client,
                    group,
                    on_sent=on_sent,
                    on_ended=on_ended,
                    stop=stop,
                    enough=enough or asyncio.Event(),
                )
                try:
                    return await run.go()
                finally:
                    run.close()
        except ExceptionGroup as group_error:
            raise _first(group_error) from group_error


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        prefetched: PrefetchQueue,
        client: Client,
        group: asyncio.TaskGroup,
        *,
        on_sent: Callable[[Planned], None],
        on_ended: Callable[[Answer], None],
        stop: asyncio.Event,
        enough: asyncio.Event,
    ) -> None:
        self._scenario = scenario
        self._prefetched = prefetched
        self._client = client
        self._now = client.clock.now
        self._group = group
        self._on_sent = on_sent
        self._on_ended = on_ended
        self._stop = stop
        self._enough = enough
        self._is_open = scenario.loop == "open"
        self._until_s = INFINITE_S if scenario.duration_s is None else scenario.duration_s
        self._schedule = Schedule()
        self._sessions = Sessions()
        self._sampler = Sampler(scenario.repeat, random.Random(scenario.seed))
        self._requests: set[asyncio.Task[None]] = set()
        self._turns: set[asyncio.Task[None]] = set()  # later turns that wait for their time
        self._ready: deque[Ready] = deque()  # closed loop: later turns that wait for a slot
        self._free_s: deque[float] = deque()  # closed loop: since when each free slot is free
        self._changed = asyncio.Event()  # something changed that somebody may wait for
        self._is_cutting = False
        self._sent = self._most_in_flight = self._next_index = 0
        self._last_sent_s = 0.0
        self._plan_error: LoadtestError | None = None

    async def go(self) -> RunFacts:
        watches = [self._group.create_task(self._watch(event)) for event in (self._stop, self._enough)]
        await self._send_all()
        await self._wait(lambda: not self._requests, self._now() + self._scenario.drain_s)
        await self._cut()
        ended_s = self._now()
        is_interrupted = self._stop.is_set()
        if not self._sent and not is_interrupted and not self._enough.is_set():
            self._plan_error = self._plan_error or ScenarioInvalid(f"Nothing was sent: {self._why_nothing}.")
        repeats = await self._repeat(self._sampler.kept)
        for watch in watches:
            watch.cancel()
        return RunFacts(
            sent=self._sent,
            turns_not_sent=self._sessions.not_sent,
            most_in_flight=self._most_in_flight,
            last_sent_s=self._last_sent_s,
            ended_s=ended_s,
            is_interrupted=is_interrupted or self._stop.is_set(),
            repeats=repeats,
            plan_error=self._plan_error,
        )

    @property
    def _why_nothing(self) -> str:
        trace, until_s = self._scenario.trace, self._until_s
        if trace is None:
            return f"no request of the scenario is due within duration_s, {until_s:g} s"
        return f"the first request of {trace.path} is due after duration_s, {until_s:g} s; set trace.start_s"

    def close(self) -> None:
        self._schedule.close()

    # sending

    async def _send_all(self) -> None:
        """Send until the plan is through and no session has turns left, or the duration is over."""
        pump = self._group.create_task(self._pump(self._open_loop if self._is_open else self._closed_loop))
        pump.add_done_callback(lambda _: self._changed.set())
        # open loop: what was intended before the end leaves, however late
        await self._wait(lambda: pump.done() or self._enough.is_set(), INFINITE_S if self._is_open else self._until_s)
        await self._wait(lambda: self._enough.is_set() or (pump.done() and not self._turns_left), self._until_s)
        pump.cancel()
        for task in self._turns:
            task.cancel()
        self._sessions.abandon(waiting=len(self._turns) + len(self._ready))

    async def _pump(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except LoadtestError as error:
            self._plan_error = error

    async def _open_loop(self) -> None:
        while (item := await self._prefetched.next()) is not None:
            turn = self._sessions.arrive(item.planned)
            if turn is None:
                continue
            if item.body is None:
                self._start_turn(turn)
            else:
                await self._at(turn.due_s)
                self._send(item.planned, item.body, turn.due_s)

    async def _closed_loop(self) -> None:
        self._free_s.extend([self._now()] * self._scenario.concurrency)
        while (ready := await self._next_ready()) is not None:
            while not self._free_s:
                await self._wait_change()
            self._send(ready.planned, ready.body, max(self._free_s.popleft(), ready.due_s))
            await asyncio.sleep(0)

    async def _next_ready(self) -> Ready | None:
        """The next turn to send: turns that are due first, then the plan's next one. Returns None if nothing is
        left."""
        while not self._ready:
            item = await self._prefetched.next()
            if item is None:
                if not self._turns_left:
                    return None
                await self._wait_change()
                continue
            turn = self._sessions.arrive(item.planned)
            if turn is not None and item.body is not None:
                return Ready(item.planned, item.body, 0.0)
            if turn is not None:
                self._start_turn(turn)
        return self._ready.popleft()

    @property
    def _turns_left(self) -> bool:
        return bool(self._sessions.parked or self._turns or self._ready)

    def _start_turn(self, turn: Turn) -> None:
        if turn.due_s >= self._until_s:
            self._sessions.drop(turn.planned)
            return
        task = self._group.create_task(self._turn(turn))
        self._turns.add(task)
        task.add_done_callback(self._turns.discard)

    async def _turn(self, turn: Turn) -> None:
        """Build the body now, leave when it is due."""
        ready = Ready(turn.planned, self._client.prepare(turn.planned, turn.history), turn.due_s)
        await self._at(turn.due_s)
        if self._is_open:
            self._send(*ready)
        else:
            self._ready.append(ready)
        self._changed.set()

    # requests

    def _send(self, planned: Planned, body: bytes, intended_s: float) -> None:
        self._start(self._request(planned, body, intended_s))
        self._sent += 1
        self._most_in_flight = max(self._most_in_flight, len(self._requests))
        self._next_index = max(self._next_index, planned.index + 1)
        self._last_sent_s = self._now()
        self._on_sent(planned)

    async def _request(self, planned: Planned, body: bytes, intended_s: float) -> None:
        answer = await self._client.send_body(
            planned, body, intended_s=intended_s, deadline_s=intended_s + self._scenario.timeout_s
        )
        self._on_ended(answer)
        self._sampler.offer(planned, answer)
        if not self._is_open:
            self._free_s.append(self._now())
        self._go_on(planned, answer)

    def _go_on(self, planned: Planned, answer: Answer) -> None:
        if planned.session is None:
            return
        record = answer.record
        end_s = self._now() if record.end_s is None else record.end_s
        turn = self._sessions.finish_turn(
            planned, is_finished=record.outcome == "finished", answer=answer.text, end_s=end_s
        )
        if turn is not None:
            self._start_turn(turn)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._group.create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._is_gone)

    def _is_gone(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        self._changed.set()

    async def _cut(self) -> None:
        """End what is still under way; each becomes a record."""
        self._is_cutting = True
        await asyncio.sleep(0)  # one that has not begun would end without a record
        requests = list(self._requests)
        for task in requests:
            task.cancel()
        if requests:
            await asyncio.wait(requests)

    # repeats

    async def _repeat(self, kept: list[Repeatable]) -> list[tuple[Record, Record]]:
        """Send the sample again, some at once, for at most `drain_s`. Those that are then left are left out."""
        pairs: list[tuple[Record, Record]] = []
        left = iter(enumerate(kept, self._next_index))
        self._is_cutting = self._stop.is_set()
        for _ in range(min(REPEATS_AT_ONCE, len(kept))):
            self._start(self._send_again(left, pairs))
        await self._wait(lambda: not self._requests, self._now() + self._scenario.drain_s)
        await self._cut()
        return pairs

    async def _send_again(self, left: Iterator[tuple[int, Repeatable]], pairs: list[tuple[Record, Record]]) -> None:
        for index, (planned, body, record) in left:
            if self._is_cutting:
                return
            now_s = self._now()
            again = msgspec.structs.replace(planned, index=index, cancel_after_s=None)
            answer = await self._client.send_body(
                again, body, intended_s=now_s, deadline_s=now_s + self._scenario.timeout_s
            )
            pairs.append((record, answer.record))

    # waiting

    async def _at(self, due_s: float) -> None:
        """Come back when it is due, or in the next round of the event loop."""
        left_s = due_s - self._now()
        if left_s <= 0:
            await asyncio.sleep(0)
            return
        due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._schedule.at(time.perf_counter() + left_s, lambda _: None if due.done() else due.set_result(None))
        await due

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _wait(self, is_over: Callable[[], bool], until_s: float) -> None:
        """Wait until `is_over`, that time, or Ctrl-C."""
        timeout_s = None if until_s == INFINITE_S else max(0.0, until_s - self._now())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (is_over() or self._stop.is_set()):
                    await self._wait_change()

    async def _watch(self, event: asyncio.Event) -> None:
        await event.wait()
        self._changed.set()
