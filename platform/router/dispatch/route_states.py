"""What each route of a request promises now: a forecast, and the replicas and chains that it rests on.

Not the choice between routes (tiers) or replicas (policy). Reads the state of a request and of the fleet, and changes
neither, but that block chains are kept with the request once they are computed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from random import Random
from types import MappingProxyType
from typing import NamedTuple, Protocol

from penstock.perf.many import Request
from penstock.prefix.index import PrefixIndex
from penstock.router.config import PoolSpec
from penstock.router.dispatch.output_lengths import OutputLengths
from penstock.router.dispatch.route_prices import price_at_provider, price_at_replica
from penstock.router.dispatch.state import RequestState
from penstock.router.providers.provider import Provider
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.pool_table import PoolTable
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.replicas.routing_policy import ReadyReplicas, RoutedRequest, RoutingPolicy
from penstock.router.routing.chains import Chain, ChainKind
from penstock.router.routing.policy import Decision, Wait, choose
from penstock.router.routing.replica_table import PoolQuery
from penstock.router.routing.request import Generation, LazyPrompt, Route, TokenizedPrompt
from penstock.router.routing.search import IN_ARRAYS, Search, Searching
from penstock.router.routing.tiers import OBSTACLE, RouteForecast, TierReason
from penstock.wire.errors import ContextTooLong, InvalidRequest, Overloaded, RequestError
from penstock.wire.frames import Ability

ABILITIES: Mapping[Ability, str] = {
    Ability.PROMPT_LOGPROBS: "compute a prompt alone, or tell log probabilities of its tokens",
    Ability.TOKEN_MASKS: "choose among allowed tokens, or leave out words",
    Ability.BEAMS: "search with beams",
    Ability.CONSTRAINTS: "make an answer keep to a schema, grammar, pattern or choice, or be a call",
}
"""What a request may need of a replica, in words."""
_REFUSED, _TOO_LONG, _INCAPABLE, _CAPPED = (
    RouteForecast(obstacle=reason)
    for reason in (
        TierReason.REFUSED,
        TierReason.CONTEXT_TOO_LONG,
        TierReason.CAPABILITY,
        TierReason.PROVIDER_CAP,
    )
)
_HOPELESS = frozenset({TierReason.CONTEXT_TOO_LONG, TierReason.REFUSED, TierReason.CAPABILITY, TierReason.PROVIDER_CAP})
MADE_ROOM_FOR = (Wait.NO_CREDIT, Wait.NO_BLOCKS)
"""Obstacles that the replica removes for a tenant below its share."""


class Candidate(NamedTuple):
    """A replica that a request may go to."""

    client: ReplicaClient
    chain: Chain
    """Chain of the request's tokens so far, in the replica's blocks."""
    cached_tokens: int
    """Leading tokens of the request that the replica holds, in full blocks."""


class RouteState(NamedTuple):
    """A route as it is now."""

    route: Route
    forecast: RouteForecast
    tokenized: TokenizedPrompt
    decision: Decision | None = None
    """The policy's choice among the replicas of the route's pools; None: the route is a provider, or can't be read."""
    candidate: Candidate | None = None
    """The replica that the policy chose; None: none was chosen."""

    @property
    def is_hopeless(self) -> bool:
        """Whether waiting can't help: the route's context is too short, it has refused the request, it can't do what
        the request asks for, or it is a provider that may not cost any more."""
        return self.forecast.obstacle in _HOPELESS

    @property
    def place(self) -> str:
        """The provider, or the pool of the replica that was chosen."""
        return self.chosen.client.member.pool if self.route.provider is None else self.route.provider

    @property
    def chosen(self) -> Candidate:
        """The replica that the policy chose, where it did."""
        assert self.candidate is not None
        return self.candidate


class _Held(NamedTuple):
    """The chain of a request for one kind of replica, and how many of its leading blocks each replica holds."""

    chain: Chain
    blocks: Mapping[str, int]


class _Reading(NamedTuple):
    """What was read of a route's pools."""

    forecast: RouteForecast
    decision: Decision | None = None
    chosen: Candidate | None = None


class _ChooseOne(Protocol):
    """The choice of a replica for one request."""

    def __call__(self, *, may_overdraw: bool = False) -> Decision: ...


class RouteReader:
    """Reads what each route promises now, from the ready replicas, the prefix index and the providers. clock: monotonic
    seconds."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        providers: Mapping[str, Provider],
        lengths: OutputLengths,
        random: Random,
        clock: Callable[[], float],
        may_overdraw: Callable[[RequestState, int], bool],
        is_yielded_to: Callable[[RequestState, Route], bool],
        searching: Searching = IN_ARRAYS,
        policy: RoutingPolicy | None = None,
        pools: Mapping[str, PoolSpec] = MappingProxyType({}),
    ) -> None:
        """may_overdraw: whether a request's tenant has less than its share of so many places. is_yielded_to: whether
        rows of the class batch yield to it at the replicas of a route, so that places which they have do not matter.
        policy: another choice of a replica; None: production's, from the tables themselves. pools: by name, with prices
        and targets."""
        self._pools = pools
        self._fleet = fleet
        self._index = index
        self._providers = providers
        self._lengths = lengths
        self._random = random
        self._clock = clock
        self._may_overdraw = may_overdraw
        self._is_yielded_to = is_yielded_to
        self._search, self._max_viewed = searching
        self._policy = policy
        if policy is not None:
            self._max_viewed = -1

    def read(self, state: RequestState, route: Route) -> RouteState:
        """The state of a route, with its cost where the tenant's policy goes by that. Its prompt must have been
        tokenized already (`find_unread` returns None)."""
        found = self._read(state, route)
        if found.forecast.obstacle is not None or not state.generation.tier_rule.goes_by_cost:
            return found
        return found._replace(forecast=self._price(state, found))

    def _read(self, state: RequestState, route: Route) -> RouteState:
        tokenized = state.generation.tokenized
        if route.provider is not None:
            if route.provider in state.refused_by:
                return RouteState(route, _REFUSED, tokenized)
            is_capped = route.provider in state.cap_refusals
            forecast = _CAPPED if is_capped else self._providers[route.provider].forecast()
            return RouteState(route, forecast, tokenized)
        if route.model:
            prompt = state.generation.lazy_prompts[route.model - 1]
            if prompt.tokenized is None:
                forecast = _TOO_LONG if isinstance(prompt.error, ContextTooLong) else _INCAPABLE
                return RouteState(route, forecast, tokenized)
            tokenized = prompt.tokenized
        return self._read_pools(state, route, tokenized)

    def _price(self, state: RequestState, found: RouteState) -> RouteForecast:
        """The forecast of a route, with its cost and its pace."""
        num_tokens, output_tokens = state.num_tokens(found.tokenized), self.expect_output(state, found.tokenized)
        if found.route.provider is not None:
            provider = self._providers[found.route.provider]
            cost_nano = price_at_provider(provider.config, num_tokens, provider.cached_share, output_tokens)
            return found.forecast._replace(cost_nano=cost_nano)
        client, cached_tokens = found.chosen.client, found.chosen.cached_tokens
        pool = self._pools[client.member.pool]
        tpot_s, cost_nano = price_at_replica(client, num_tokens, cached_tokens, output_tokens, pool.price_per_hour)
        target_s = pool.targets.of(state.generation.share.service_class).tpot_s
        return found.forecast._replace(
            cost_nano=cost_nano, tpot_s=tpot_s, is_slow=target_s is not None and tpot_s > target_s
        )

    def has_provider(self, state: RequestState, routes: Iterable[Route]) -> bool:
        """Whether one of the routes is a provider that has not failed or refused the request; it may have no room."""
        return any(
            route.provider is not None
            and route.provider not in state.refused_by
            and route.provider not in state.cap_refusals
            and self._providers[route.provider].is_available
            for route in routes
        )

    def _read_pools(self, state: RequestState, route: Route, tokenized: TokenizedPrompt) -> RouteState:
        num_listed = sum([len(table.clients) for table in self._fleet.tables(route.pools)])
        read = self._read_few if num_listed <= self._max_viewed else self._read_many
        forecast, decision, chosen = read(state, route, tokenized)
        return RouteState(route, forecast, tokenized, decision, chosen)

    def _read_few(self, state: RequestState, route: Route, tokenized: TokenizedPrompt) -> _Reading:
        clients = self._fleet.ready_clients(route.pools)
        needed = state.needed_abilities(tokenized)
        if needed:
            able = [client for client in clients if needed <= client.member.abilities]
            if clients and not able:
                return _Reading(_INCAPABLE)
            clients = able
        allowed = [client for client in clients if client.member.replica_id not in state.refused_by]
        held = self._look_up(state, tokenized, {client.chain_kind for client in allowed})
        adapter, tenant = state.generation.adapter, state.generation.tenant
        views = [
            client.view(_count_cached(client, held, state.num_tokens(tokenized)), adapter, tenant) for client in allowed
        ]
        request = self._request(state, tokenized)

        def choose_one(*, may_overdraw: bool = False) -> Decision:
            seen = [view._replace(may_overdraw=True) for view in views] if may_overdraw else views
            return choose(*request[:2], seen, self._random, request.scored_tokens)

        decision = self._choose(state, route, choose_one, lambda: self.count_places(state, route, tokenized)[1])
        is_draining = any(client.load is not None and client.load.is_draining for client in clients)
        is_refused = bool(clients) and not allowed and not is_draining
        return _Reading(_forecast(decision, is_refused=is_refused), decision, self._find(decision, held))

    def _read_many(self, state: RequestState, route: Route, tokenized: TokenizedPrompt) -> _Reading:
        tables = self._fleet.tables(route.pools)
        needed = state.needed_abilities(tokenized)
        has_able = not needed or any(table.has_ready(table.find_allowed(needed, frozenset())) for table in tables)
        if not has_able and any(table.has_ready(None) for table in tables):
            return _Reading(_INCAPABLE)
        held = self._look_up(state, tokenized, {kind for table in tables for kind in table.kinds})
        blocks = {kind: found.blocks for kind, found in held.items()}
        request = self._request(state, tokenized)
        queries = [
            table.query(
                blocks,
                request.num_tokens,
                state.generation.adapter,
                state.generation.tenant,
                table.find_allowed(needed, state.refused_by),
            )
            for table in tables
        ]
        choose_replica = self._search if self._policy is None else self._ask(self._policy, tables, held)
        decision = self._choose(
            state, route, partial(choose_replica, queries, request, self._random), lambda: _count_places(queries)
        )
        is_refused = decision.reason is Wait.NO_REPLICA and _is_refused(tables, needed, state)
        return _Reading(_forecast(decision, is_refused=is_refused), decision, self._find(decision, held))

    def _choose(
        self, state: RequestState, route: Route, choose_one: "_ChooseOne", count_places: Callable[[], int]
    ) -> Decision:
        """Choose among the replicas with a place, and among others too where the request may have one of theirs: if
        those have none, or at once where batch rows yield to it."""
        if self._is_yielded_to(state, route) and self._may_overdraw(state, count_places()):
            return choose_one(may_overdraw=True)
        decision = choose_one()
        if decision.reason in MADE_ROOM_FOR and self._may_overdraw(state, count_places()):
            return choose_one(may_overdraw=True)
        return decision

    def _ask(self, policy: RoutingPolicy, tables: Sequence[PoolTable], held: Mapping[ChainKind, _Held]) -> Search:
        """The search that asks another policy."""

        def ask(
            queries: Sequence[PoolQuery],
            request: Request,
            random: Random,  # noqa: ARG001 (as of Search)
            *,
            may_overdraw: bool = False,
        ) -> Decision:
            if not held:
                return Decision(None, Wait.NO_REPLICA)
            kind, found = next(iter(held.items()))
            size = kind.block_size
            keys = found.chain.keys[: request.num_tokens // size]
            asked = RoutedRequest(*request[:2], keys, size, self._clock())
            decision = policy(asked, ReadyReplicas(tables, queries, may_overdraw=may_overdraw))
            # one that predicts nothing keeps the first route
            return decision._replace(predicted_ttft_s=decision.predicted_ttft_s or 0.0)

        return ask

    def _look_up(
        self, state: RequestState, tokenized: TokenizedPrompt, kinds: Iterable[ChainKind]
    ) -> dict[ChainKind, _Held]:
        """The chain of the request so far for each kind of replica, and who holds how much of it."""
        now = self._clock()
        is_cache_used = not state.num_tokens_to_score(tokenized)  # no block holds log probabilities
        held = {}
        for kind in kinds:
            chain = state.chains.find(kind, tokenized.packed_token_ids, state.packed_output)
            held[kind] = _Held(chain, self._index.lookup(chain.keys, now) if is_cache_used else {})
        return held

    def _request(self, state: RequestState, tokenized: TokenizedPrompt) -> Request:
        return Request(
            state.num_tokens(tokenized), self.expect_output(state, tokenized), state.num_tokens_to_score(tokenized)
        )

    def _find(self, decision: Decision, held: Mapping[ChainKind, _Held]) -> Candidate | None:
        if decision.replica_id is None:
            return None
        client = self._fleet.client(decision.replica_id)
        assert client is not None
        return Candidate(client, held[client.chain_kind].chain, decision.cached_tokens)

    def count_places(self, state: RequestState, route: Route, tokenized: TokenizedPrompt) -> tuple[int, int]:
        """Places for sequences at the replicas of a route where a request may go: those that are free now, and all that
        this gateway has or may have."""
        needed = state.needed_abilities(tokenized)
        counts = [
            table.read().count_places(table.find_allowed(needed, state.refused_by))
            for table in self._fleet.tables(route.pools)
        ]
        return sum(free for free, _ in counts), sum(places for _, places in counts)

    def expect_output(self, state: RequestState, tokenized: TokenizedPrompt) -> float:
        """Tokens that should still come, at least 1."""
        expected = min(self._lengths.expect(state.generation.pools), tokenized.sampling.max_tokens)
        return max(1.0, expected - len(state.output))


def _count_places(queries: Iterable[PoolQuery]) -> int:
    """Places for sequences where a request may go: all that this gateway has or may have."""
    return sum(query.table.count_places(query.is_allowed)[1] for query in queries)


def find_unread(generation: Generation, route: Route) -> LazyPrompt | None:
    """The prompt that must be tokenized before the state of the route can be read. Returns None if nothing is
    missing."""
    if route.provider is not None or not route.model:
        return None
    prompt = generation.lazy_prompts[route.model - 1]
    return None if prompt.is_known else prompt


def raise_if_hopeless(state: RequestState, routes: Sequence[RouteState]) -> None:
    """Waiting can't help when each route's context is too short for it, or its model can't read it, or it was refused.

    A provider's refusal of the request itself is final too where no replica is left that might take it, and so is a cap
    on what it may cost.
    """
    waiting_for = [route.forecast.obstacle for route in routes if not route.is_hopeless]
    if state.cap_refusals and not state.is_held and set(waiting_for) <= {TierReason.TIER_DOWN}:
        raise next(iter(state.cap_refusals.values()))
    refusal = state.refusal
    if refusal is not None and (
        not waiting_for or (isinstance(refusal, RequestError) and set(waiting_for) == {TierReason.TIER_DOWN})
    ):
        raise refusal
    if waiting_for:
        return
    needed = state.needed_abilities(state.tokenized)
    if needed and any(route.forecast.obstacle is TierReason.CAPABILITY for route in routes):
        asked = "; ".join(ABILITIES[ability] for ability in sorted(needed))
        raise InvalidRequest(f"no replica of this model that could take the request can do what it needs: {asked}")
    if all(route.forecast.obstacle is TierReason.CONTEXT_TOO_LONG for route in routes):
        raise ContextTooLong(
            f"{state.num_tokens(state.tokenized)} tokens leave no room for an answer in the context of any replica of"
            " this model"
        )
    raise Overloaded("every replica of this model refused the request", retry_after_s=1.0)


def _count_cached(client: ReplicaClient, held: Mapping[ChainKind, _Held], num_tokens: int) -> int:
    """Leading tokens of a request that a replica holds, in full blocks."""
    size = client.chain_kind.block_size
    # the last token is always computed: its logits choose the next one
    return min(held[client.chain_kind].blocks.get(client.member.replica_id, 0), (num_tokens - 1) // size) * size


def _forecast(decision: Decision, *, is_refused: bool) -> RouteForecast:
    """Forecast of a route by pools. is_refused: each ready replica refused the request; one that is draining may have
    refused for that reason, and its successor would not, so that waiting can help."""
    if decision.replica_id is not None:
        return RouteForecast(decision.predicted_ttft_s)
    assert isinstance(decision.reason, Wait)
    return _REFUSED if is_refused else RouteForecast(obstacle=OBSTACLE[decision.reason])


def _is_refused(tables: Iterable[PoolTable], needed: Set[str], state: RequestState) -> bool:
    """Whether each ready replica that can do what is needed refused the request, and none of them drains."""
    if not state.refused_by:
        return False
    able = [(table, table.find_allowed(needed, frozenset())) for table in tables]
    return (
        any(table.has_ready(where) for table, where in able)
        and not any(table.has_ready(table.find_allowed(needed, state.refused_by)) for table in tables)
        and not any(table.has_draining(where) for table, where in able)
    )
