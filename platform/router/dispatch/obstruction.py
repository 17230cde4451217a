"""Whether a change at one replica is worth another attempt of a request that had to wait.

Replicas report fifty times a second, and most of what they report helps nobody who waits. So an attempt that had to
wait notes why (`state.Obstruction`), and before the next one the changed replica alone is looked at: while it can't
take the request either, and the tenant's share stands as it stood, the next attempt would have to wait as the last did.
Invariant: what is answered with no would have been an attempt that has to wait; in doubt the answer is yes.
"""

from collections.abc import Callable, Sequence

from penstock.prefix.index import PrefixIndex
from penstock.router.dispatch.route_states import MADE_ROOM_FOR, RouteReader, RouteState
from penstock.router.dispatch.state import ObstructedRoute, Obstruction, RequestState
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.routing.policy import Wait, blocked_by, is_crowded
from penstock.router.routing.request import TokenizedPrompt


class Obstructions:
    """Notes why requests wait, and weighs changes. may_overdraw: whether a request's tenant has less than its share of
    so many places. clock: monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        reader: RouteReader,
        may_overdraw: Callable[[RequestState, int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._reader = reader
        self._may_overdraw = may_overdraw
        self._clock = clock

    def describe_full(self, state: RequestState, routes: Sequence[RouteState]) -> Obstruction:
        """The obstruction of a request for which no replica of any route had room."""
        return Obstruction(
            tuple(
                ObstructedRoute(each.route, each.tokenized, self._is_below(state, each))
                for each in routes
                if each.decision is not None and each.decision.reason in MADE_ROOM_FOR
            )
        )

    def may_help(self, state: RequestState, replica_id: str, must_leave: Callable[[ObstructedRoute], bool]) -> bool:
        """Whether a change at a replica may end the request's wait. must_leave: whether places of a route are kept for
        others."""
        obstruction, client = state.obstruction, self._fleet.client(replica_id)
        if obstruction is None or client is None:
            return True
        found = [each for each in obstruction.routes if client.member.pool in each.route.pools]
        if len(found) != 1 or not self._could_go(state, found[0].tokenized, client):
            return True
        if obstruction.is_kept:
            return not must_leave(found[0])
        if self._has_room(state, found[0].tokenized, client):
            return True
        return any(self._has_share(state, each, client) for each in obstruction.routes)

    def _is_below(self, state: RequestState, route: RouteState | ObstructedRoute) -> bool:
        _, num_places = self._reader.count_places(state, route.route, route.tokenized)
        return self._may_overdraw(state, num_places)

    def _could_go(self, state: RequestState, tokenized: TokenizedPrompt, client: ReplicaClient) -> bool:
        """Whether the request might go to a replica if there were room: it is then one that may be waited for."""
        return (
            client.is_ready
            and client.load is not None
            and not client.load.is_draining
            and state.num_tokens(tokenized) < client.member.max_model_len
            and client.member.replica_id not in state.refused_by
            and state.needed_abilities(tokenized) <= client.member.abilities
        )

    def _has_room(self, state: RequestState, tokenized: TokenizedPrompt, client: ReplicaClient) -> bool:
        assert client.load is not None
        if client.num_inflight >= client.load.max_inflight:
            return False
        num_tokens, size = state.num_tokens(tokenized), client.chain_kind.block_size
        view = client.view(0)
        if blocked_by(view, num_tokens) is not Wait.NO_BLOCKS:
            return True
        if state.num_tokens_to_score(tokenized):
            return False
        # with so many of its blocks in the cache there, free ones would suffice
        room_tokens = client.load.free_blocks * size - view.unreported.prefill_tokens
        num_needed = (num_tokens - room_tokens) // size + 1
        if num_needed > (num_tokens - 1) // size:
            return False
        chain = state.chains.find(client.chain_kind, tokenized.packed_token_ids, state.packed_output)
        last = chain.keys[num_needed - 1 : num_needed]
        return client.member.replica_id in self._index.lookup(last, self._clock())

    def _note_share_is_taken(self, state: RequestState, route: ObstructedRoute) -> None:
        """Note that the tenant is no longer below its share, so that being below it again will be a change."""
        if route.is_below_share and state.obstruction is not None:
            routes = [
                each._replace(is_below_share=False) if each is route else each for each in state.obstruction.routes
            ]
            state.obstruction = state.obstruction._replace(routes=tuple(routes))

    def _has_share(self, state: RequestState, route: ObstructedRoute, client: ReplicaClient) -> bool:
        """Whether the tenant may now be placed where no place is free: it was not below its share before, or few wait
        at the changed replica."""
        if not self._is_below(state, route):
            self._note_share_is_taken(state, route)
            return False
        if not route.is_below_share:
            return True
        if client.member.pool not in route.route.pools:
            return False
        view = client.view(0)
        return not is_crowded(view.load, view.work)
