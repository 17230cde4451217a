"""External providers as part of the cloud tier: servers with OpenAI's API, called over HTTP, answering in text instead
of token ids.

Not the choice of one (tiers), and not the messages (provider_api). To a mailbox a provider is a replica that pushes
`TextDelta`s. Invariants: a call gives its sink exactly one end, or nothing more once it is aborted; before its first
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
from penstock.router.providers.breaker import Breaker, BreakerState
from penstock.router.providers.prices import prices_of
from penstock.router.providers.provider_api import (
    CallNumbers,
    ProviderEvent,
    Refusal,
    StreamBroken,
    encode_body,
    read_event,
    read_refusal,
    request_path,
)
from penstock.router.routing.request import CallDelta, ProviderRequest, TextDelta
from penstock.router.routing.reserved import Reservation
from penstock.router.routing.spending import Spending
from penstock.router.routing.tiers import RouteForecast, TierReason
from penstock.tenancy.tariffs import price_nano
from penstock.wire.accounts import PlacePrices
from penstock.wire.errors import Overloaded, ReplicaLost
from penstock.wire.frames import Delta, Finish
from penstock.wire.money import shown

CONNECT_S = 5.0
LINGER_S = 0.2
"""Longest wait for the end of a response behind its last event. If it comes, the connection serves the next request,
else it is closed."""
TTFT_RATE = 0.2
"""Weight of the latest time to first token in the mean that predicts the next."""
CACHED_RATE = 0.05
"""Weight of the latest answer in the part of prompts that is expected in the server's cache."""
MAX_EVENT_BYTES = 2**20
MAX_ERROR_BYTES = 2**16

log = logging.getLogger("penstock.provider")


class TextSink(Protocol):
    """Takes what comes of a call."""

    @property
    def spending(self) -> Spending:
        """What the call costs; the provider writes it."""

    def push(self, delta: Delta) -> None: ...
    def refuse(self, error: PenstockError) -> None:
        """The call ends before any text of it."""

    def break_off(self, error: PenstockError) -> None:
        """The answer ends in the middle."""


@dataclass(slots=True)
class _Call:
    sid: int
    sink: TextSink
    term: int
    """The breaker's term in which the call began."""
    began_s: float
    num_prompt_tokens: int
    """Estimated until the provider gives it."""
    spending: Spending
    reservation: Reservation | None = None
    """What it may cost; None: nothing caps that."""
    num_cached_tokens: int = 0
    """Prompt tokens of which the provider says that they were in its cache."""
    task: asyncio.Task[None] | None = None
    was_asked: bool = False
    """The server may have got the request, and computed its prompt."""
    has_begun: bool = False
    """The provider has begun to answer."""
    is_settled: bool = False
    """The breaker knows how it went."""
    outcome: str = "cut"
    """Label of the call in the metrics."""
    num_counted: int = 0
    """Output tokens delivered so far; a chunk counts as one until the provider gives the sum."""


class Provider:
    """One provider. clock: monotonic seconds. on_room: called with its name when it may take another request."""

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
        self.prices = PlacePrices(
            place=config.name,
            input=config.input_price,
            cached=config.input_price if config.cached_price is None else config.cached_price,
            output=config.output_price,
        )
        self.tier = config.tier
        self.cached_share = 0.0
        """Part of a prompt that is expected in the server's cache: a running mean of what it says."""
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

    @property
    def has_failed(self) -> bool:
        """Whether its breaker has opened and not closed since: a trial that is allowed has not yet succeeded."""
        return self._breaker.state(self._clock()) is not BreakerState.CLOSED

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

    def forecast(self) -> RouteForecast:
        if not self._breaker.allows(self._clock()):
            return RouteForecast(obstacle=TierReason.BREAKER_OPEN)
        if len(self._calls) >= self.config.max_concurrency:
            return RouteForecast(obstacle=TierReason.TIER_FULL)
        return RouteForecast(self._ttft_s)

    def begin(
        self,
        request: ProviderRequest,
        max_tokens: int,
        seed: int,
        num_prompt_tokens: int,
        sink: TextSink,
        headers: Mapping[str, str] = MappingProxyType({}),
        reservation: Reservation | None = None,
    ) -> int:
        """Begin a call, and return its number. headers: of the request's trace. reservation: what the call may cost; it
        is settled when the call is over. Only after a `forecast` without obstacle, with nothing awaited since.

        num_prompt_tokens: as another model counts, for the cost of an answer that ends before the provider's count has
        come.
        """
        body = encode_body(request, self.config, max_tokens, seed)
        self._last_sid = sid = self._last_sid + 1
        call = self._calls[sid] = _Call(
            sid, sink, self._breaker.begin(), self._clock(), num_prompt_tokens, sink.spending, reservation
        )
        call.task = self._tasks.create_task(
            self._run(call, self.config.base_url.rstrip("/") + request_path(request), body, headers),
            name=f"provider {self.name}",
        )
        call.task.add_done_callback(lambda _: self._end(call))
        return sid

    def abort(self, sid: int) -> None:
        """Cancel a call to the provider. Its connection is closed, and its sink gets nothing more. An unknown `sid` is
        ignored."""
        call = self._calls.get(sid)
        if call is not None and call.task is not None:
            call.task.cancel()

    def abort_all(self) -> None:
        for sid in list(self._calls):
            self.abort(sid)

    async def _run(self, call: _Call, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            await self._request(call, url, body, headers)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            call.was_asked = False
            log.warning("provider failed", extra={"provider": self.name, "error": type(error).__name__})
            self._fail(call, f"the provider {self.name} failed")
        except httpx.TimeoutException:
            self._fail(call, f"the provider {self.name} was silent for {self.config.timeout_s:g} s")
        except (httpx.HTTPError, StreamBroken) as error:
            log.warning("provider failed", extra={"provider": self.name, "error": type(error).__name__})
            self._fail(call, f"the provider {self.name} failed")
        except Exception as error:  # the top for one call: the others of this gateway share its task group
            log.error("provider failed", extra={"provider": self.name}, exc_info=error)
            self._fail(call, f"the provider {self.name} failed")

    async def _request(self, call: _Call, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        call.was_asked = True
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                call.was_asked = False
                retry_after, error_body = response.headers.get("retry-after"), await _read_error_body(response)
                refusal = read_refusal(self.name, response.status_code, retry_after, error_body, time.time())
                self._refuse(call, refusal)
                return
            async with aclosing(_split_events(response.aiter_bytes())) as events:
                await self._read(call, events)
                # the answer is delivered; what is left is the connection's affair
                with suppress(TimeoutError, httpx.HTTPError, StreamBroken):
                    async with asyncio.timeout(LINGER_S):
                        async for _ in events:
                            pass

    async def _read(self, call: _Call, events: AsyncIterator[bytes]) -> None:
        """Deliver all of an answer. Raises StreamBroken, and httpx's errors."""
        last = ProviderEvent()
        numbers = CallNumbers()
        async for data in events:
            if data == b"[DONE]":
                break
            event = read_event(data)
            if event.text or event.calls:
                self._deliver(call, event.text, numbers.renumber(event.calls))
            last = ProviderEvent(
                "",
                event.finish or last.finish,
                _latest(event.prompt_tokens, last.prompt_tokens),
                _latest(event.output_tokens, last.output_tokens),
                cached_tokens=_latest(event.cached_tokens, last.cached_tokens),
            )
        call.num_cached_tokens = last.cached_tokens or 0
        if last.finish is None:
            raise StreamBroken("its stream ended without a finish")
        self._finish(call, last.finish, last.prompt_tokens, last.output_tokens)

    def _deliver(self, call: _Call, text: str, tool_calls: tuple[CallDelta, ...]) -> None:
        if not call.has_begun:
            call.has_begun = True
            self._ttft_s += TTFT_RATE * (self._clock() - call.began_s - self._ttft_s)
            self._let_others_through(call)
        call.num_counted += 1
        call.sink.push(TextDelta(call.sid, [], text=text, num_tokens=1, calls=tool_calls))

    def _let_others_through(self, call: _Call) -> None:
        term = self._breaker.answer(call.term)
        if term != call.term:  # it was a trial, and lets the others through
            call.term = term
            self._on_room(self.name)

    def _finish(self, call: _Call, finish: Finish, prompt_tokens: int | None, output_tokens: int | None) -> None:
        self._breaker.succeed(call.term)
        call.outcome, call.is_settled = "finished", True
        call.num_prompt_tokens = call.num_prompt_tokens if prompt_tokens is None else prompt_tokens
        cached_share = min(1.0, call.num_cached_tokens / max(1, call.num_prompt_tokens))
        self.cached_share += CACHED_RATE * (cached_share - self.cached_share)
        correction = output_tokens - call.num_counted if output_tokens is not None else 0
        call.num_counted += correction
        call.sink.push(TextDelta(call.sid, [], finish=finish, num_tokens=correction, num_prompt_tokens=prompt_tokens))
        self._end(call)

    def _refuse(self, call: _Call, refusal: Refusal) -> None:
        call.outcome, call.is_settled = "refused", True
        now = self._clock()
        if not refusal.is_failure:
            self._breaker.succeed(call.term)
        elif refusal.pause_s is not None:
            self._breaker.pause(now, refusal.pause_s)
        else:
            self._breaker.fail(now, call.term)
        log.warning(
            "provider refused",
            extra={"provider": self.name, "error": type(refusal.error).__name__, "is_failure": refusal.is_failure},
        )
        self._schedule_reopening(now)
        call.sink.refuse(refusal.error)

    def _fail(self, call: _Call, sentence: str) -> None:
        call.outcome, call.is_settled = "failed", True
        now = self._clock()
        self._breaker.fail(now, call.term)
        self._schedule_reopening(now)
        if call.has_begun:
            call.sink.break_off(ReplicaLost(f"{sentence} in the middle of its answer"))
        else:
            call.sink.refuse(Overloaded(sentence, retry_after_s=1.0))

    def _schedule_reopening(self, now: float) -> None:
        """Have the requests that wait tried again when the breaker lets a trial through."""
        if self._reopening is not None:
            self._reopening.cancel()
        open_s = self._breaker.open_for_s(now)
        self._reopening = asyncio.get_running_loop().call_later(open_s, self._on_room, self.name) if open_s else None

    def _end(self, call: _Call) -> None:
        """Count a call that is over, once; also one that was cancelled before it began."""
        if self._calls.pop(call.sid, None) is None:
            return
        if call.has_begun and not call.is_settled:
            self._breaker.succeed(call.term)  # it was well when it was cut
        elif not call.is_settled:
            self._breaker.forget(call.term)
        cost_nano = self._count_cost(call) if call.was_asked else 0
        call.spending.settle()
        if call.reservation is not None:
            call.reservation.settle(cost_nano)
        self._metrics.provider_requests.labels(self.name, call.outcome).inc()
        self._on_room(self.name)

    def _count_cost(self, call: _Call) -> int:
        """Count what a call has cost, and return it, in 1e-9 of the unit of prices; 0 where there are none."""
        num_cached = min(call.num_cached_tokens, call.num_prompt_tokens)
        num_input = call.num_prompt_tokens - num_cached
        cost_nano = price_nano(prices_of(self.config), num_input, num_cached, call.num_counted)
        call.spending.provided_nano = cost_nano
        if self.prices.input is not None:
            self._metrics.provider_cost.labels(self.name).inc(shown(cost_nano))
        return cost_nano


class Providers:
    """All providers, by name; used as `async with`, and called only inside."""

    def __init__(
        self,
        configs: Sequence[ProviderConfig],
        keys: Mapping[str, str],
        on_room: Callable[[str], None],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """keys: by provider; one that needs none has none."""
        self._metrics = metrics
        self.by_name = {
            config.name: Provider(config, keys.get(config.name), on_room, metrics, clock) for config in configs
        }
        self._tasks = asyncio.TaskGroup()

    @property
    def has_available(self) -> bool:
        return any(provider.is_available for provider in self.by_name.values())

    def count_open(self) -> None:
        """Tell the metrics which breakers are open now."""
        for provider in self.by_name.values():
            self._metrics.provider_breaker_open.labels(provider.name).set(provider.has_failed)

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


async def _split_events(data: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
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


async def _read_error_body(response: httpx.Response) -> bytes:
    """The first MAX_ERROR_BYTES of an error's body."""
    body = b""
    async for some in response.aiter_bytes():
        body += some
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES]


def _latest(new: int | None, old: int | None) -> int | None:
    return old if new is None else new
