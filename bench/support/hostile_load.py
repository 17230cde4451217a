"""The load that must not notice an attack: streams of one tenant, new requests of another, and what each has seen."""

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from bench.support.loopback import ChatClient, prompt

NUM_STREAMS = 16
STREAM_TOKENS = 192
NEW_PER_SECOND = 2.0
NEW_TOKENS = 4
PROMPT_TOKENS = 60
ANSWER_S = 25.0
"""Time after which a request that has not ended counts as failed, seconds."""
LAG_S = 0.010


class Seen(NamedTuple):
    """A span of time, by time.perf_counter: a gap between two tokens, or the wait for a first token."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    def touches(self, begin_s: float, end_s: float) -> bool:
        return self.began_s < end_s and self.ended_s > begin_s


class Failure(NamedTuple):
    """A request that failed, and the time from its sending to then."""

    span: Seen
    what: str


@dataclass(slots=True)
class Observations:
    """What the innocent have seen. Gaps are of the streams, waits of the new requests, which have a connection each."""

    gaps: list[Seen] = field(default_factory=list)
    waits: list[Seen] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    lags: list[Seen] = field(default_factory=list)
    """Pauses of the measuring client itself, beyond LAG_S each."""


class InnocentLoad:
    """16 streams without a pause, and 2 new requests a second. `run` until it is cancelled."""

    def __init__(self, url: str, model: str, stream_key: str, new_key: str) -> None:
        self.seen = Observations()
        self._url, self._model = url, model
        self._stream_key, self._new_key = stream_key, new_key
        self._rng = random.Random(15)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_lag())
            tasks.create_task(self._arrive(tasks))
            for number in range(NUM_STREAMS):
                tasks.create_task(self._stream(number))

    def _client(self, key: str) -> ChatClient:
        return ChatClient(self._url, self._model, key, extra={"ignore_eos": True})

    async def _stream(self, number: int) -> None:
        client = self._client(self._stream_key)
        await asyncio.sleep(number * 0.05)
        while True:
            if not await self._answer(client, STREAM_TOKENS, None):
                await asyncio.sleep(0.2)

    async def _arrive(self, tasks: asyncio.TaskGroup) -> None:
        due_s = time.perf_counter()
        while True:
            tasks.create_task(self._arrival(due_s))
            due_s += 1 / NEW_PER_SECOND
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))

    async def _arrival(self, due_s: float) -> None:
        client = self._client(self._new_key)
        try:
            await self._answer(client, NEW_TOKENS, due_s)
        finally:
            client.close()

    async def _answer(self, client: ChatClient, max_tokens: int, due_s: float | None) -> bool:
        """One chat, noted; False if it failed. due_s: when a new request was to be sent; None for one of a stream."""
        begun_s = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_S + 5):
                answer = await client.chat(prompt(self._rng, PROMPT_TOKENS), max_tokens, timeout_s=ANSWER_S)
        except (RuntimeError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            kind = "stream" if due_s is None else "new request"
            self._fail(begun_s, f"{kind}: {type(error).__name__} {str(error)[:120]}")
            return False
        if (answer.usage or {}).get("completion_tokens") != max_tokens:
            self._fail(begun_s, f"an answer of {answer.usage} instead of {max_tokens} tokens")
        times = [answer.began_s + arrival for arrival in answer.arrivals]
        if due_s is None:
            self.seen.gaps += [Seen(before, after) for before, after in itertools.pairwise(times)]
        else:
            self.seen.waits.append(Seen(due_s, times[0]))
        return True

    def _fail(self, begun_s: float, what: str) -> None:
        self.seen.failures.append(Failure(Seen(begun_s, time.perf_counter()), what))

    async def _watch_lag(self) -> None:
        while True:
            begun_s = time.perf_counter()
            await asyncio.sleep(LAG_S)
            if time.perf_counter() - begun_s > 2 * LAG_S:
                self.seen.lags.append(Seen(begun_s + LAG_S, time.perf_counter()))
