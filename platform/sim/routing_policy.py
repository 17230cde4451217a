"""The seam for the choice of a replica: production's own policy, or another one that is compared with it.

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
    """The ready replicas of a route as a request finds them: their views, made when one is read, and the tables from
    which production decides. queries: one for each table. may_overdraw: whether the tenant has less than its share."""

    def __init__(self, tables: Sequence[PoolTable], queries: Sequence[PoolQuery], *, may_overdraw: bool) -> None:
        self.queries = queries
        self.may_overdraw = may_overdraw
        self._tables = tables
        self._views: list[ReplicaView] | None = None

    def __len__(self) -> int:
        return sum([len(table.clients) for table in self._tables])

    @overload
    def __getitem__(self, index: int) -> ReplicaView: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReplicaView]: ...
    def __getitem__(self, index: int | slice) -> ReplicaView | list[ReplicaView]:
        if self._views is None:
            found = zip(self._tables, self.queries, strict=True)
            self._views = [
                client.view(int(cached_tokens))._replace(may_overdraw=self.may_overdraw)
                for table, query in found
                for client, cached_tokens in zip(table.clients, query.cached_tokens, strict=True)
            ]
        return self._views[index]


class RoutingPolicy(Protocol):
    """Chooses the replica of a request among the views of those that are ready; their `cached_tokens` are what the
    prefix index says. Without a replica the request waits. The simulator gives `ReadyReplicas`."""

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView], /) -> Decision: ...


def production(random: Random, searching: Searching = IN_ARRAYS) -> RoutingPolicy:
    """The gateway's own policy. random: of which it draws among equals. searching: compares many."""

    def choose_replica(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if isinstance(views, ReadyReplicas) and len(views) > searching.max_viewed:
            asked = Request(request.num_tokens, request.expected_output_tokens)
            return searching.search(views.queries, asked, random, may_overdraw=views.may_overdraw)
        return choose(request.num_tokens, request.expected_output_tokens, views, random)

    return choose_replica
