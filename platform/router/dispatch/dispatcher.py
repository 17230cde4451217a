"""Dispatch: places each stream on a replica, and on another one when the first is lost or refuses.

Not HTTP, not the choice itself (policy), not the wait (queue). Before its first token a stream is simply submitted
again; after it, with the output so far behind the prompt, and since seed and noise belong to the position, the answer
goes on as if nothing had happened. Invariant: when `start` raises, or a stream is closed, nothing of it is left in the
queue, on a replica or in a timer.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import Counter

from penstock.base.errors import PenstockError
from penstock.base.metrics import Metrics
from penstock.prefix.index import PrefixIndex
from penstock.router.config import GatewayConfig, PoolSpec
from penstock.router.dispatch.stream import RoutedStream
from penstock.router.dispatch.waiting import Lane, WaitQueue
from penstock.router.providers.provider import Provider
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.routing.chains import Chain, ChainKind, Chains
from penstock.router.routing.policy import Decision, Wait, choose
from penstock.router.routing.request import AnsweringModel, Generation, Route, RouteAttempt, TokenizedPrompt
from penstock.router.routing.tiers import OBSTACLE, RouteForecast, TierReason, decide
from penstock.wire.errors import ContextTooLong, DeadlineExceeded, Overloaded, RequestError
from penstock.wire.frames import Submit, pack_token_ids

FIRST_OUTPUT_TOKENS = 128.0
"""Expected length of an answer before any has finished."""
OUTPUT_TOKENS_RATE = 0.02
"""Weight of the latest answer in that expectation."""
PROVIDER_REASON = "provider"
"""A receipt's reason where no replica was chosen."""
_REFUSED, _TOO_LONG, _INCAPABLE = (
    RouteForecast(obstacle=reason)
    for reason in (TierReason.REFUSED, TierReason.CONTEXT_TOO_LONG, TierReason.CAPABILITY)
)
EXPECT_GRACE_S = 2.0
"""A replica is taken to hold a prompt it was sent for twice its predicted TTFT and this long; by then its own event has
come."""


class _Candidate(NamedTuple):
    remote: ReplicaClient
    chain: Chain
    cached_tokens: int


class _RouteState(NamedTuple):
    """A route as it is now."""

    route: Route
    outlook: RouteForecast
    tokenized: TokenizedPrompt
    decision: Decision | None = None
    """Among the replicas of its pools; a provider has none."""
    candidates: Sequence[_Candidate] = ()

    @property
    def is_hopeless(self) -> bool:
        """Waiting doesn't help."""
        return self.outlook.obstacle in (TierReason.CONTEXT_TOO_LONG, TierReason.REFUSED, TierReason.CAPABILITY)

    @property
    def chosen(self) -> _Candidate:
        assert self.decision is not None
        return next(
            candidate for candidate in self.candidates if candidate.remote.member.replica_id == self.decision.replica_id
        )


class RoutingDispatcher:
    """See `penstock.router.routing.request.Dispatcher`. `now` is Unix time; `clock` is monotonic; both in seconds."""

    def __init__(
        self,
        pools: Mapping[str, PoolSpec],
        fleet: Fleet,
        index: PrefixIndex,
        queue: WaitQueue,
        chains: Chains,
        config: GatewayConfig,
        metrics: Metrics,
        random: Random,
        providers: Mapping[str, Provider] = MappingProxyType({}),
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._fleet = fleet
        self._index = index
        self._queue = queue
        self._chains = chains
        self._max_buffered_deltas = config.max_buffered_deltas
        self._ttft_target_s = config.ttft_target_s
        self._metrics = metrics
        self._random = random
        self._providers = providers
        self._now = now
        self._clock = clock
        self._arrivals = itertools.count()
        self._output_tokens: dict[tuple[str, ...], float] = {}
        self._attempts: dict[tuple[str, str], Counter] = {}
        """By pool and kind: looking a label up costs more than counting."""
        self._tier_decisions: dict[tuple[str, str, str], Counter] = {}

    async def start(self, generation: Generation) -> RoutedStream:
        """Raises Overloaded, DeadlineExceeded, or ContextTooLong where no replica's context holds the prompt."""
        stream = RoutedStream(generation, next(self._arrivals), self, self._max_buffered_deltas)
        try:
            await self.place(stream)
        except BaseException:
            stream.close()
            raise
        return stream

    async def place(self, stream: RoutedStream) -> None:
        began = self._clock()
        lane = Lane(self._places(stream), frozenset(stream.refused_by))
        try:
            await self._admit(stream, lane)
            while stream.unread:
                unread, stream.unread = stream.unread, []
                for other in unread:
                    await other.load()
                asyncio.get_running_loop().call_soon(
                    self._queue.wake, lane.pools[0]
                )  # who comes back to a lane is not asked by itself
                await self._admit(stream, lane)
        finally:
            stream.receipt.queued_s += self._clock() - began
            if stream.trace is not None:
                stream.trace.waited(began, self._clock(), sys.exception())

    async def _admit(self, stream: RoutedStream, lane: Lane) -> None:
        seconds_left = stream.generation.deadline - self._now()
        if seconds_left <= 0:
            raise DeadlineExceeded("the request's deadline has passed")
        await self._queue.admit(
            lane, partial(self._try_place, stream), arrival=stream.arrival, deadline_in_s=seconds_left
        )

    def ended(self, stream: RoutedStream, error: PenstockError | None) -> None:
        if error is None and stream.output:
            pools = stream.generation.pools
            mean = self._output_tokens.get(pools, FIRST_OUTPUT_TOKENS)
            self._output_tokens[pools] = mean + OUTPUT_TOKENS_RATE * (len(stream.output) - mean)

    def slow(self) -> None:
        self._metrics.slow_clients.inc()

    def _try_place(self, stream: RoutedStream) -> bool:
        """Choose and submit, now; False: no route can take it. With `stream.unread` set it is to be placed again, once
        that is read."""
        if stream.is_closed:
            return True
        began = self._clock()
        routes = self._routes(stream)
        looks: list[_RouteState] = []
        choice = decide(self._outlooks(stream, routes, looks), self._ttft_target_s, stream.generation.skipped)
        if stream.unread:
            return True
        if choice.route is None:
            _raise_if_hopeless(stream, looks)
            return False
        look = looks[choice.route]
        is_only = len(routes) == 1 and choice.reason in (TierReason.PREFERRED, TierReason.NONE_BETTER)
        self._go(stream, look)
        self._explain(stream, look, looks, TierReason.ONLY_TIER if is_only else choice.reason)
        if stream.trace is not None:
            stream.trace.routed(began, self._clock())
        return True

    def _routes(self, stream: RoutedStream) -> Sequence[Route]:
        """After the first token only the same model can go on."""
        generation = stream.generation
        if not generation.routes:
            return (Route(self._pools[generation.pools[0]].tier, generation.pools),)
        if not stream.output:
            return generation.routes
        return [route for route in generation.routes if route.provider is None and route.model == stream.model]

    def _places(self, stream: RoutedStream) -> tuple[str, ...]:
        """Of its lane. An answer that has begun may not hold up those that still may go elsewhere."""
        pools = (
            [pool for route in self._routes(stream) for pool in route.pools]
            if stream.output
            else stream.generation.pools
        )
        return tuple(sorted(pools))

    def _outlooks(
        self, stream: RoutedStream, routes: Sequence[Route], looks: list[_RouteState]
    ) -> Iterator[RouteForecast]:
        """Of one route after the other, as far as asked; `looks` has what they rest on."""
        for route in routes:
            look = self._look(stream, route)
            if look is not None:
                looks.append(look)
                yield look.outlook

    def _look(self, stream: RoutedStream, route: Route) -> _RouteState | None:
        """None: the prompt has not been read for that model."""
        reading = stream.generation.tokenized
        if route.provider is not None:
            is_refused = route.provider in stream.refused_by
            return _RouteState(route, _REFUSED if is_refused else self._providers[route.provider].outlook(), reading)
        if route.model:
            other = stream.generation.lazy_prompts[route.model - 1]
            if not other.is_known:
                stream.unread.append(other)
                return None
            if other.tokenized is None:
                return _RouteState(route, _TOO_LONG if isinstance(other.error, ContextTooLong) else _INCAPABLE, reading)
            reading = other.tokenized
        remotes = self._fleet.remotes(route.pools)
        able = (
            [remote for remote in remotes if remote.member.replica_id not in stream.refused_by]
            if stream.refused_by
            else remotes
        )
        num_tokens = reading.num_prompt_tokens + len(stream.output)
        candidates = self._candidates(stream, reading, num_tokens, able)
        views = [candidate.remote.view(candidate.cached_tokens, stream.generation.adapter) for candidate in candidates]
        decision = choose(num_tokens, self._expected_tokens(stream, reading), views, self._random)
        return _RouteState(route, _outlook(decision, remotes, candidates), reading, decision, candidates)

    def _candidates(
        self, stream: RoutedStream, reading: TokenizedPrompt, num_tokens: int, remotes: list[ReplicaClient]
    ) -> list[_Candidate]:
        now = self._clock()
        held: dict[ChainKind, tuple[Chain, Mapping[str, int]]] = {}
        candidates = []
        for remote in remotes:
            kind = remote.chain_kind
            if kind not in held:
                chain = self._chain(stream, reading, kind)
                held[kind] = chain, self._index.lookup(chain.keys, now)
            chain, blocks = held[kind]
            # the last token is always computed: its logits choose the next one
            num_blocks = min(blocks.get(remote.member.replica_id, 0), (num_tokens - 1) // kind.block_size)
            candidates.append(_Candidate(remote, chain, num_blocks * kind.block_size))
        return candidates

    def _chain(self, stream: RoutedStream, reading: TokenizedPrompt, kind: ChainKind) -> Chain:
        """Of all tokens so far; the prompt's is made once."""
        chain = stream.chains.get(kind)
        if chain is None:
            chain = stream.chains[kind] = self._chains.chain(
                kind, stream.generation.salt, reading.packed_token_ids, stream.generation.adapter
            )
        return self._chains.extended(chain, kind, _packed(stream, reading)) if stream.output else chain

    def _go(self, stream: RoutedStream, look: _RouteState) -> None:
        """Submit it, there and now."""
        route, receipt = look.route, stream.receipt
        stream.tokenized, stream.model = look.tokenized, route.model
        receipt.answering_model, receipt.num_prompt_tokens = None, None
        if route.provider is not None:
            receipt.answering_model = AnsweringModel(f"fp_{route.provider}", None)
            self._ask(stream, self._providers[route.provider], look.tokenized)
            return
        if route.model:
            receipt.answering_model, receipt.num_prompt_tokens = (
                stream.generation.lazy_prompts[route.model - 1].answering_model,
                look.tokenized.num_prompt_tokens,
            )
        self._submit(stream, look.chosen)

    def _ask(self, stream: RoutedStream, provider: Provider, reading: TokenizedPrompt) -> None:
        ask, sampling = stream.generation.provider_request, reading.sampling
        assert ask is not None
        sid = provider.begin(
            ask, sampling.max_tokens, sampling.seed, reading.num_prompt_tokens, stream, stream.generation.traced.headers
        )
        stream.begin(provider, sid, stream.generation.deadline - self._now(), is_text=True)

    def _submit(self, stream: RoutedStream, chosen: _Candidate) -> None:
        generation, reading = stream.generation, stream.tokenized
        submit = Submit(
            sid=0,
            request_id=generation.request_id,
            packed_token_ids=_packed(stream, reading),
            block_keys=b"".join(chosen.chain.keys),
            chain_key=chosen.chain.parent,
            sampling=reading.sampling,
            num_output_tokens=len(stream.output),
            adapter=generation.adapter,
            tenant=generation.tenant,
            deadline=generation.deadline,
            traceparent=None if generation.traced.trace is None else generation.traced.traceparent,
        )
        sid = chosen.remote.submit(
            submit, reading.num_prompt_tokens + len(stream.output) - chosen.cached_tokens, stream
        )
        stream.begin(chosen.remote, sid, generation.deadline - self._now())

    def _explain(
        self, stream: RoutedStream, look: _RouteState, looks: Sequence[_RouteState], reason: TierReason
    ) -> None:
        """Receipt, metrics, and the foresight that the replica will hold this prompt."""
        receipt, decision, provider = stream.receipt, look.decision, look.route.provider
        receipt.predicted_ttft_s, receipt.predicted_cached_tokens = look.outlook.ttft_s, 0
        if decision is None:
            assert provider is not None
            receipt.pool, receipt.replica, receipt.tier, receipt.reason = (
                provider,
                provider,
                look.route.tier,
                PROVIDER_REASON,
            )
        else:
            member, chain = look.chosen.remote.member, look.chosen.chain
            receipt.pool, receipt.replica, receipt.tier, receipt.reason = (
                member.pool,
                member.replica_id,
                self._pools[member.pool].tier,
                decision.reason.value,
            )
            receipt.predicted_cached_tokens = decision.cached_tokens
            self._index.expect(
                member.replica_id, chain.keys, self._clock(), 2 * (decision.predicted_ttft_s or 0.0) + EXPECT_GRACE_S
            )
        receipt.tier_reason = reason.value
        receipt.scores = decision.scores if decision is not None and len(looks) == 1 else _scores(looks)
        receipt.considered = [_considered(seen) for seen in looks] if len(looks) > 1 else []
        self._count_attempt(receipt.pool, "first" if receipt.attempts == 1 else "resume" if stream.output else "retry")
        self._count_decision(receipt.pool, receipt.tier, reason.value)

    def _count_attempt(self, pool: str, kind: str) -> None:
        counter = self._attempts.get((pool, kind))
        if counter is None:
            counter = self._attempts[pool, kind] = self._metrics.route_attempts.labels(pool, kind)
        counter.inc()

    def _count_decision(self, pool: str, tier: str, reason: str) -> None:
        counter = self._tier_decisions.get((pool, tier, reason))
        if counter is None:
            counter = self._tier_decisions[pool, tier, reason] = self._metrics.tier_decisions.labels(pool, tier, reason)
        counter.inc()

    def _expected_tokens(self, stream: RoutedStream, reading: TokenizedPrompt) -> float:
        mean = self._output_tokens.get(stream.generation.pools, FIRST_OUTPUT_TOKENS)
        return max(1.0, min(mean, reading.sampling.max_tokens) - len(stream.output))


def _packed(stream: RoutedStream, reading: TokenizedPrompt) -> bytes:
    return reading.packed_token_ids + pack_token_ids(stream.output) if stream.output else reading.packed_token_ids


def _outlook(decision: Decision, remotes: Sequence[ReplicaClient], candidates: Sequence[_Candidate]) -> RouteForecast:
    """remotes: with those that refused; one on its way out may have refused for that, and its successor would not."""
    if decision.replica_id is not None:
        return RouteForecast(decision.predicted_ttft_s)
    if (
        remotes
        and not candidates
        and not any(remote.load is not None and remote.load.is_draining for remote in remotes)
    ):
        return _REFUSED
    assert isinstance(decision.reason, Wait)
    return RouteForecast(obstacle=OBSTACLE[decision.reason])


def _scores(looks: Sequence[_RouteState]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for look in looks:
        if look.decision is not None:
            scores |= look.decision.scores
        elif look.route.provider is not None and look.outlook.ttft_s is not None:
            scores[look.route.provider] = look.outlook.ttft_s
    return scores


def _considered(look: _RouteState) -> RouteAttempt:
    route, outlook = look.route, look.outlook
    return RouteAttempt(
        route.tier, (route.provider,) if route.provider is not None else route.pools, outlook.ttft_s, outlook.obstacle
    )


def _raise_if_hopeless(stream: RoutedStream, looks: Sequence[_RouteState]) -> None:
    """Waiting can't help when each route's context is too short for it, or its model can't read it, or it was refused.

    What a provider says of the request itself is final too where no replica is left that might say otherwise.
    """
    rest = [look.outlook.obstacle for look in looks if not look.is_hopeless]
    refusal = stream.refusal
    if refusal is not None and (
        not rest or (isinstance(refusal, RequestError) and set(rest) == {TierReason.TIER_DOWN})
    ):
        raise refusal
    if rest:
        return
    if all(look.outlook.obstacle is TierReason.CONTEXT_TOO_LONG for look in looks):
        num_tokens = stream.tokenized.num_prompt_tokens + len(stream.output)
        raise ContextTooLong(
            f"{num_tokens} tokens leave no room for an answer in the context of any replica of this model"
        )
    raise Overloaded("every replica of this model refused the request", retry_after_s=1.0)
