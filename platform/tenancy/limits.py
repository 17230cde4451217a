"""A gateway's reservations against its tenants' limits and budgets: one round trip to Redis per request, all or none.

The counting is `limit_script`'s while Redis answers. What is over is settled with what it used, together with the
tenant's next request or `SETTLE_S` later.

While Redis is away, a gateway goes on by a ledger of its own, which holds what it has admitted itself, within its share
of the limits: the limit divided by the gateways that were there last. So one gateway never exceeds a limit. Of several,
each may find that it has its share left in the first window, whatever the others had given out before; from then on
they stay below the limit together. What was admitted meanwhile is charged to Redis when that is back. A gateway that
has never learned how many there are refuses. Of a budget a gateway gives out what it has set aside in Redis before, and
no more, and that for as long as Redis holds it (`charges`): so a budget holds while Redis is away, too. Redis keeps the
ledger as it keeps its writes: what an asynchronous failover, or a power failure, loses of the last second is not
counted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from itertools import starmap

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.base.answers import answer_within
from penstock.tenancy.account import MAX_SETTLED, Account, UnreportedRequest
from penstock.tenancy.charges import BudgetRequest, Charges
from penstock.tenancy.limit_script import GatewayScript, LimitScript
from penstock.tenancy.tariffs import MAX_NANO
from penstock.tenancy.tenants import Limits
from penstock.tenancy.window import (
    MINUTE,
    LimitLedger,
    LimitRequest,
    Settled,
    UnsettledUsage,
    Verdict,
    Window,
    share_limits,
)
from penstock.wire.errors import Overloaded

TIMEOUT_S = 0.5
"""Timeout of one round trip to Redis."""
MAX_AT_ONCE = 16
"""Round trips under way; more wait for their turn, so that a burst is not taken for a Redis that does not answer."""
UNAVAILABLE_MS = 500
"""How long Redis is left alone once a round trip has failed."""
SETTLE_S = 0.05
"""Pause before settlements go out by themselves. A tenant's next request at the same gateway takes them along sooner;
this is for the other gateways."""
TICK_S = 1.0
"""Longest pause between two checks of which leases to renew."""
PRESENCE_MS = 2000
"""Pause between two registrations of this gateway."""
MAX_TOKENS = 2**40
"""Most tokens of one request, reserved or used. The script counts exactly up to 2**53, and a sum beyond it would fail
the whole call."""
_UNAVAILABLE = (RedisError, OSError, TimeoutError)

log = logging.getLogger(__name__)


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
        self._gateways = GatewayScript(client, gateway_id)
        self._aside_id = f"aside:{gateway_id}"
        self._window = window
        self._now_ms = now_ms
        self._accounts: dict[str, Account] = {}
        self.num_gateways: int | None = None
        """How many gateways Redis counted last; None: it has not answered yet."""
        self._unavailable_until_ms: int | None = None
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._wake = asyncio.Event()
        self._abandoned: set[asyncio.Task[Verdict]] = set()
        """Reservations under way whose caller is gone."""
        self._is_running = False
        self._untold: list[asyncio.Future[bool]] = []
        """Callers that wait until Redis has been told of all charges."""

    async def reserve(
        self,
        tenant_id: str,
        limits: Limits,
        request_id: str,
        tokens: int,
        sequences: int = 1,
        nano: int = 0,
        *,
        is_full: bool = False,
    ) -> Verdict:
        """Charge a request to all limits and the budget, or to none; what was admitted must be settled. Raises
        Overloaded when Redis is away and this gateway can't decide alone.

        tokens: most tokens that the request may use; sequences: its prompts times its choices, 0 where it generates
        nothing. More of them than the limit can never be admitted. nano: most that it may be charged. is_full: all of
        that stays charged if this gateway dies; else what was noted last.
        """
        account = self._accounts.get(tenant_id)
        if account is None:
            account = self._accounts[tenant_id] = Account(
                LimitLedger(self._window), Charges(self._aside_id), renewed_at_ms=self._now_ms()
            )
        account.charges.limit_nano = limits.budget_nano
        request = LimitRequest(
            id=request_id,
            tokens=min(tokens, MAX_TOKENS),
            sequences=sequences,
            limits=limits,
            budget=BudgetRequest(nano=min(nano, MAX_NANO), is_full=is_full),
        )
        if self._is_unavailable:
            return self._reserve_alone(account, request)
        task = asyncio.create_task(self._reserve(tenant_id, account, request))
        account.num_reserving += 1
        task.add_done_callback(lambda _: account.end_reservation())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._abandoned.add(task)  # it may be admitted yet
            task.add_done_callback(lambda ended: self._end_abandoned(tenant_id, request_id, ended))
            raise

    def note(self, tenant_id: str, request_id: str, charged_nano: int) -> None:
        """A running request is charged so much by now: what stays of its reservation if this gateway dies."""
        account = self._accounts.get(tenant_id)
        if account is not None:
            account.charges.note(request_id, min(max(charged_nano, 0), MAX_NANO))

    def settle(self, tenant_id: str, request_id: str, used_tokens: int, charged_nano: int = 0) -> None:
        """A request is over, used so many tokens, and is charged so much. Unknown and settled requests are ignored."""
        account = self._accounts.get(tenant_id)
        if account is None:
            return
        used_tokens = min(max(used_tokens, 0), MAX_TOKENS)
        account.ledger.apply(LimitRequest(settled=[Settled(request_id, used_tokens)]), self._now_ms())
        account.settle(request_id, used_tokens)
        account.charges.settle(request_id, min(max(charged_nano, 0), MAX_NANO))
        self._wake.set()

    def list_budgets(self) -> list[tuple[str, int, int]]:
        """Tenants that were asked about lately and have a budget, each with what is spent of it this month, as this
        gateway knows it, and the budget."""
        return [
            (tenant_id, account.charges.spent_nano, account.charges.limit_nano)
            for tenant_id, account in self._accounts.items()
            if account.charges.limit_nano is not None
        ]

    async def read_spent(self, tenant_id: str, month: str) -> int:
        """Sum that a tenant with a budget is charged in a month such as 2026-11, reservations included. Raises
        Overloaded when Redis is away."""
        try:
            async with answer_within(TIMEOUT_S):
                return await self._script.read_spent(tenant_id, month)
        except _UNAVAILABLE as error:
            raise Overloaded("budgets can't be read at the moment", retry_after_s=1.0) from error

    async def run(self) -> None:
        """Settles, renews leases and registers this gateway, until cancelled; then settles what is left."""
        register_at_ms = self._now_ms()
        self._is_running = True
        try:
            while True:
                if self._now_ms() >= register_at_ms and not self._is_unavailable:
                    register_at_ms = self._now_ms() + PRESENCE_MS
                    await self._register_gateway()
                waiting = len(self._untold)
                is_told = await self._report_all(tells_charges=waiting > 0)
                self._answer_untold(waiting, is_told=is_told)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                await asyncio.sleep(SETTLE_S)
                self._wake.clear()
        finally:
            self._is_running = False
            is_told = await self._report_all(is_last=True)
            self._answer_untold(len(self._untold), is_told=is_told)

    async def tell_charges(self) -> bool:
        """Tell Redis of all that was noted and settled of budgets until now. Returns False if Redis is away. Whoever
        writes usage does it behind this: so of a gateway that is killed the budget has no less than the usage."""
        if not self._is_running or not any(account.charges.has_budget for account in self._accounts.values()):
            return True
        told = asyncio.get_running_loop().create_future()
        self._untold.append(told)
        self._wake.set()
        return bool(await told)

    def _answer_untold(self, count: int, *, is_told: bool) -> None:
        waiting, self._untold = self._untold[:count], self._untold[count:]
        for each in waiting:
            if not each.done():
                each.set_result(is_told)

    @property
    def _is_unavailable(self) -> bool:
        """Whether Redis is left alone because a round trip has just failed."""
        return self._unavailable_until_ms is not None and self._now_ms() < self._unavailable_until_ms

    async def _reserve(self, tenant_id: str, account: Account, request: LimitRequest) -> Verdict:
        """Redis's verdict, or this gateway's own where Redis does not answer."""
        assert request.id is not None
        assert request.budget is not None
        try:
            verdict = await self._report(tenant_id, account, request)
            if verdict.limit == "budget" and account.charges.aside_nano:
                verdict = await self._report(tenant_id, account, request, aside_nano=0)
        except _UNAVAILABLE as error:
            self._note(error)
            account.settled[request.id] = 0  # Redis may hold it; if it is admitted here, it is reported again
            account.charges.doubt(request.id)
            return self._reserve_alone(account, request)
        if verdict.is_admitted:
            account.running.add(request.id)
            account.charges.begin(request.id, request.budget.nano, is_full=request.budget.is_full)
            admitted = UnsettledUsage(request.id, 0, 1, request.tokens, True, request.sequences)
            account.ledger.apply(LimitRequest(unsettled=[admitted]), self._now_ms())
        return verdict

    def _reserve_alone(self, account: Account, request: LimitRequest) -> Verdict:
        assert request.id is not None
        assert request.budget is not None
        if self.num_gateways is None:
            raise Overloaded("the limits of this tenant can't be checked at the moment", retry_after_s=1.0)
        now_ms = self._now_ms()
        if not account.charges.may_begin_alone(request.budget.nano, now_ms):
            raise Overloaded(
                "the budget of this tenant can't be checked at the moment, and the request exceeds what this gateway"
                " still has set aside of it",
                retry_after_s=1.0,
            )
        limits = share_limits(request.limits, self.num_gateways)
        verdict = account.ledger.apply(msgspec.structs.replace(request, limits=limits), now_ms)
        if verdict.is_admitted:
            account.unreported[request.id] = UnreportedRequest(now_ms, request.tokens, sequences=request.sequences)
            account.charges.begin_alone(request.id, request.budget.nano, now_ms, is_full=request.budget.is_full)
        elif verdict.wait_ms is None:
            raise Overloaded(
                "the limits of this tenant can't be checked at the moment, and the request exceeds this gateway's share"
                " of them",
                retry_after_s=1.0,
            )
        return verdict

    async def _report(
        self, tenant_id: str, account: Account, request: LimitRequest, aside_nano: int | None = None
    ) -> Verdict:
        """Send a request to Redis, behind everything that Redis does not know yet. aside_nano: what to set aside; None:
        what there is, less what was given out of it."""
        charges = account.charges
        if aside_nano is None and not account.unreported and not charges.alone:
            return await self._apply(tenant_id, account, request)
        async with account.lock:
            now_ms = self._now_ms()
            unsettled = account.list_unsettled(now_ms, self._window)
            were_running = {request_id: unreported.is_running for request_id, unreported in account.unreported.items()}
            charged = charges.list_unsettled(now_ms)
            budget = request.budget or BudgetRequest()
            if charged or aside_nano is not None:
                aside = charges.ask_aside(charges.aside_nano if aside_nano is None else aside_nano, charged)
                budget = msgspec.structs.replace(budget, aside=aside, unsettled=charged)
            request = msgspec.structs.replace(request, unsettled=unsettled, budget=budget)
            verdict = await self._apply(tenant_id, account, request)
            account.mark_reported(were_running)
            charges.mark_reported(charged)
            if budget.aside is not None:
                charges.confirm_aside(verdict.aside_nano, now_ms, self._window.lease_ms)
            return verdict

    async def _apply(self, tenant_id: str, account: Account, request: LimitRequest) -> Verdict:
        async with self._slots:
            if self._is_unavailable:
                raise TimeoutError  # it went while this one waited
            settled, account.settled = account.settled, {}
            renewed = [request_id for request_id in request.renewed if request_id in account.running]  # not the ended
            owing = account.charges.take(request.budget, renewed)
            request = msgspec.structs.replace(
                request, settled=list(starmap(Settled, settled.items())), renewed=renewed, budget=owing
            )
            try:
                async with answer_within(TIMEOUT_S):
                    verdict = await self._script.apply(tenant_id, request)
            except BaseException:
                account.put_back(settled)
                if owing is not None:
                    account.charges.put_back(owing, MAX_SETTLED)
                raise
            self._note(None)
            if owing is not None:
                account.charges.spent_nano = verdict.spent_nano
            return verdict

    async def _report_all(self, *, is_last: bool = False, tells_charges: bool = False) -> bool:
        """Send what each account has for Redis, renew leases that are due, and forget idle accounts. Returns whether
        all was sent. is_last: nothing stays set aside. tells_charges: leases are renewed of whatever has a charge that
        Redis does not know."""
        now_ms, is_sent = self._now_ms(), True
        for tenant_id, account in list(self._accounts.items()):
            is_due = is_last or now_ms - account.renewed_at_ms >= self._window.lease_ms // 3
            untold = account.charges.list_untold() if tells_charges else ()
            renewed = account.renew(now_ms, self._window) if is_due else account.begin_renewal(untold)
            has_news = account.settled or account.unreported or account.charges.has_news
            if is_due and account.is_idle:
                del self._accounts[tenant_id]
                continue
            aside_nano = None
            if account.charges.has_budget and (is_due or not account.charges.has_asked):
                has_ended = is_last or account.ledger.is_empty
                aside_nano = 0 if has_ended else account.charges.wanted_aside(self.num_gateways or 1)
            if renewed or has_news or aside_nano is not None:
                is_sent &= await self._report_account(tenant_id, account, renewed, aside_nano)
        return is_sent

    async def _report_account(
        self, tenant_id: str, account: Account, renewed: list[str], aside_nano: int | None
    ) -> bool:
        if self._is_unavailable:
            return False
        try:
            await self._report(tenant_id, account, LimitRequest(renewed=renewed), aside_nano)
        except _UNAVAILABLE as error:
            self._note(error)
            return False
        finally:
            account.end_renewal()
        return True

    async def _register_gateway(self) -> None:
        try:
            async with answer_within(TIMEOUT_S):
                self.num_gateways = await self._gateways.register()
        except _UNAVAILABLE as error:
            self._note(error)
            return
        self._note(None)

    def _end_abandoned(self, tenant_id: str, request_id: str, task: asyncio.Task[Verdict]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled() and task.exception() is None and task.result().is_admitted:
            self.settle(tenant_id, request_id, 0)

    def _note(self, error: BaseException | None) -> None:
        """Write a line to the log when Redis goes away and when it is back."""
        was_unavailable = self._unavailable_until_ms is not None
        self._unavailable_until_ms = None if error is None else self._now_ms() + UNAVAILABLE_MS
        if was_unavailable != (error is not None):
            log.warning(
                "limits_alone" if error is not None else "limits_together",
                extra={"cause": type(error).__name__, "gateways": self.num_gateways},
            )
