"""A gateway's way to its tenants' limits: one script in Redis, one round trip to a request, all limits or none.

The arithmetic is `window`'s; here it runs in Redis, on Redis's clock, so that all gateways count in one book. All keys
of a tenant have one hash tag. What is over is settled with what it used, together with the tenant's next request or
`SETTLE_S` later.

While Redis is away, a gateway goes on by a book of its own, which holds what it has admitted itself, within its share
of the limits: the limit divided by the gateways that were there last. So one gateway never exceeds a limit. Of several,
each may find that it has its share left in the first window, whatever the others had given out before; from then on
they stay below the limit together. What was admitted meanwhile is charged to Redis when that is back. A gateway that
has never heard how many there are refuses. Redis keeps the book as it keeps its writes: what an asynchronous failover,
or a power failure, loses of the last second is not counted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.tenancy.tenants import Limits, tenant_key
from penstock.tenancy.window import (
    LIMIT_NAMES,
    MINUTE,
    PARALLEL_WAIT_MS,
    LimitLedger,
    LimitRequest,
    Settled,
    UnsettledUsage,
    Verdict,
    Window,
    share,
)
from penstock.wire.errors import Overloaded

TIMEOUT_S = 0.5
"""Of one round trip."""
MAX_AT_ONCE = 16
"""Round trips under way; more wait for their turn, so that a burst is not taken for a Redis that does not answer."""
AWAY_MS = 500
"""After one has failed, Redis is left alone for that long."""
SETTLE_S = 0.05
"""A tenant's next request at the same gateway settles sooner; this is for the other gateways."""
TICK_S = 1.0
"""Between two looks at what wants renewing."""
PRESENCE_MS = 2000
PRESENCE_LEASE_MS = 10_000
"""A gateway that has not been heard of for so long is not counted."""
MAX_SETTLED = 65536
"""Of one tenant, while Redis is away."""
MAX_TOKENS = 2**40
"""Of one request, reserved or used; the script counts exactly up to 2**53, and a sum beyond it would fail all that is
told with it."""
_GATEWAYS = "penstock:gateways"
_AWAY = (RedisError, OSError, TimeoutError)

log = logging.getLogger(__name__)

_APPLY = """
local requests, tokens, held, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local ask = cjson.decode(ARGV[1])
local bucket_ms, num_buckets, lease_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now = ask.now_ms
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local current = math.floor(now / bucket_ms)
local oldest = current - num_buckets

local function release(id)
  redis.call('HDEL', held, id)
  redis.call('ZREM', leases, id)
end
local function charge(debt, bucket)
  if redis.call('HEXISTS', held, debt[1]) == 1 then return end
  if bucket >= oldest then
    redis.call('HINCRBY', requests, bucket, debt[3])
    redis.call('HINCRBY', tokens, bucket, debt[4])
  end
  if debt[5] then
    redis.call('HSET', held, debt[1], string.format('%d:%d', bucket, debt[4]))
    redis.call('ZADD', leases, now + lease_ms, debt[1])
  end
end
local function counts(name)
  local flat, sum, reset, kept, gone = redis.call('HGETALL', name), 0, 0, {}, {}
  for at = 1, #flat, 2 do
    local bucket, count = tonumber(flat[at]), tonumber(flat[at + 1])
    if bucket < oldest then
      gone[#gone + 1] = flat[at]
    else
      sum = sum + count
      kept[#kept + 1] = {bucket, count}
      if count > 0 then reset = math.max(reset, (bucket + num_buckets + 1) * bucket_ms - now) end
    end
  end
  if #gone > 0 then redis.call('HDEL', name, unpack(gone)) end
  return sum, reset, kept
end
local function wait_for(excess, kept)
  table.sort(kept, function(one, other) return one[1] < other[1] end)
  for _, pair in ipairs(kept) do
    excess = excess - pair[2]
    if excess <= 0 then return (pair[1] + num_buckets + 1) * bucket_ms - now end
  end
  return math.huge
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do release(id) end
for _, settled in ipairs(ask.settled or {}) do
  local was = redis.call('HGET', held, settled[1])
  if was then
    release(settled[1])
    local bucket, reserved = string.match(was, '^(%d+):(%d+)$')
    if redis.call('HEXISTS', tokens, bucket) == 1 then redis.call('HINCRBY', tokens, bucket, settled[2] - tonumber(reserved)) end
  end
end
for _, debt in ipairs(ask.debts or {}) do charge(debt, math.floor((now - debt[2]) / bucket_ms)) end
for _, id in ipairs(ask.renewed or {}) do
  redis.call('HSETNX', held, id, '0:0')
  redis.call('ZADD', leases, now + lease_ms, id)
end

local sum_requests, reset_requests, kept_requests = counts(requests)
local sum_tokens, reset_tokens, kept_tokens = counts(tokens)
local parallel = redis.call('HLEN', held)
local is_admitted, limit, wait = 0, 0, 0
if ask.id then
  if redis.call('HEXISTS', held, ask.id) == 1 then
    is_admitted = 1
  else
    local function against(number, found)
      if found > wait or limit == 0 then limit, wait = number, found end
    end
    local limits = ask.limits or {}
    local most_requests, most_tokens, most_parallel = limits.requests_per_minute, limits.tokens_per_minute, limits.max_parallel
    local asked = ask.tokens or 0
    if most_requests and sum_requests + 1 > most_requests then against(1, wait_for(sum_requests + 1 - most_requests, kept_requests)) end
    if most_tokens and sum_tokens + asked > most_tokens then against(2, wait_for(sum_tokens + asked - most_tokens, kept_tokens)) end
    if most_parallel and parallel >= most_parallel then against(3, tonumber(ARGV[5])) end
    if limit == 0 then
      charge({ask.id, 0, 1, asked, true}, current)
      is_admitted, parallel = 1, parallel + 1
      sum_requests, sum_tokens = sum_requests + 1, sum_tokens + asked
      local reset = (current + num_buckets + 1) * bucket_ms - now
      reset_requests = math.max(reset_requests, reset)
      if asked > 0 then reset_tokens = math.max(reset_tokens, reset) end
    end
  end
end
local window = (num_buckets + 2) * bucket_ms
redis.call('PEXPIRE', requests, window)
redis.call('PEXPIRE', tokens, window)
redis.call('PEXPIRE', held, math.max(window, lease_ms))
redis.call('PEXPIRE', leases, math.max(window, lease_ms))
if wait == math.huge then wait = -1 end
return {is_admitted, limit, wait, sum_requests, sum_tokens, reset_requests, reset_tokens, parallel}
"""
"""ARGV: an LimitRequest as JSON, the Window, the wait for a place among parallel requests. Does what
`window.LimitLedger.apply` does."""

_PRESENT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
"""
"""ARGV: gateway, lease in ms. How many gateways there are."""


class LimitScript:
    """The books of all tenants, in one Redis."""

    def __init__(self, client: redis.asyncio.Redis, window: Window = MINUTE) -> None:
        self._script = client.register_script(_APPLY)
        self._window = window

    async def apply(self, tenant_id: str, ask: LimitRequest) -> Verdict:
        """One round trip. Raises RedisError or OSError."""
        keys = [tenant_key(tenant_id, f"limits:{part}") for part in ("requests", "tokens", "held", "leases")]
        arguments: list[bytes | int] = [msgspec.json.encode(ask), *self._window, PARALLEL_WAIT_MS]
        reply = await cast("Awaitable[list[int]]", self._script(keys=keys, args=arguments))
        is_admitted, limit, wait_ms, *rest = reply
        return Verdict(
            bool(is_admitted), LIMIT_NAMES[limit - 1] if limit else None, None if wait_ms < 0 else wait_ms, *rest
        )


@dataclass(slots=True)
class _Unknown:
    """A request that Redis has not heard of."""

    at_ms: int
    tokens: int
    is_running: bool = True


@dataclass(slots=True)
class _Account:
    """One tenant at one gateway. Whatever was admitted here is in the book, and in one of the others until it is
    settled."""

    book: LimitLedger
    running: set[str] = field(default_factory=set)
    """Requests that Redis holds, and that are not over."""
    settled: dict[str, int] = field(default_factory=dict)
    """Requests that Redis may hold, and that are over: what they used."""
    unknown: dict[str, _Unknown] = field(default_factory=dict)
    renewing: dict[str, int | None] = field(default_factory=dict)
    """Requests whose renewal is under way; a number: it ended meanwhile, and used that."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever tells Redis of the unknown ones: they must be charged once, and before anything else is admitted."""
    renewed_at_ms: int = 0
    num_asking: int = 0
    """Reservations under way, of which nothing else here knows yet."""

    @property
    def is_idle(self) -> bool:
        return self.book.is_empty and not (self.running or self.settled or self.unknown or self.num_asking)

    def has_asked(self) -> None:
        self.num_asking -= 1

    def debts(self, now_ms: int, window: Window) -> list[UnsettledUsage]:
        """The running ones one by one, the others summed up by their age."""
        over: dict[int, tuple[int, int]] = {}
        debts = []
        for request_id, unknown in self.unknown.items():
            age_ms = now_ms - unknown.at_ms
            if unknown.is_running:
                debts.append(UnsettledUsage(request_id, age_ms, 1, unknown.tokens, True))
            else:
                age = window.bucket(age_ms)
                requests, tokens = over.get(age, (0, 0))
                over[age] = requests + 1, tokens + unknown.tokens
        return [
            *debts,
            *(
                UnsettledUsage("", age * window.bucket_ms, *counts, False)
                for age, counts in over.items()
                if age <= window.num_buckets
            ),
        ]

    def has_told(self, were_running: Mapping[str, bool]) -> None:
        """Redis has now heard of these; some may have ended since."""
        for request_id, was_running in were_running.items():
            unknown = self.unknown.pop(request_id, None)
            if unknown is None:
                continue
            if was_running and unknown.is_running:
                self.running.add(request_id)
            elif was_running:
                self.settled[request_id] = unknown.tokens

    def put_back(self, settled: dict[str, int]) -> None:
        """Redis has perhaps not heard of these. Past MAX_SETTLED the oldest keep their whole reservation until it
        leaves the window."""
        self.settled = settled | self.settled
        while len(self.settled) > MAX_SETTLED:
            del self.settled[next(iter(self.settled))]

    def renew(self, now_ms: int, window: Window) -> list[str]:
        """Those under way, in the book at once; returns them for Redis. What has left the window is forgotten."""
        oldest_ms = now_ms - window.bucket_ms * (window.num_buckets + 1)
        self.unknown = {
            request_id: unknown
            for request_id, unknown in self.unknown.items()
            if unknown.is_running or unknown.at_ms > oldest_ms
        }
        under_way = [*self.running, *(request_id for request_id, unknown in self.unknown.items() if unknown.is_running)]
        self.book.apply(LimitRequest(renewed=under_way), now_ms)
        self.renewed_at_ms = now_ms
        self.renewing = dict.fromkeys(self.running)
        return [*self.running]

    def has_renewed(self) -> None:
        """Or tried to. What ended meanwhile may have been settled on another connection before it was renewed, and
        would be held again: so that is said once more. A second settlement of the same changes nothing."""
        for request_id, used_tokens in self.renewing.items():
            if used_tokens is not None:
                self.settled.setdefault(request_id, used_tokens)
        self.renewing = {}


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 10**6


class Limiter:
    """Reserves and settles for one gateway. Methods run on one event loop. now_ms: a monotonic clock."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        gateway_id: str,
        window: Window = MINUTE,
        now_ms: Callable[[], int] = _monotonic_ms,
    ) -> None:
        self._script = LimitScript(client, window)
        self._presence = client.register_script(_PRESENT)
        self._gateway_id = gateway_id
        self._window = window
        self._now_ms = now_ms
        self._accounts: dict[str, _Account] = {}
        self.num_gateways: int | None = None
        """As Redis said last."""
        self._away_until_ms: int | None = None
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._wake = asyncio.Event()
        self._late: set[asyncio.Task[Verdict]] = set()
        """Reservations whose request is gone."""

    async def reserve(self, tenant_id: str, limits: Limits, request_id: str, tokens: int) -> Verdict:
        """All of it against all limits, or nothing; what was admitted must be settled. Raises Overloaded when nobody
        can tell.

        tokens: no more than the limit; that could never fit.
        """
        account = self._accounts.get(tenant_id)
        if account is None:
            account = self._accounts[tenant_id] = _Account(LimitLedger(self._window), renewed_at_ms=self._now_ms())
        ask = LimitRequest(id=request_id, tokens=min(tokens, MAX_TOKENS), limits=limits)
        if self._is_left_alone:
            return self._alone(account, ask)
        task = asyncio.create_task(self._together(tenant_id, account, ask))
        account.num_asking += 1
        task.add_done_callback(lambda _: account.has_asked())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._late.add(task)  # it may be admitted yet
            task.add_done_callback(lambda late: self._end_late(tenant_id, request_id, late))
            raise

    def settle(self, tenant_id: str, request_id: str, used_tokens: int) -> None:
        """It is over. Unknown and settled ones are fine."""
        account = self._accounts.get(tenant_id)
        if account is None:
            return
        used_tokens = min(max(used_tokens, 0), MAX_TOKENS)
        account.book.apply(LimitRequest(settled=[Settled(request_id, used_tokens)]), self._now_ms())
        unknown = account.unknown.get(request_id)
        if unknown is not None and unknown.is_running:
            unknown.tokens, unknown.is_running = used_tokens, False
        elif request_id in account.running:
            account.running.discard(request_id)
            account.settled[request_id] = used_tokens
            if request_id in account.renewing:
                account.renewing[request_id] = used_tokens
        self._wake.set()

    async def run(self) -> None:
        """Settles, renews, and tells the others of this gateway, until cancelled; then settles what is left."""
        present_until_ms = self._now_ms()
        try:
            while True:
                if self._now_ms() >= present_until_ms and not self._is_left_alone:
                    present_until_ms = self._now_ms() + PRESENCE_MS
                    await self._be_present()
                await self._tell_all()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                await asyncio.sleep(SETTLE_S)
                self._wake.clear()
        finally:
            await self._tell_all()

    @property
    def _is_left_alone(self) -> bool:
        return self._away_until_ms is not None and self._now_ms() < self._away_until_ms

    async def _together(self, tenant_id: str, account: _Account, ask: LimitRequest) -> Verdict:
        """What Redis says, else what this gateway may say by itself."""
        assert ask.id is not None
        try:
            verdict = await self._tell(tenant_id, account, ask)
        except _AWAY as error:
            self._note(error)
            account.settled[ask.id] = 0  # Redis may hold it; if it is admitted here, it is told again
            return self._alone(account, ask)
        if verdict.is_admitted:
            account.running.add(ask.id)
            account.book.apply(LimitRequest(debts=[UnsettledUsage(ask.id, 0, 1, ask.tokens, True)]), self._now_ms())
        return verdict

    def _alone(self, account: _Account, ask: LimitRequest) -> Verdict:
        assert ask.id is not None
        if self.num_gateways is None:
            raise Overloaded("the limits of this tenant can't be checked at the moment", retry_after_s=1.0)
        verdict = account.book.apply(
            msgspec.structs.replace(ask, limits=share(ask.limits, self.num_gateways)), self._now_ms()
        )
        if verdict.is_admitted:
            account.unknown[ask.id] = _Unknown(self._now_ms(), ask.tokens)
        elif verdict.wait_ms is None:
            raise Overloaded(
                "the limits of this tenant can't be checked at the moment, and the request exceeds this gateway's share of them",
                retry_after_s=1.0,
            )
        return verdict

    async def _tell(self, tenant_id: str, account: _Account, ask: LimitRequest) -> Verdict:
        """The ask, and all that Redis has to hear before it."""
        if not account.unknown:
            return await self._apply(tenant_id, account, ask)
        async with account.lock:
            debts = account.debts(self._now_ms(), self._window)
            were_running = {request_id: unknown.is_running for request_id, unknown in account.unknown.items()}
            verdict = await self._apply(tenant_id, account, msgspec.structs.replace(ask, debts=debts))
            account.has_told(were_running)
            return verdict

    async def _apply(self, tenant_id: str, account: _Account, ask: LimitRequest) -> Verdict:
        async with self._slots:
            if self._is_left_alone:
                raise TimeoutError  # it went while this one waited
            settled, account.settled = account.settled, {}
            renewed = [
                request_id for request_id in ask.renewed if request_id in account.running
            ]  # who ended meanwhile is not
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    told = msgspec.structs.replace(
                        ask, settled=list(starmap(Settled, settled.items())), renewed=renewed
                    )
                    verdict = await self._script.apply(tenant_id, told)
            except BaseException:
                account.put_back(settled)
                raise
            self._note(None)
            return verdict

    async def _tell_all(self) -> None:
        now_ms = self._now_ms()
        for tenant_id, account in list(self._accounts.items()):
            is_due = now_ms - account.renewed_at_ms >= self._window.lease_ms // 3
            renewed = account.renew(now_ms, self._window) if is_due else []
            if is_due and account.is_idle:
                del self._accounts[tenant_id]
            elif (renewed or account.settled or account.unknown) and not self._is_left_alone:
                try:
                    await self._tell(tenant_id, account, LimitRequest(renewed=renewed))
                except _AWAY as error:
                    self._note(error)
                finally:
                    account.has_renewed()

    async def _be_present(self) -> None:
        """Counted among the gateways, and told how many there are."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await cast(
                    "Awaitable[int]", self._presence(keys=[_GATEWAYS], args=[self._gateway_id, PRESENCE_LEASE_MS])
                )
        except _AWAY as error:
            self._note(error)
            return
        self.num_gateways = max(1, reply)
        self._note(None)

    def _end_late(self, tenant_id: str, request_id: str, task: asyncio.Task[Verdict]) -> None:
        self._late.discard(task)
        if not task.cancelled() and task.exception() is None and task.result().is_admitted:
            self.settle(tenant_id, request_id, 0)

    def _note(self, error: BaseException | None) -> None:
        """A line in the log when Redis goes and when it is back."""
        was_away = self._away_until_ms is not None
        self._away_until_ms = None if error is None else self._now_ms() + AWAY_MS
        if was_away != (error is not None):
            log.warning(
                "limits_alone" if error is not None else "limits_together",
                extra={"cause": type(error).__name__, "gateways": self.num_gateways},
            )
