"""Dispatch: places each request on a replica, and on another one when the first is lost or refuses.

Not HTTP, not the choice itself (policy), not the wait (queue), not the deltas on their way (mailbox). Before its first
token a request is simply submitted again; after it, with the output so far behind the prompt, and since seed and noise
belong to the position, the answer goes on as if nothing had happened. Invariants: nobody else writes a request's
state or receipt; a request is on at most one replica; when `start` raises, or a stream is closed, nothing of it is left
in the queue, on a replica or in a timer.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from types import MappingProxyType

import msgspec

from penstock.base.errors import PenstockError
from penstock.base.metrics import Metrics
from penstock.prefix.index import PrefixIndex
from penstock.router.config import GatewayConfig, PoolSpec
from penstock.router.dispatch.attempt import AttemptResult
from penstock.router.dispatch.holds import Holds, never_known
from penstock.router.dispatch.lane import Claim, Lane
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.obstruction import Obstructions
from penstock.router.dispatch.output_lengths import OutputLengths
from penstock.router.dispatch.overdue import SHARED_PART, SLACK_PART, is_late
from penstock.router.dispatch.placement_counts import PlacementCounts
from penstock.router.dispatch.quarantine import MAX_LOSSES, Loss, Quarantine
from penstock.router.dispatch.receipt import fill_receipt
from penstock.router.dispatch.route_states import RouteReader, RouteState, find_unread, raise_if_hopeless
from penstock.router.dispatch.shares.charges import Charges, Expected
from penstock.router.dispatch.shares.place_shares import PlaceShares
from penstock.router.dispatch.spans import make_stream_trace
from penstock.router.dispatch.state import ObstructedRoute, Obstruction, ProviderReservation, RequestState
from penstock.router.dispatch.submission import Submitter
from penstock.router.dispatch.trials import DEADLINE_PART, LONGEST_S, Trials
from penstock.router.dispatch.waiting import WaitQueue
from penstock.router.providers.provider import Provider
from penstock.router.replicas.adapter_prefetch import AdapterPrefetch
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.routing_policy import RoutingPolicy
from penstock.router.routing.chains import Chains, RequestChains
from penstock.router.routing.policy import Decision
from penstock.router.routing.request import Generation, HoldListener, LazyPrompt, Receipt, Route, TextDelta
from penstock.router.routing.reserved import Caps
from penstock.router.routing.search import IN_ARRAYS, Searching
from penstock.router.routing.tiers import UNFORCED, RouteForecast, TierReason, decide
from penstock.wire.accounts import PlacePrices
from penstock.wire.errors import (
    CapReached,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    NoPlace,
    Overloaded,
    ReplicaLost,
)
from penstock.wire.frames import Delta, Finish

MAX_ATTEMPTS = 4
"""Replicas tried for one answer, the first included."""
TICK_S = 0.001
"""Time by which a timer may be early."""
DEADLINE_GRACE_S = 1.0
"""The replica ends a sequence at its deadline; this much later the router does it without it."""


class RoutingDispatcher:
    """The `penstock.router.routing.request.Dispatcher`. `now` is Unix time; `clock` is monotonic; both in seconds."""

    def __init__(
        self,
        pools: Mapping[str, PoolSpec],
        fleet: Fleet,
        index: PrefixIndex,
        queue: WaitQueue,
        charges: Charges,
        chains: Chains,
        config: GatewayConfig,
        metrics: Metrics,
        random: Random,
        providers: Mapping[str, Provider] = MappingProxyType({}),
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        ready_in_s: Callable[[str], float | None] = never_known,
        searching: Searching = IN_ARRAYS,
        routing: RoutingPolicy | None = None,
        caps: Caps | None = None,
    ) -> None:
        """ready_in_s: seconds until the first replica of a pool should be there; None: nobody knows. routing: another
        choice of a replica than production's; None: production's. caps: on what providers may cost; None: there are
        none."""
        self._holds = Holds(pools, fleet, config, random, ready_in_s)
        self._pools = pools
        self._queue = queue
        self._charges = charges
        self._is_fair = config.fairness == "vtc"
        self._chains = chains
        self._max_buffered_deltas = config.max_buffered_deltas
        self._ttft_target_s = config.ttft_target_s
        self._has_overdue = config.overdue == "last"
        self._metrics = metrics
        self._submitter = Submitter(index, providers, clock, now, is_fair=self._is_fair)
        self._clock = clock
        self._lengths = OutputLengths()
        self._places = PlaceShares(config.reserved_places)
        self._route_reader = RouteReader(
            fleet,
            index,
            providers,
            self._lengths,
            random,
            clock,
            self._may_overdraw,
            self._is_yielded_to,
            searching,
            routing,
            pools,
        )
        self._obstructions = Obstructions(fleet, index, self._route_reader, self._may_overdraw, clock)
        self._prefetch = AdapterPrefetch(fleet.ready_clients, clock)
        self._quarantine = Quarantine()
        self._trials = Trials()
        self._arrivals = itertools.count()
        self._counts = PlacementCounts(metrics)
        self._paced_classes = {name: pool.paced_classes for name, pool in pools.items()}
        self._prices = {
            **{name: PlacePrices(place=name, per_hour=pool.price_per_hour) for name, pool in pools.items()},
            **{name: provider.prices for name, provider in providers.items()},
        }
        self._caps = caps

    async def start(self, generation: Generation, listener: HoldListener | None = None) -> Mailbox:
        """Raises RateLimited, Overloaded, DeadlineExceeded, ContextTooLong where no replica's context holds the prompt,
        or a provider's refusal of the request itself."""
        mailbox = Mailbox(self._new_state(generation, listener), self, self._max_buffered_deltas)
        try:
            await self._place(mailbox)
        except BaseException:
            mailbox.close()
            raise
        return mailbox

    def _new_state(self, generation: Generation, listener: HoldListener | None) -> RequestState:
        receipt = Receipt(generation.request_id, stays=generation.tier_rule.stays)
        return RequestState(
            generation=generation,
            arrival=next(self._arrivals),
            begun_s=self._clock(),
            receipt=receipt,
            trace=make_stream_trace(generation, receipt),
            chains=RequestChains(self._chains, generation.salt, generation.adapter),
            hold_listener=listener,
            may_be_overdue=self._has_overdue,
            tokenized=generation.tokenized,
        )

    # placing

    async def _place(self, mailbox: Mailbox) -> None:
        """Find a carrier, waiting for one if need be, and submit prompt and output so far."""
        state = mailbox.state
        began = self._clock()
        adapter_tenant = "" if state.generation.adapter is None else state.generation.tenant
        lane = Lane(self._lane_pools(state), frozenset(state.refused_by), adapter_tenant, state.goes_alone)
        try:
            while (result := await self._admit(mailbox, lane)).must_prepare:
                if result is AttemptResult.NEEDS_RESERVATION:
                    await self._reserve(state)
                for prompt in state.unread_prompts:
                    await prompt.load()
                # one that comes back to a lane is not tried before the next wake
                asyncio.get_running_loop().call_soon(self._queue.wake, lane.pools[0])
        finally:
            _release(state)
            state.receipt.queued_s += self._clock() - began
            if state.trace is not None:
                state.trace.record_wait(began, self._clock(), sys.exception())

    async def _reserve(self, state: RequestState) -> None:
        """Reserve what the provider that was chosen may cost, or note why that can't be."""
        assert self._caps is not None
        _release(state)
        provider, tokenized = state.wanted_provider, state.generation.tokenized
        try:
            reservation = await self._caps.reserve(
                provider,
                state.generation.request_id,
                tokenized.num_prompt_tokens,
                tokenized.sampling.max_tokens,
            )
        except (CapReached, Overloaded) as refusal:
            state.cap_refusals[provider] = refusal
        else:
            state.reservation = ProviderReservation(provider, reservation)

    def _must_reserve(self, state: RequestState, provider: str | None) -> bool:
        """Whether a provider can't be asked before what it may cost is reserved."""
        if provider is None or self._caps is None or not self._caps.has(provider):
            return False
        return state.reservation is None or state.reservation.provider != provider

    async def _admit(self, mailbox: Mailbox, lane: Lane) -> AttemptResult:
        state = mailbox.state
        generation = state.generation
        seconds_left = generation.deadline - self._clock()
        if seconds_left <= 0:
            raise DeadlineExceeded("the request's deadline has passed")
        claim = Claim(state.arrival)
        if self._is_fair:
            claim = Claim(state.arrival, generation.account, generation.share, bool(state.output), generation.priority)
        hold = None
        if not self._route_reader.has_provider(state, self._open_routes(state)):
            hold = self._holds.find(lane.pools, generation.account, state.hold_listener, has_begun=bool(state.output))
        state.is_overdue, state.is_held = False, hold is not None
        if hold is not None:
            state.may_be_overdue = False
        attempt, may_help = partial(self._try_place, mailbox), partial(self._may_help, mailbox)
        return await self._queue.admit(
            lane,
            attempt,
            claim,
            deadline_in_s=seconds_left,
            may_help=may_help,
            hold=hold,
            on_wait=partial(self._prefetch_adapter, generation, lane),
        )

    def _prefetch_adapter(self, generation: Generation, lane: Lane) -> None:
        """Have the adapter of a request that must wait loaded meanwhile."""
        if generation.adapter is not None:
            self._prefetch.ask(lane.pools, generation.adapter, generation.tenant)

    def _try_place(self, mailbox: Mailbox) -> AttemptResult:
        """Choose a route and submit the request, without waiting. Returns NEEDS_TOKENIZATION if `state.unread_prompts`
        must be tokenized first."""
        if mailbox.is_closed:
            return AttemptResult.CLOSED
        state = mailbox.state
        began = self._clock()
        routes = self._open_routes(state)
        route_states: list[RouteState] = []
        unread: list[LazyPrompt] = []
        forecasts = self._forecasts(state, routes, route_states, unread)
        # overdue, it goes only where hardly a prompt is before it, in whichever of its tiers that is
        target_s = (SLACK_PART if state.is_overdue else 1.0) * self._target_s(state)
        choice = decide(forecasts, target_s, state.generation.skipped, by_cost=state.generation.tier_rule.goes_by_cost)
        state.unread_prompts, state.obstruction = unread, None
        if unread:
            return AttemptResult.NEEDS_TOKENIZATION
        if choice.route is None:
            raise_if_hopeless(state, route_states)
            if state.generation.skipped is TierReason.ESCALATED:
                self._raise_if_away(state, route_states)
            state.obstruction = self._obstructions.describe_full(state, route_states)
            return AttemptResult.MUST_WAIT
        is_only = len(routes) == 1 and choice.reason in UNFORCED
        reason = TierReason.ONLY_TIER if is_only else choice.reason
        chosen = route_states[choice.route]
        if state.goes_alone and chosen.route.provider is None and self._is_held_up(state):
            return AttemptResult.MUST_WAIT
        if self._must_leave(state, chosen):
            if len(routes) == 1:
                kept = ObstructedRoute(chosen.route, chosen.tokenized, is_below_share=False)
                state.obstruction = Obstruction((kept,), is_kept=True)
            return AttemptResult.MUST_WAIT
        if state.may_be_overdue and chosen.decision is not None:
            result = self._let_others_first(state, chosen, chosen.decision)
            if result is not None:
                return result
        if self._must_reserve(state, chosen.route.provider):
            state.wanted_provider = chosen.route.provider or ""
            return AttemptResult.NEEDS_RESERVATION
        self._submit(mailbox, chosen)
        state.may_be_overdue = False
        if route_states[0].forecast.obstacle is TierReason.TIER_DOWN:
            self._holds.note_passed(route_states[0].route.pools)
        fill_receipt(state.receipt, state.generation, chosen, route_states, reason, self._pools)
        state.receipt.placed_s = began
        self._counts.count(state.receipt, reason, is_resumed=bool(state.output))
        if state.trace is not None:
            state.trace.record_route(began, self._clock())
        return AttemptResult.PLACED

    def _is_held_up(self, state: RequestState) -> bool:
        """Whether another request that may have been why a replica was lost is still without a token."""
        pools = self._lane_pools(state)
        if not self._trials.must_wait(pools, state.losses):
            return False
        now_s = self._clock()
        if state.alone_until_s is None:
            longest_s = min(LONGEST_S, DEADLINE_PART * (state.generation.deadline - now_s))
            state.alone_until_s = now_s + longest_s
            asyncio.get_running_loop().call_later(longest_s + TICK_S, self._queue.wake, pools[0])
        return now_s < state.alone_until_s

    def _end_trial(self, state: RequestState) -> None:
        pools = self._trials.end(state.losses)
        if pools is not None:
            asyncio.get_running_loop().call_soon(self._queue.wake, pools[0])

    def _raise_if_away(self, state: RequestState, route_states: Sequence[RouteState]) -> None:
        """An escalated request has an answer already: it waits for a place, but not for a tier that is gone."""
        obstacles = [route.forecast.obstacle for route in route_states]
        if state.output or TierReason.TIER_FULL in obstacles:
            return
        for route in route_states:
            if route.forecast.obstacle is TierReason.TIER_DOWN:
                self._holds.note_passed(route.route.pools)
        reason = next(obstacle for obstacle in obstacles if obstacle is not None)
        raise NoPlace("nothing that an escalated request may be sent to can take it now", reason.value)

    def _may_help(self, mailbox: Mailbox, replica_id: str) -> bool:
        """Whether a change at a replica may end a request's wait."""
        must_leave = partial(self._must_leave, mailbox.state)
        return mailbox.is_closed or self._obstructions.may_help(mailbox.state, replica_id, must_leave)

    def _must_leave(self, state: RequestState, chosen: RouteState | ObstructedRoute) -> bool:
        """Whether the places that are free are kept for other tenants."""
        if state.output or chosen.route.provider is not None or not self._is_fair:
            return False
        tenant = self._ask(state)
        if not self._places.are_kept:
            return False
        places = self._route_reader.count_places(state, chosen.route, chosen.tokenized)
        return self._places.must_leave(tenant, self._charges.num_live(tenant), *places)

    def _may_overdraw(self, state: RequestState, num_places: int) -> bool:
        """Whether the request may be placed where no place is free."""
        if not self._is_fair:
            return False
        tenant = self._ask(state)
        return self._places.is_below(tenant, self._charges.num_live(tenant), num_places)

    def _is_yielded_to(self, state: RequestState, route: Route) -> bool:
        """Whether batch rows yield to a request at the replicas of a route."""
        service_class = state.generation.share.service_class
        return any(service_class in self._paced_classes[name] for name in route.pools)

    def _let_others_first(self, state: RequestState, chosen: RouteState, decision: Decision) -> AttemptResult | None:
        """What comes of an attempt that has found a replica where the first token would come too late. Returns None
        where it does not."""
        if state.is_overdue:
            return AttemptResult.MUST_WAIT if is_late(decision, 0.0, SLACK_PART * self._target_s(state)) else None
        tenant = state.generation.account
        is_shared = False
        if self._places.are_kept:
            _, num_places = self._route_reader.count_places(state, chosen.route, chosen.tokenized)
            is_shared = self._places.has_share(tenant, self._charges.num_live(tenant), num_places)
        bound_s = (SHARED_PART if is_shared else 1.0) * self._target_s(state)
        state.is_overdue = is_late(decision, self._clock() - state.begun_s, bound_s)
        return AttemptResult.OVERDUE if state.is_overdue else None

    def _target_s(self, state: RequestState) -> float:
        """Target of the request's time to first token, seconds."""
        target_s = state.generation.ttft_target_s
        return self._ttft_target_s if target_s is None else target_s

    def _ask(self, state: RequestState) -> str:
        """Note that the request's tenant wants a place; returns the tenant."""
        tenant = state.generation.account
        self._places.ask(tenant, state.generation.share.rate, self._clock())
        return tenant

    def _open_routes(self, state: RequestState) -> Sequence[Route]:
        """Routes that may answer; once there is a first token, only those to the same model."""
        generation = state.generation
        if not generation.routes:
            return (Route(self._pools[generation.pools[0]].tier, generation.pools),)
        if not state.output:
            return generation.routes
        return [route for route in generation.routes if route.provider is None and route.model == state.model_index]

    def _lane_pools(self, state: RequestState) -> tuple[str, ...]:
        """Pools of the request's lane. An answer that has begun may not hold up those that still may go elsewhere."""
        if not state.output:
            return tuple(sorted(state.generation.pools))
        return tuple(sorted(pool for route in self._open_routes(state) for pool in route.pools))

    def _forecasts(
        self, state: RequestState, routes: Sequence[Route], route_states: list[RouteState], unread: list[LazyPrompt]
    ) -> Iterator[RouteForecast]:
        """Forecast of one route after the other, each read only when the decision comes to it.

        Fills `route_states`, in the order of the forecasts, and `unread`: prompts whose routes have no forecast yet.
        """
        for route in routes:
            prompt = find_unread(state.generation, route)
            if prompt is not None:
                unread.append(prompt)
                continue
            route_states.append(self._route_reader.read(state, route))
            yield route_states[-1].forecast

    # submitting

    def _submit(self, mailbox: Mailbox, chosen: RouteState) -> None:
        state = mailbox.state
        state.tokenized, state.model_index = chosen.tokenized, chosen.route.model
        mailbox.begin_spending(self._prices[chosen.place])
        submission = self._submitter.submit(mailbox, chosen)
        state.carrier, state.sid, state.is_text = submission.carrier, submission.sid, submission.is_text
        if submission.is_text:
            state.reservation = None  # the provider settles it
        elif state.goes_alone:
            self._trials.begin(self._lane_pools(state), state.losses)
        generation, num_output_tokens = state.generation, self._route_reader.expect_output(state, chosen.tokenized)
        expected = Expected(state.num_tokens(chosen.tokenized), submission.num_cached_tokens, num_output_tokens)
        self._charges.begin(state.arrival, generation.account, generation.share, expected, mailbox)
        if state.deadline_timer is None:
            seconds_left = state.generation.deadline - self._clock()
            state.deadline_timer = asyncio.get_running_loop().call_later(
                seconds_left + DEADLINE_GRACE_S, self._expire, mailbox
            )

    # what becomes of an attempt: called by the mailbox

    def on_delta(self, mailbox: Mailbox, delta: Delta) -> Delta | None:
        """Update the request's state with a delta that the reader takes. Returns the delta that the reader gets, or
        None if this was only the end of an attempt."""
        state = mailbox.state
        num_cached_tokens = delta.num_cached_tokens
        if state.goes_alone:
            self._end_trial(state)
        if num_cached_tokens is not None:
            if state.has_begun:  # the reader gets the number once, from the first replica that answered
                delta = msgspec.structs.replace(delta, num_cached_tokens=None)
            else:
                state.has_begun = True
                state.receipt.cached_tokens = num_cached_tokens
        if state.trace is not None:
            state.trace.record_delta(delta)
        if isinstance(delta, TextDelta):
            state.num_text_tokens += delta.num_tokens
        state.num_beam_tokens = max(state.num_beam_tokens, delta.num_beam_tokens)
        if delta.finish is None:
            return delta
        state.carrier = None
        if delta.finish is Finish.STOP or delta.finish is Finish.LENGTH:
            state.is_finished = True
            if isinstance(delta, TextDelta):
                state.receipt.num_prompt_tokens = delta.num_prompt_tokens
            num_tokens = len(mailbox.delivered) or state.num_text_tokens
            if num_tokens:
                self._lengths.learn(state.generation.pools, num_tokens)
            return delta
        self._end_attempt(mailbox, delta.finish, delta.error)
        return msgspec.structs.replace(delta, finish=None, error=None) if delta.token_ids else None

    def on_end(self, mailbox: Mailbox, finish: Finish) -> None:
        self._charges.end(mailbox.state.arrival, is_refused=finish is Finish.REFUSED)

    def on_lost(self, mailbox: Mailbox, *, is_planned: bool) -> None:
        state = mailbox.state
        if not is_planned:
            loss = Loss(mailbox.num_received_tokens, has_token=mailbox.num_computed_tokens > 0)
            self._quarantine.note_loss(state.receipt.replica, state.losses, loss)
            asyncio.get_running_loop().call_soon(self._quarantine.judge)  # when all of the replica are noted
        self._end_trial(state)
        self._charges.end(state.arrival)
        _detach(state)

    def on_refused(self, mailbox: Mailbox, error: PenstockError) -> None:
        state = mailbox.state
        self._trace_attempt(mailbox, error)
        self._charges.end(state.arrival, is_refused=True)
        state.refused_by.add(state.receipt.replica)
        state.refusal = error
        _detach(state)

    def on_broken(self, mailbox: Mailbox, error: PenstockError) -> None:
        """Fail: a provider's text has no tokens with which a replica could go on."""
        self._trace_attempt(mailbox, error)
        mailbox.state.carrier = None
        self.fail(mailbox, error)

    def on_overflow(self, mailbox: Mailbox) -> None:
        self._metrics.slow_clients.inc()
        self.fail(
            mailbox, Overloaded(f"the answer was aborted: {self._max_buffered_deltas} parts of it wait to be read")
        )

    def on_closed(self, mailbox: Mailbox) -> None:
        state = mailbox.state
        self._trace_attempt(mailbox)
        self._abort(state)
        if state.deadline_timer is not None:
            state.deadline_timer.cancel()

    def fail(self, mailbox: Mailbox, error: PenstockError) -> None:
        """Abort the request. The reader still gets the deltas that have come, and then the error."""
        state = mailbox.state
        if state.error is None and not state.is_finished:
            state.error = error
        self._abort(state)
        mailbox.wake()

    async def resume(self, mailbox: Mailbox) -> None:
        """Place the request on another replica, from the last token delivered."""
        state = mailbox.state
        sampling = state.tokenized.sampling
        if len(mailbox.delivered) >= sampling.max_tokens and (mailbox.delivered or sampling.prompt_logprobs is None):
            spent_s = mailbox.spending.step_s
            mailbox.push(Delta(state.sid, [], finish=Finish.LENGTH, step_s=spent_s))  # only its end got lost
            return
        self._quarantine.judge()
        try:
            if state.losses.is_quarantined:
                raise EngineFault(
                    f"request {state.generation.request_id} ran on {MAX_LOSSES} replicas when they were lost;"
                    " it is not tried on another one"
                )
            if state.receipt.attempts >= MAX_ATTEMPTS:
                raise ReplicaLost(f"{state.receipt.attempts} replicas were tried, and none finished the answer")
            self._trace_attempt(mailbox)
            state.receipt.attempts += 1
            state.output = tuple(mailbox.delivered)
            state.goes_alone = state.losses.lacks_token(mailbox.num_received_tokens)
            state.alone_until_s = None
            await self._place(mailbox)
        except Overloaded as error:
            if not state.output:
                self.fail(mailbox, error)
            else:
                self.fail(
                    mailbox, ReplicaLost("the replica was lost, and no other could go on with the answer in time")
                )
        except PenstockError as error:
            self.fail(mailbox, error)

    def _end_attempt(self, mailbox: Mailbox, finish: Finish, error: str | None) -> None:
        """End an attempt that a replica ended without finishing the answer. Some ends are final; after the others
        another replica continues."""
        state = mailbox.state
        # a sequence that fails alone fails by what its request wants: it has used what was computed
        state.receipt.is_taken = finish in (Finish.DEADLINE, Finish.ERROR)
        if finish is Finish.DEADLINE:
            self._expire(mailbox)
        elif finish is Finish.ERROR:
            self.fail(mailbox, EngineFault(error or "the engine failed on this request"))
        elif finish is Finish.INVALID:
            self.fail(mailbox, InvalidRequest(error or "this pool's engine does not take such a request"))
        elif finish is Finish.REFUSED:
            state.refused_by.add(state.receipt.replica)

    def _abort(self, state: RequestState) -> None:
        """End the attempt under way, if there is one."""
        self._end_trial(state)
        self._charges.end(state.arrival)
        carrier, state.carrier = state.carrier, None
        if carrier is not None:
            carrier.abort(state.sid)

    def _expire(self, mailbox: Mailbox) -> None:
        self.fail(mailbox, DeadlineExceeded("the request's deadline passed before it was finished"))

    def _trace_attempt(self, mailbox: Mailbox, error: PenstockError | None = None) -> None:
        """Record the end of an attempt. error: the provider's."""
        state = mailbox.state
        if state.trace is not None:
            num_prompt_tokens = state.tokenized.num_prompt_tokens
            state.trace.end_attempt(num_prompt_tokens, mailbox.num_delivered_tokens, state.is_text, error)


def _release(state: RequestState) -> None:
    """Give back what is reserved for a call that was not made."""
    if state.reservation is not None:
        state.reservation.reservation.settle(0)
        state.reservation = None


def _detach(state: RequestState) -> None:
    state.carrier = None
    state.receipt.is_taken = False
