"""Another choice of a replica in the dispatcher's place for one."""

import asyncio
from collections.abc import Sequence

from penstock.router.replicas.routing_policy import RoutedRequest
from penstock.router.routing.policy import Decision, Reason, ReplicaView, Wait
from penstock.wire.frames import split_keys
from tests.unit.router.fleet_fakes import BLOCK_SIZE, Cluster, FakeMember, settle

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))


async def test_another_policy_is_told_of_the_request_and_the_ready_replicas_and_its_choice_is_taken():
    asked: list[tuple[RoutedRequest, list[ReplicaView]]] = []

    def choose_last(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        asked.append((request, list(views)))
        return Decision(views[-1].replica_id, Reason.LEAST_LOADED)

    async with Cluster(A, B, routing=choose_last) as cluster:
        answers = [await cluster.start(PROMPT) for _ in range(3)]
        keys = split_keys(cluster.replicas["b"].submits[0].block_keys)
        for answer in answers:
            answer.close()

    assert [answer.receipt.replica for answer in answers] == ["b"] * 3
    (request, views), *_ = asked
    assert (request.num_tokens, request.block_size) == (len(PROMPT), BLOCK_SIZE)
    assert list(request.keys) == keys[: len(PROMPT) // BLOCK_SIZE]
    assert [view.replica_id for view in views] == ["a", "b"]
    assert [views[1].num_inflight for _, views in asked] == [0, 1, 2]


async def test_another_policy_may_choose_a_replica_without_credit():
    def choose_first(_: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        return Decision(views[0].replica_id, Reason.LEAST_LOADED)

    async with Cluster(A, B, max_inflight=1, routing=choose_first) as cluster:
        answers = [await cluster.start(PROMPT) for _ in range(3)]
        for answer in answers:
            answer.close()

    assert [answer.receipt.replica for answer in answers] == ["a"] * 3


async def test_a_request_waits_while_another_policy_chooses_none_and_goes_where_it_then_chooses():
    decisions = [Decision(None, Wait.NO_CREDIT), Decision("a", Reason.ONLY_REPLICA)]

    async with Cluster(A, routing=lambda _request, _views: decisions.pop(0)) as cluster:
        starting = asyncio.ensure_future(cluster.start(PROMPT))
        await settle()
        was_waiting = not starting.done()
        cluster.queue.wake("pool")
        answer = await starting
        answer.close()

    assert was_waiting
    assert answer.receipt.replica == "a"
    assert answer.receipt.predicted_ttft_s == 0.0
