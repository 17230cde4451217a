"""The rivals' routing policies against examples worked out by hand, and one short contest in the simulator."""

from collections.abc import Callable
from random import Random

import pytest

from bench.routing import rivals
from bench.routing.seen import SeenPrefixes
from penstock.router.replicas.routing_policy import RoutedRequest, RoutingPolicy
from penstock.router.routing.policy import ReplicaView, UnreportedWork
from penstock.wire.frames import Load, StepCosts

KEYS = [b"%d" % number for number in range(10)]


def view(
    name: str, *, inflight: int = 0, cached: int = 0, waiting: int = 0, prefill: int = 0, free: int = 100
) -> ReplicaView:
    load = Load("epoch", 0, 64, 0, waiting, prefill, 0, free, 100, StepCosts(), 2048, False)
    return ReplicaView(name, "pool", load, UnreportedWork(), inflight, 16, 4096, cached)


def asked(num_keys: int = 10, num_tokens: int = 160) -> RoutedRequest:
    return RoutedRequest(num_tokens, 10.0, KEYS[:num_keys], 16, 0.0)


def chosen(policy: RoutingPolicy, *views: ReplicaView, request: RoutedRequest | None = None) -> str | None:
    return policy(request or asked(), views).replica_id


def test_round_robin_takes_them_in_turn() -> None:
    policy = rivals.round_robin(Random(0))

    assert [chosen(policy, view("a"), view("b"), view("c")) for _ in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("make", [rivals.least_requests, rivals.power_of_two])
def test_the_one_with_fewer_requests_of_two_is_taken(make: Callable[[Random], RoutingPolicy]) -> None:
    assert chosen(make(Random(0)), view("a", inflight=3), view("b", inflight=2)) == "b"


def test_sglang_keeps_to_the_prefix_until_the_balance_is_lost() -> None:
    policy = rivals.sglang_cache_aware(Random(0))

    first = chosen(policy, view("a"), view("b", inflight=1))  # nothing is known: the least requests
    again = chosen(policy, view("a", inflight=64), view("b"))  # 64 - 0 is not above 64
    lost = chosen(policy, view("a", inflight=65), view("b"))

    assert (first, again, lost) == ("a", "a", "b")


def test_sglang_takes_a_match_for_one_only_above_three_tenths() -> None:
    policy = rivals.sglang_cache_aware(Random(0))
    chosen(policy, view("a"), view("b", inflight=1), request=asked(3))  # a has three blocks of ten

    assert chosen(policy, view("a", inflight=1), view("b")) == "b"


def test_ray_takes_the_match_above_a_tenth_and_else_who_was_sent_least() -> None:
    policy = rivals.ray_prefix_affinity(Random(0))
    chosen(policy, view("a"), request=asked(2))

    assert chosen(policy, view("a", inflight=99), view("b")) == "a"  # 0.2 of the prompt, whatever the load
    other = RoutedRequest(160, 10.0, [b"other"], 16, 0.0)
    assert chosen(policy, view("a"), view("b", inflight=99), request=other) == "b"


def test_dynamo_adds_prefill_and_blocks_in_use() -> None:
    # 160 tokens are 10 blocks; a: 10 - 8 cached + 20 in use = 22; b: (160 + 160) / 16 + 0 = 20
    policy = rivals.dynamo(Random(0))

    assert chosen(policy, view("a", cached=128, free=80), view("b", prefill=160)) == "b"
    assert chosen(policy, view("a", cached=128, free=83), view("b", prefill=160)) == "a"  # 19 and 20


def test_llm_d_weighs_prefix_free_blocks_and_queue() -> None:
    # a: 2 * 0.5 + 1 * 0.4 + 1 * 0 = 1.4; b: 0 + 1 * 0.5 + 1 * 1 = 1.5
    policy = rivals.llm_d(Random(0))

    assert chosen(policy, view("a", cached=80, free=40, waiting=4), view("b", free=50)) == "b"
    assert chosen(policy, view("a", cached=80, free=60, waiting=4), view("b", free=50)) == "a"  # 1.6 and 1.5


def test_without_a_replica_each_policy_waits() -> None:
    assert [chosen(make(Random(0))) for make in rivals.POLICIES.values()] == [None] * 8


def test_what_was_sent_longest_ago_is_forgotten_the_deepest_first() -> None:
    seen = SeenPrefixes(5)
    seen.note("a", [b"x", b"y", b"z"])
    seen.note("a", [b"p", b"q", b"r"])

    assert seen.match("a", [b"x", b"y", b"z"]) == 2
    assert seen.match("a", [b"p", b"q", b"r"]) == 3
    assert seen.match("b", [b"p"]) == 0
    assert seen.num_blocks("a") == 5
