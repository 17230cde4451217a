"""What each route of a request promises now: a forecast, and the replicas and chains that it rests on.

Not the choice between routes (tiers) or replicas (policy). Reads the state of a request and of the fleet, and changes
neither, but that block chains are kept with the request once they are computed.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from penstock.prefix.index import PrefixIndex
from penstock.router.dispatch.output_lengths import OutputLengths
from penstock.router.dispatch.state import RequestState
from penstock.router.providers.provider import Provider
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.routing.chains import Chain, ChainKind
from penstock.router.routing.policy import Decision, Wait, choose
from penstock.router.routing.request import Generation, LazyPrompt, Route, TokenizedPrompt
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
_REFUSED, _TOO_LONG, _INCAPABLE = (
    RouteForecast(obstacle=reason)
    for reason in (TierReason.REFUSED, TierReason.CONTEXT_TOO_LONG, TierReason.CAPABILITY)
)
_MADE_ROOM_FOR = (Wait.NO_CREDIT, Wait.NO_BLOCKS)
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
    """The policy's choice among the replicas of the route's pools; None: the route is a provider."""
    candidates: Sequence[Candidate] = ()

    @property
    def is_hopeless(self) -> bool:
        """Whether waiting can't help: the route's context is too short, it has refused the request, or it can't do what
        the request asks for."""
        return self.forecast.obstacle in (TierReason.CONTEXT_TOO_LONG, TierReason.REFUSED, TierReason.CAPABILITY)

    @property
    def chosen(self) -> Candidate:
        """The candidate that the policy chose."""
        assert self.decision is not None
        return next(
            candidate for candidate in self.candidates if candidate.client.member.replica_id == self.decision.replica_id
        )


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
    ) -> None:
        """may_overdraw: whether a request's tenant has less than its share of so many places."""
        self._fleet = fleet
        self._index = index
        self._providers = providers
        self._lengths = lengths
        self._random = random
        self._clock = clock
        self._may_overdraw = may_overdraw

    def read(self, state: RequestState, route: Route) -> RouteState:
        """The state of a route. Its prompt must have been tokenized already (`find_unread` returns None)."""
        tokenized = state.generation.tokenized
        if route.provider is not None:
            is_refused = route.provider in state.refused_by
            forecast = _REFUSED if is_refused else self._providers[route.provider].forecast()
            return RouteState(route, forecast, tokenized)
        if route.model:
            prompt = state.generation.lazy_prompts[route.model - 1]
            if prompt.tokenized is None:
                forecast = _TOO_LONG if isinstance(prompt.error, ContextTooLong) else _INCAPABLE
                return RouteState(route, forecast, tokenized)
            tokenized = prompt.tokenized
        return self._read_pools(state, route, tokenized)

    def _read_pools(self, state: RequestState, route: Route, tokenized: TokenizedPrompt) -> RouteState:
        clients = self._fleet.ready_clients(route.pools)
        needed = state.needed_abilities(tokenized)
        if needed:
            able = [client for client in clients if needed <= client.member.abilities]
            if clients and not able:
                return RouteState(route, _INCAPABLE, tokenized)
            clients = able
        allowed = (
            [client for client in clients if client.member.replica_id not in state.refused_by]
            if state.refused_by
            else clients
        )
        candidates = self._find_candidates(state, tokenized, allowed)
        adapter, tenant = state.generation.adapter, state.generation.tenant
        views = [candidate.client.view(candidate.cached_tokens, adapter, tenant) for candidate in candidates]
        expected_tokens = self.expect_output(state, tokenized)
        num_scored = state.num_tokens_to_score(tokenized)
        decision = choose(state.num_tokens(tokenized), expected_tokens, views, self._random, num_scored)
        if decision.reason in _MADE_ROOM_FOR and self._may_overdraw(state, _count_all(candidates)):
            views = [view._replace(may_overdraw=True) for view in views]
            decision = choose(state.num_tokens(tokenized), expected_tokens, views, self._random, num_scored)
        return RouteState(route, _forecast(decision, clients, candidates), tokenized, decision, candidates)

    def _find_candidates(
        self, state: RequestState, tokenized: TokenizedPrompt, clients: Sequence[ReplicaClient]
    ) -> list[Candidate]:
        now = self._clock()
        is_cache_used = not state.num_tokens_to_score(tokenized)  # no block holds log probabilities
        held: dict[ChainKind, tuple[Chain, Mapping[str, int]]] = {}
        candidates = []
        for client in clients:
            kind = client.chain_kind
            if kind not in held:
                chain = state.chains.find(kind, tokenized.packed_token_ids, state.packed_output)
                held[kind] = chain, self._index.lookup(chain.keys, now)
            chain, blocks = held[kind]
            # the last token is always computed: its logits choose the next one
            max_blocks = (state.num_tokens(tokenized) - 1) // kind.block_size
            num_blocks = min(blocks.get(client.member.replica_id, 0), max_blocks) if is_cache_used else 0
            candidates.append(Candidate(client, chain, num_blocks * kind.block_size))
        return candidates

    def expect_output(self, state: RequestState, tokenized: TokenizedPrompt) -> float:
        """Tokens that should still come, at least 1."""
        expected = min(self._lengths.expect(state.generation.pools), tokenized.sampling.max_tokens)
        return max(1.0, expected - len(state.output))


def count_places(route: RouteState) -> tuple[int, int]:
    """Places for sequences at the route's replicas: those that are free now, and all that this gateway has or may
    have."""
    return sum([max(0, most - used) for most, used in _credits(route.candidates)]), _count_all(route.candidates)


def _count_all(candidates: Sequence[Candidate]) -> int:
    return sum([max(most, used) for most, used in _credits(candidates)])


def _credits(candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
    """Credit at each replica, and what is used of it."""
    return [(each.client.load.max_inflight, each.client.num_inflight) for each in candidates if each.client.load]


def find_unread(generation: Generation, route: Route) -> LazyPrompt | None:
    """The prompt that must be tokenized before the state of the route can be read. Returns None if nothing is
    missing."""
    if route.provider is not None or not route.model:
        return None
    prompt = generation.lazy_prompts[route.model - 1]
    return None if prompt.is_known else prompt


def raise_if_hopeless(state: RequestState, routes: Sequence[RouteState]) -> None:
    """Waiting can't help when each route's context is too short for it, or its model can't read it, or it was refused.

    A provider's refusal of the request itself is final too where no replica is left that might take it.
    """
    waiting_for = [route.forecast.obstacle for route in routes if not route.is_hopeless]
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


def _forecast(decision: Decision, clients: Sequence[ReplicaClient], candidates: Sequence[Candidate]) -> RouteForecast:
    """Forecast of a route by pools. clients: the ready replicas, also those that refused the request: one that is
    draining may have refused for that reason, and its successor would not, so that waiting can help."""
    if decision.replica_id is not None:
        return RouteForecast(decision.predicted_ttft_s)
    is_draining = any(client.load is not None and client.load.is_draining for client in clients)
    if clients and not candidates and not is_draining:
        return _REFUSED
    assert isinstance(decision.reason, Wait)
    return RouteForecast(obstacle=OBSTACLE[decision.reason])
