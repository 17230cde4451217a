"""Routing policies of other platforms, by the formulas and defaults in their sources (mid-2026), and simple ones.

None of them holds requests back: each sends at once, and the replica queues. All see loads that are 20 ms old and
requests of their own at once, which is fresher than what they read in production. What each reads of the cache:
nothing (round robin, least requests, power of two), what it has sent where (SGLang, Ray), or the replicas' own events
(Dynamo, llm-d), which are exact here.

Sources: SGLang `sgl-model-gateway/src/policies/cache_aware.rs`, defaults of the command line; Ray
`ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py`; Dynamo
`lib/kv-router/src/scheduling/selector.rs`; llm-d-router `deploy/config/epp-precise-prefix-cache-config.yaml`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random

from bench.routing.seen import SeenPrefixes
from penstock.router.replicas.routing_policy import RoutedRequest, RoutingPolicy, production
from penstock.router.routing.policy import Decision, Reason, ReplicaView, Wait

SGLANG_BALANCE_ABS, SGLANG_BALANCE_REL, SGLANG_CACHE_THRESHOLD = 64, 1.5, 0.3
SGLANG_TREE_BLOCKS = 2**26 // (4 * 16)
"""The bound of SGLang's tree, 2^26 characters, in blocks of 16 tokens at four characters a token."""
RAY_MATCH_RATE = 0.1
LLMD_PREFIX, LLMD_KV, LLMD_QUEUE = 2.0, 1.0, 1.0


def round_robin(_: Random) -> RoutingPolicy:
    turns = itertools.count()

    def choose(_request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        return _decide(views, next(turns) % len(views)) if views else _none()

    return choose


def least_requests(random: Random) -> RoutingPolicy:
    def choose(_request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        return _least(views, range(len(views)), lambda view: view.num_inflight, random) if views else _none()

    return choose


def power_of_two(random: Random) -> RoutingPolicy:
    def choose(_request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        return _of_two(views, range(len(views)), random) if views else _none()

    return choose


def sglang_cache_aware(random: Random) -> RoutingPolicy:
    """Least requests while the router's requests in flight are out of balance, else the replica that was sent the
    longest prefix, if that is more than 0.3 of the prompt."""
    seen = SeenPrefixes(SGLANG_TREE_BLOCKS)

    def choose(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if not views:
            return _none()
        loads = [view.num_inflight for view in views]
        low, high = min(loads), max(loads)
        matched = [seen.match(view.replica_id, request.keys) * request.block_size for view in views]
        is_unbalanced = high - low > SGLANG_BALANCE_ABS and high > SGLANG_BALANCE_REL * low
        if is_unbalanced or max(matched) <= SGLANG_CACHE_THRESHOLD * request.num_tokens:
            decision = _least(views, range(len(views)), lambda view: view.num_inflight, random)
        else:
            decision = _decide(views, matched.index(max(matched)))
        assert decision.replica_id is not None
        seen.note(decision.replica_id, request.keys)
        return decision

    return choose


def ray_prefix_affinity(random: Random) -> RoutingPolicy:
    """The shortest queue among the replicas that were sent the longest prefix, if that is a tenth of the
    prompt, else among those that were sent least; the switch to balance is off by default."""
    seen = SeenPrefixes(None)

    def choose(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if not views:
            return _none()
        matched = [seen.match(view.replica_id, request.keys) * request.block_size for view in views]
        best = max(matched)
        if best < RAY_MATCH_RATE * request.num_tokens:
            sizes = [seen.num_blocks(view.replica_id) for view in views]
            among = [place for place, size in enumerate(sizes) if size == min(sizes)]
        else:
            among = [place for place, tokens in enumerate(matched) if tokens == best]
        decision = _least(views, among, lambda view: view.num_inflight, random)
        assert decision.replica_id is not None
        seen.note(decision.replica_id, request.keys)
        return decision

    return choose


def dynamo(random: Random) -> RoutingPolicy:
    """The lowest of prefill blocks, those cached there taken off, plus blocks in use."""

    def choose(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        def cost(view: ReplicaView) -> float:
            work, load = view.work, view.load
            prefill = (work.prefill_tokens + request.num_tokens) / view.block_size
            in_use = load.total_blocks - load.free_blocks + view.unreported.prefill_tokens / view.block_size
            return max(0.0, prefill - view.cached_tokens // view.block_size) + in_use

        return _least(views, range(len(views)), cost, random) if views else _none()

    return choose


def llm_d(random: Random) -> RoutingPolicy:
    """The highest weighted sum of: part of the prompt cached, part of the KV cache free, shortness of the queue among
    the replicas."""

    def choose(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if not views:
            return _none()
        queues = [view.load.num_waiting for view in views]
        low, high = min(queues), max(queues)
        total_blocks = max(1, request.num_tokens // request.block_size)

        def score(view: ReplicaView) -> float:
            queue = 1.0 if high == low else (high - view.load.num_waiting) / (high - low)
            prefix = min(1.0, view.cached_tokens // view.block_size / total_blocks)
            free = view.load.free_blocks / view.load.total_blocks
            return LLMD_PREFIX * prefix + LLMD_KV * free + LLMD_QUEUE * queue

        return _least(views, range(len(views)), lambda view: -score(view), random)

    return choose


POLICIES: Mapping[str, Callable[[Random], RoutingPolicy]] = {
    "round robin": round_robin,
    "least requests": least_requests,
    "power of two": power_of_two,
    "SGLang": sglang_cache_aware,
    "Ray": ray_prefix_affinity,
    "Dynamo": dynamo,
    "llm-d": llm_d,
    "ours": production,
}


def _decide(views: Sequence[ReplicaView], place: int) -> Decision:
    return Decision(views[place].replica_id, Reason.LEAST_LOADED, cached_tokens=views[place].cached_tokens)


def _none() -> Decision:
    return Decision(None, Wait.NO_REPLICA)


def _least(
    views: Sequence[ReplicaView], places: Sequence[int], cost: Callable[[ReplicaView], float], random: Random
) -> Decision:
    """The one with the least cost; one drawn of several."""
    costs = {place: cost(views[place]) for place in places}
    best = min(costs.values())
    return _decide(views, random.choice([place for place, value in costs.items() if value == best]))


def _of_two(views: Sequence[ReplicaView], places: Sequence[int], random: Random) -> Decision:
    drawn = random.sample(places, min(2, len(places)))
    return _decide(views, min(drawn, key=lambda place: views[place].num_inflight))
