"""What an answer costs, whichever replicas computed it and however it ended."""

import pytest

from penstock.wire.frames import Delta, Finish
from penstock.wire.money import NANO
from tests.unit.router.fleet_fakes import STEP_S, Cluster, FakeMember, settle

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))
PRICE = 3600.0
"""A unit per second."""


async def test_an_answer_costs_its_share_of_the_steps() -> None:
    async with Cluster(A, prices={"pool": PRICE}) as cluster:
        stream = await cluster.start(PROMPT)
        await cluster.read(stream)
        stream.close()

        receipt = stream.receipt
        assert receipt.step_s == 8 * STEP_S
        assert receipt.cost_nano == 8 * STEP_S * NANO
        assert receipt.has_cost
        assert receipt.is_settled


async def test_without_a_price_the_time_is_known_and_no_cost() -> None:
    async with Cluster(A) as cluster:
        stream = await cluster.start(PROMPT)
        await cluster.read(stream)
        stream.close()

        assert stream.receipt.step_s == 8 * STEP_S
        assert not stream.receipt.has_cost
        assert stream.receipt.cost_nano == 0


async def test_an_answer_that_goes_on_elsewhere_costs_what_both_replicas_told() -> None:
    async with Cluster(A, B, prices={"pool": PRICE}) as cluster:
        stream = await cluster.start(PROMPT)
        first = stream.receipt.replica
        cluster.step()
        cluster.step()  # unread, but told
        cluster.replicas[first].die()
        tokens = await cluster.read(stream)
        stream.close()

        assert len(tokens) == 8
        assert [spending.step_s for spending in stream.receipt.spendings] == [2 * STEP_S, 6 * STEP_S]
        assert stream.receipt.is_settled


async def test_what_comes_after_an_abort_is_not_lost() -> None:
    async with Cluster(A, prices={"pool": PRICE}) as cluster:
        stream = await cluster.start(PROMPT)
        cluster.step()
        await stream.next()
        stream.close()
        [sid] = cluster.replicas["a"].aborts

        assert (stream.receipt.step_s, stream.receipt.is_settled) == (STEP_S, False)

        cluster.replicas["a"].send(Delta(sid, [7], step_s=0.75))
        cluster.replicas["a"].send(Delta(sid, [], Finish.ABORT, step_s=0.9))
        cluster.replicas["a"].send(Delta(sid, [], Finish.ABORT, step_s=5.0))

        assert (stream.receipt.step_s, stream.receipt.is_settled) == (0.9, True)


async def test_an_abort_that_a_lost_replica_answers_no_more_settles_at_what_was_told() -> None:
    async with Cluster(A, prices={"pool": PRICE}) as cluster:
        stream = await cluster.start(PROMPT)
        cluster.step()
        stream.close()
        cluster.replicas["a"].die()
        await settle()

        assert (stream.receipt.step_s, stream.receipt.is_settled) == (STEP_S, True)


async def test_an_answer_of_which_only_the_end_got_lost_keeps_what_it_cost() -> None:
    async with Cluster(A, B, prices={"pool": PRICE}) as cluster:
        stream = await cluster.start(PROMPT)
        running = next(iter(cluster.replicas[stream.receipt.replica].running.values()))
        for _ in range(7):
            cluster.step()
        replica = cluster.replicas[stream.receipt.replica]
        replica.send(Delta(running.submit.sid, [1], step_s=8 * STEP_S))
        replica.die()
        tokens = await cluster.read(stream)
        stream.close()

        assert len(tokens) == 8
        assert stream.receipt.cost_nano == pytest.approx(8 * STEP_S * NANO)
        assert len(stream.receipt.spendings) == 1
