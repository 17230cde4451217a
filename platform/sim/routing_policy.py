"""The seam for the choice of a replica: production's own policy, or another one that is compared with it.

Pure, but for what a policy remembers. Invariant: the same policy asked the same in the same order chooses the same.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

from penstock.router.routing.policy import Decision, ReplicaView, choose


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


class RoutingPolicy(Protocol):
    """Chooses the replica of a request among the views of those that are ready; their `cached_tokens` are what the
    prefix index says. Without a replica the request waits."""

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView], /) -> Decision: ...


def production(random: Random) -> RoutingPolicy:
    """The gateway's own policy. random: of which it draws among equals."""

    def choose_replica(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        return choose(request.num_tokens, request.expected_output_tokens, views, random)

    return choose_replica
