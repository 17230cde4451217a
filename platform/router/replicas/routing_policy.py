"""The seam for the choice of a replica, in a gateway and in the simulator's: production's own policy, or another one
that is compared with it.

Pure, but for what a policy remembers. Invariant: the same policy asked the same in the same order chooses the same.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol, overload

from penstock.perf.many import Request
from penstock.router.replicas.pool_table import PoolTable
from penstock.router.routing.policy import Decision, ReplicaView, choose
from penstock.router.routing.replica_table import PoolQuery
from penstock.router.routing.search import IN_ARRAYS, Searching


class RoutedRequest(NamedTuple):
    """What a policy is told of a request."""

    num_tokens: int
    """Tokens of its prompt."""
    expected_output_tokens: float
    keys: Sequence[bytes]
    """Keys of the prompt's leading full blocks that other requests may have too: equal keys are equal tokens up to
    there."""
    block_size: int
    now_s: float


class ReadyReplicas(Sequence[ReplicaView]):
    """The ready replicas of a route that a request may go to: their views, made when one is read, and the tables from
    which production decides. queries: one for each table. may_overdraw: whether the tenant has less than its share.
    num_listed: all replicas of the tables."""

    def __init__(self, tables: Sequence[PoolTable], queries: Sequence[PoolQuery], *, may_overdraw: bool) -> None:
        self.num_listed = sum([len(table.clients) for table in tables])
        self.queries = queries
        self.may_overdraw = may_overdraw
        self._tables = tables
        self._views: list[ReplicaView] | None = None

    def __len__(self) -> int:
        return len(self._read())

    @overload
    def __getitem__(self, index: int) -> ReplicaView: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReplicaView]: ...
    def __getitem__(self, index: int | slice) -> ReplicaView | list[ReplicaView]:
        return self._read()[index]

    def _read(self) -> list[ReplicaView]:
        if self._views is None:
            self._views = [
                client.view(int(query.cached_tokens[row]))._replace(may_overdraw=self.may_overdraw)
                for table, query in zip(self._tables, self.queries, strict=True)
                for row, client in enumerate(table.clients)
                if client.is_ready and (query.is_allowed is None or query.is_allowed[row])
            ]
        return self._views


class RoutingPolicy(Protocol):
    """Chooses the replica of a request among the views of those that are ready; their `cached_tokens` are what the
    prefix index says. Without a replica the request waits. Gateway and simulator give `ReadyReplicas`."""

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView], /) -> Decision: ...


def production(random: Random, searching: Searching = IN_ARRAYS) -> RoutingPolicy:
    """The gateway's own policy. random: of which it draws among equals. searching: compares many."""

    def choose_replica(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if isinstance(views, ReadyReplicas) and views.num_listed > searching.max_viewed:
            asked = Request(request.num_tokens, request.expected_output_tokens)
            return searching.search(views.queries, asked, random, may_overdraw=views.may_overdraw)
        return choose(request.num_tokens, request.expected_output_tokens, views, random)

    return choose_replica
