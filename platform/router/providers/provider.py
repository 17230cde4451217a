"""External providers as part of the cloud tier: servers with OpenAI's API, asked over HTTP, answering in text instead
of token ids.

Not the choice to ask one (tiers), and not what is said (provider_api). To a stream a provider is a replica that pushes
`TextDelta`s. Invariants: a call tells its sink exactly one end, or nothing more once it is aborted; before its first
text it is refused, so that another route may take the request, after it broken; a provider has `max_concurrency` calls
of this gateway at most, and none while its breaker is open.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

import httpx

from penstock.base.errors import PenstockError
from penstock.base.metrics import Metrics
from penstock.router.config import ProviderConfig
from penstock.router.providers.breaker import Breaker
from penstock.router.providers.provider_api import (
    ProviderEvent,
    Refusal,
    StreamBroken,
    body_of,
    path_of,
    read_event,
    refusal,
)
from penstock.router.routing.request import ProviderRequest, TextDelta
from penstock.router.routing.tiers import RouteForecast, TierReason
from penstock.wire.errors import Overloaded, ReplicaLost
from penstock.wire.frames import Delta, Finish

CONNECT_S = 5.0
LINGER_S = 0.2
"""For the end of a response behind its last event; then the connection serves the next request, else it is closed."""
TTFT_RATE = 0.2
"""Weight of the latest time to first token in the mean that predicts the next."""
MAX_EVENT_BYTES = 2**20
MAX_ERROR_BYTES = 2**16
PRICE_UNIT = 1e6
"""Tokens that a price is for."""

log = logging.getLogger("penstock.provider")


class TextSink(Protocol):
    """Who reads a call."""

    def push(self, delta: Delta) -> None: ...
    def refused(self, error: PenstockError) -> None:
        """Nothing has come, and nothing will."""

    def broken(self, error: PenstockError) -> None:
        """The answer ends in the middle."""


@dataclass(slots=True)
class _Call:
    sid: int
    sink: TextSink
    term: int
    """The breaker's."""
    began_s: float
    num_prompt_tokens: int
    """Estimated until the provider gives it."""
    task: asyncio.Task[None] | None = None
    has_begun: bool = False
    """To answer."""
    is_settled: bool = False
    """The breaker knows how it went."""
    outcome: str = "cut"
    num_counted: int = 0
    """Output tokens told so far; a chunk counts as one until the provider gives the sum."""


class Provider:
    """One of them. clock: monotonic seconds. on_room: called with its name when it may take another request."""

    def __init__(
        self,
        config: ProviderConfig,
        key: str | None,
        on_room: Callable[[str], None],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.name = config.name
        self.tier = config.tier
        self._ttft_s = config.ttft_s
        self._breaker = Breaker(config.breaker_failures, config.breaker_open_s)
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._on_room = on_room
        self._metrics = metrics
        self._clock = clock
        self._calls: dict[int, _Call] = {}
        self._last_sid = 0
        self._reopening: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Provider({self.name})"

    @property
    def is_available(self) -> bool:
        return self._breaker.allows(self._clock())

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        timeout = httpx.Timeout(self.config.timeout_s, connect=min(CONNECT_S, self.config.timeout_s))
        limits = httpx.Limits(
            max_connections=self.config.max_concurrency, max_keepalive_connections=self.config.max_concurrency
        )
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, headers=self._headers, trust_env=False)
        self._tasks = tasks

    async def close(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
        await self._client.aclose()

    def outlook(self) -> RouteForecast:
        if not self._breaker.allows(self._clock()):
            return RouteForecast(obstacle=TierReason.BREAKER_OPEN)
        if len(self._calls) >= self.config.max_concurrency:
            return RouteForecast(obstacle=TierReason.TIER_FULL)
        return RouteForecast(self._ttft_s)

    def begin(
        self,
        ask: ProviderRequest,
        max_tokens: int,
        seed: int,
        num_prompt_tokens: int,
        sink: TextSink,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """ProviderRequest, and return the call's number. headers: of the request's trace. Only after an `outlook`
        without obstacle, with nothing awaited since.

        num_prompt_tokens: as another model counts, for the cost of an answer that ends before the provider has told.
        """
        body = body_of(ask, self.config, max_tokens, seed)
        self._last_sid = sid = self._last_sid + 1
        call = self._calls[sid] = _Call(sid, sink, self._breaker.begin(), self._clock(), num_prompt_tokens)
        call.task = self._tasks.create_task(
            self._run(call, self.config.base_url.rstrip("/") + path_of(ask), body, headers),
            name=f"provider {self.name}",
        )
        call.task.add_done_callback(lambda _: self._over(call))
        return sid

    def abort(self, sid: int) -> None:
        """Hang up; the sink hears no more. Unknown numbers are ignored."""
        call = self._calls.get(sid)
        if call is not None and call.task is not None:
            call.task.cancel()

    def abort_all(self) -> None:
        for sid in list(self._calls):
            self.abort(sid)

    async def _run(self, call: _Call, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            await self._converse(call, url, body, headers)
        except httpx.TimeoutException:
            self._fail(call, f"the provider {self.name} was silent for {self.config.timeout_s:g} s")
        except (httpx.HTTPError, StreamBroken) as error:
            log.warning("provider failed", extra={"provider": self.name, "error": type(error).__name__})
            self._fail(call, f"the provider {self.name} failed")
        except Exception as error:  # the top for one call: the others of this gateway share its task group
            log.error("provider failed", extra={"provider": self.name}, exc_info=error)
            self._fail(call, f"the provider {self.name} failed")

    async def _converse(self, call: _Call, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                said = await _beginning(response)
                self._turn_away(
                    call,
                    refusal(self.name, response.status_code, response.headers.get("retry-after"), said, time.time()),
                )
                return
            async with aclosing(_events(response.aiter_bytes())) as events:
                await self._read(call, events)
                with suppress(
                    TimeoutError, httpx.HTTPError, StreamBroken
                ):  # the answer is told; what is left is the connection's affair
                    async with asyncio.timeout(LINGER_S):
                        async for _ in events:
                            pass

    async def _read(self, call: _Call, events: AsyncIterator[bytes]) -> None:
        """All of an answer, to the sink. Raises StreamBroken, and httpx's errors."""
        last = ProviderEvent()
        async for data in events:
            if data == b"[DONE]":
                break
            said = read_event(data)
            if said.text:
                self._tell(call, said.text)
            last = ProviderEvent(
                "",
                said.finish or last.finish,
                _newer(said.prompt_tokens, last.prompt_tokens),
                _newer(said.output_tokens, last.output_tokens),
            )
        if last.finish is None:
            raise StreamBroken("its stream ended without a finish")
        self._finish(call, last.finish, last.prompt_tokens, last.output_tokens)

    def _tell(self, call: _Call, text: str) -> None:
        if not call.has_begun:
            call.has_begun = True
            self._ttft_s += TTFT_RATE * (self._clock() - call.began_s - self._ttft_s)
            self._answered(call)
        call.num_counted += 1
        call.sink.push(TextDelta(call.sid, [], text=text, num_tokens=1))

    def _answered(self, call: _Call) -> None:
        term = self._breaker.answer(call.term)
        if term != call.term:  # it was a trial, and lets the others through
            call.term = term
            self._on_room(self.name)

    def _finish(self, call: _Call, finish: Finish, prompt_tokens: int | None, output_tokens: int | None) -> None:
        self._breaker.succeed(call.term)
        call.outcome, call.is_settled = "finished", True
        call.num_prompt_tokens = call.num_prompt_tokens if prompt_tokens is None else prompt_tokens
        correction = output_tokens - call.num_counted if output_tokens is not None else 0
        call.num_counted += correction
        call.sink.push(TextDelta(call.sid, [], finish=finish, num_tokens=correction, num_prompt_tokens=prompt_tokens))
        self._over(call)

    def _turn_away(self, call: _Call, found: Refusal) -> None:
        call.outcome, call.is_settled = "refused", True
        now = self._clock()
        if not found.is_failure:
            self._breaker.succeed(call.term)
        elif found.pause_s is not None:
            self._breaker.pause(now, found.pause_s)
        else:
            self._breaker.fail(now, call.term)
        log.warning(
            "provider refused",
            extra={"provider": self.name, "error": type(found.error).__name__, "is_failure": found.is_failure},
        )
        self._await_reopening(now)
        call.sink.refused(found.error)

    def _fail(self, call: _Call, sentence: str) -> None:
        call.outcome, call.is_settled = "failed", True
        now = self._clock()
        self._breaker.fail(now, call.term)
        self._await_reopening(now)
        if call.has_begun:
            call.sink.broken(ReplicaLost(f"{sentence} in the middle of its answer"))
        else:
            call.sink.refused(Overloaded(sentence, retry_after_s=1.0))

    def _await_reopening(self, now: float) -> None:
        """Those who wait are asked again when the breaker lets a trial through."""
        if self._reopening is not None:
            self._reopening.cancel()
        open_s = self._breaker.open_for_s(now)
        self._reopening = asyncio.get_running_loop().call_later(open_s, self._on_room, self.name) if open_s else None

    def _over(self, call: _Call) -> None:
        """Once, also of a call that was cancelled before it began."""
        if self._calls.pop(call.sid, None) is None:
            return
        if call.has_begun and not call.is_settled:
            self._breaker.succeed(call.term)  # it was well when it was cut
        elif not call.is_settled:
            self._breaker.forget(call.term)
        if call.has_begun or call.outcome == "finished":
            self._count_cost(call.num_prompt_tokens, call.num_counted)
        self._metrics.provider_requests.labels(self.name, call.outcome).inc()
        self._on_room(self.name)

    def _count_cost(self, prompt_tokens: int, output_tokens: int) -> None:
        config = self.config
        if config.input_price is not None and config.output_price is not None:
            cost = (prompt_tokens * config.input_price + output_tokens * config.output_price) / PRICE_UNIT
            self._metrics.provider_cost.labels(self.name).inc(cost)


class Providers:
    """All of them, by name; used as `async with`, and asked only inside."""

    def __init__(
        self,
        configs: Sequence[ProviderConfig],
        keys: Mapping[str, str],
        on_room: Callable[[str], None],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """keys: by provider; one that wants none has none."""
        self.by_name = {
            config.name: Provider(config, keys.get(config.name), on_room, metrics, clock) for config in configs
        }
        self._tasks = asyncio.TaskGroup()

    @property
    def has_available(self) -> bool:
        return any(provider.is_available for provider in self.by_name.values())

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for provider in self.by_name.values():
            await provider.open(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for provider in self.by_name.values():
            provider.abort_all()
        await self._tasks.__aexit__(kind, error, trace)
        for provider in self.by_name.values():
            await provider.close()


async def _events(data: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events of one line each, as OpenAI frames them. Raises StreamBroken for one without end.

    Split at line feeds only: text may hold other characters that Python takes for line ends.
    """
    unread = b""
    async for some in data:
        *lines, unread = (unread + some).split(b"\n")
        if len(unread) > MAX_EVENT_BYTES:
            raise StreamBroken("an event of its stream has no end")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if unread.startswith(b"data:"):
        yield unread[5:].strip()


async def _beginning(response: httpx.Response) -> bytes:
    """Of an error's body."""
    body = b""
    async for some in response.aiter_bytes():
        body += some
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES]


def _newer(new: int | None, old: int | None) -> int | None:
    return old if new is None else new
