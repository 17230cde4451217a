import asyncio
from dataclasses import replace

import pytest

from penstock.router.dispatch.mailbox import Mailbox
from penstock.wire.frames import AdapterCount, BlockEvents, StepCosts, TimeAccounts
from tests.unit.router.fleet_fakes import Cluster, FakeMember, FakeReplica, answer_to, settle

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(30))
KEY = b"k" * 16


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch):
    monkeypatch.setattr("penstock.router.replicas.fleet.FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr("penstock.router.replicas.fleet.MAX_BACKOFF_S", 0.0)
    monkeypatch.setattr("penstock.router.replicas.fleet.LAST_WORDS_S", 0.0)


async def test_members_are_connected_and_asked_for_their_blocks():
    async with Cluster(A, B) as cluster:
        assert cluster.fleet.status()["pool"].num_connected == 2
        assert [replica.num_announces for replica in cluster.replicas.values()] == [1, 1]


async def test_members_of_pools_that_are_not_configured_are_left_alone():
    async with Cluster(A) as cluster:
        cluster.fleet.update([A, FakeMember("x", pool="another")])
        await settle()

        assert cluster.fleet.status()["pool"].num_listed == 1


async def test_the_costs_of_a_pool_are_the_mean_of_its_ready_replicas():
    async with Cluster(A, B) as cluster:
        for name, base_s in (("a", 0.01), ("b", 0.03)):
            cluster.replicas[name].send(load=cluster.replicas[name].load(costs=StepCosts(base_s=base_s)))

        assert cluster.fleet.mean_costs("pool").base_s == pytest.approx(0.02)
    assert cluster.fleet.mean_costs("pool") == StepCosts()


async def test_a_lost_link_to_a_listed_member_is_made_again():
    async with Cluster(A) as cluster:
        replica = cluster.replicas["a"]
        assert replica.on_lost is not None
        replica.on_lost()
        assert cluster.fleet.ready_clients(["pool"]) == []
        await settle()

        assert replica.num_connects == 2
        assert cluster.fleet.status()["pool"].num_connected == 1


async def test_a_member_that_cannot_be_reached_is_tried_again():
    cluster = Cluster(A)
    cluster.replicas["a"].is_up = False
    async with cluster:
        assert cluster.replicas["a"].num_connects > 1
        assert cluster.fleet.status()["pool"].num_connected == 0
        cluster.replicas["a"].is_up = True
        await settle()

        assert cluster.fleet.status()["pool"].num_connected == 1


async def start_and_unlist(cluster: Cluster) -> tuple[Mailbox, FakeReplica]:
    """A stream with two tokens on a replica that is then listed no more."""
    stream = await cluster.start(PROMPT)
    gone = cluster.replicas[stream.receipt.replica]
    gone.step(2)
    gone.send(events=[BlockEvents(1, stored=KEY, is_snapshot=True)])
    cluster.fleet.update([member for member in cluster.members if member.replica_id != gone.member.replica_id])
    await settle()
    return stream, gone


async def test_an_idle_member_that_is_unlisted_is_closed():
    async with Cluster(A, B) as cluster:
        cluster.replicas["a"].send(events=[BlockEvents(1, stored=KEY, is_snapshot=True)])
        cluster.fleet.update([B])
        assert cluster.fleet.status()["pool"].num_listed == 1
        await settle()

        assert cluster.index.held("a") == frozenset()
        assert cluster.replicas["a"].is_closed


async def test_an_idle_member_that_is_unlisted_is_heard_until_it_has_drained(monkeypatch):
    monkeypatch.setattr("penstock.router.replicas.fleet.LAST_WORDS_S", 10.0)
    async with Cluster(A, B) as cluster:
        gone, client = cluster.replicas["a"], cluster.fleet.client("a")
        cluster.fleet.update([B])
        await settle()
        gone.report(is_draining=True, accounts=TimeAccounts(drain_s=1.5))
        assert client is not None
        assert client.load is not None
        assert client.load.accounts == TimeAccounts(drain_s=1.5)
        assert [each.member for each in cluster.fleet.ready_clients(["pool"])] == [B]
        gone.die()
        await settle()

        assert gone.num_connects == 1
        assert cluster.index.held("a") == frozenset()


async def test_an_unlisted_member_finishes_its_streams_and_gets_no_new_ones():
    async with Cluster(A, B) as cluster:
        stream, gone = await start_and_unlist(cluster)
        status = cluster.fleet.status()["pool"]
        assert (status.num_listed, status.num_connected, status.num_inflight) == (1, 1, 0)
        assert [client.member.replica_id for client in cluster.fleet.ready_clients(["pool"])] != [
            gone.member.replica_id
        ]
        others = [await cluster.start(PROMPT) for _ in range(4)]
        assert gone.member.replica_id not in {other.receipt.replica for other in others}
        assert not gone.is_closed

        assert await cluster.read(stream) == answer_to(PROMPT, 8)
        assert stream.receipt.attempts == 1
        await settle()
        assert (gone.is_closed, gone.num_connects) == (True, 1)
        assert cluster.index.held(gone.member.replica_id) == frozenset()
        for each in (stream, *others):
            each.close()


async def test_an_unlisted_member_whose_last_stream_is_closed_is_closed():
    async with Cluster(A, B) as cluster:
        stream, gone = await start_and_unlist(cluster)
        stream.close()
        await settle()

        assert (gone.is_closed, gone.aborts, gone.num_connects) == (True, [1], 1)


async def test_an_unlisted_member_that_dies_is_resumed_elsewhere():
    async with Cluster(A, B) as cluster:
        stream, gone = await start_and_unlist(cluster)
        gone.die()
        tokens = await cluster.read(stream)
        stream.close()

        assert tokens == answer_to(PROMPT, 8)
        assert (stream.receipt.attempts, gone.num_connects) == (2, 1)


async def test_an_unlisted_member_that_is_listed_again_is_used_again():
    async with Cluster(A, B) as cluster:
        stream, gone = await start_and_unlist(cluster)
        cluster.fleet.update(cluster.members)
        assert cluster.fleet.status()["pool"].num_connected == 2
        await cluster.read(stream)
        stream.close()
        await settle()

        assert (gone.is_closed, gone.num_connects) == (False, 1)
        assert cluster.index.held(gone.member.replica_id) == {KEY}


async def test_who_waited_while_no_member_was_listed_is_served_when_one_is_listed_again():
    async with Cluster(A) as cluster:
        cluster.fleet.update([])
        starting = asyncio.ensure_future(cluster.start(PROMPT))
        await settle()
        assert not starting.done()
        cluster.fleet.update([A])
        stream = await starting
        assert stream.receipt.replica == "a"
        stream.close()


async def test_a_new_process_under_the_id_of_a_retiring_one_takes_its_place():
    async with Cluster(A) as cluster:
        stream, gone = await start_and_unlist(cluster)
        again = replace(A, epoch="epoch-2")
        cluster.replicas["a"] = FakeReplica(again)
        cluster.fleet.update([again])
        await settle()
        assert gone.is_closed

        assert await cluster.read(stream) == answer_to(PROMPT, 8)
        stream.close()
        assert cluster.fleet.ready_clients(["pool"])[0].member.epoch == "epoch-2"


async def test_leaving_the_fleet_ends_retiring_members_too():
    async with Cluster(A, B) as cluster:
        stream, gone = await start_and_unlist(cluster)
    stream.close()

    assert gone.is_closed
    assert len(asyncio.all_tasks()) == 1


async def test_a_lost_replica_has_no_entries_in_the_index():
    async with Cluster(A) as cluster:
        replica = cluster.replicas["a"]
        replica.send(events=[BlockEvents(1, stored=KEY, is_snapshot=True)])
        assert cluster.index.held("a") == {KEY}
        replica.die()

        assert cluster.index.held("a") == frozenset()


async def test_a_new_epoch_is_a_new_process():
    async with Cluster(A) as cluster:
        cluster.replicas["a"].send(events=[BlockEvents(1, stored=KEY, is_snapshot=True)])
        old = cluster.replicas["a"]
        again = replace(A, epoch="epoch-2")
        cluster.replicas["a"] = FakeReplica(again)
        cluster.fleet.update([again])
        await settle()

        assert old.is_closed
        assert cluster.index.held("a") == frozenset()
        assert cluster.fleet.ready_clients(["pool"])[0].member.epoch == "epoch-2"


async def test_the_late_end_of_an_old_link_does_not_touch_the_new_one():
    async with Cluster(A) as cluster:
        old = cluster.replicas["a"]
        again = replace(A, epoch="epoch-2")
        new = cluster.replicas["a"] = FakeReplica(again)
        cluster.fleet.update([again])
        await settle()
        new.send(events=[BlockEvents(1, stored=KEY, is_snapshot=True)])
        assert old.on_lost is not None
        old.on_lost()
        old.send(events=[BlockEvents(9, is_snapshot=True)], load=old.load())

        assert cluster.index.held("a") == {KEY}
        assert len(cluster.fleet.ready_clients(["pool"])) == 1


async def test_a_process_of_another_epoch_behind_the_address_is_not_used():
    async with Cluster(A) as cluster:
        cluster.replicas["a"].report(epoch="epoch-2")

        assert cluster.fleet.ready_clients(["pool"]) == []


async def test_what_replicas_drafted_since_their_last_load_is_counted_once():
    async with Cluster(A) as cluster:
        replica = cluster.replicas["a"]
        replica.report(num_drafted=10, num_accepted=4)
        replica.report(num_drafted=10, num_accepted=4)
        replica.report(num_drafted=13, num_accepted=7)

        assert (
            cluster.counted("penstock_draft_tokens_total"),
            cluster.counted("penstock_accepted_draft_tokens_total"),
        ) == (13, 7)


async def test_kernels_that_replicas_compiled_since_their_last_load_are_counted_once():
    async with Cluster(A) as cluster:
        replica = cluster.replicas["a"]
        assert b'penstock_compiled_kernels_total{pool="pool"} 0.0' in cluster.metrics.render()  # a first one is seen
        replica.report(num_compiled=0)
        replica.report(num_compiled=2)
        replica.report(num_compiled=2)
        replica.report(num_compiled=3)

        assert cluster.counted("penstock_compiled_kernels_total") == 3


async def test_what_becomes_of_adapters_at_replicas_is_counted_once_and_known_by_adapter_and_tenant():
    async with Cluster(A) as cluster:
        replica = cluster.replicas["a"]
        replica.report(adapter_totals=(5, 2, 2, 0), adapter_counts=(AdapterCount("x", "t", 5, 2, 2, 0),))
        replica.report(adapter_totals=(5, 2, 2, 0))
        replica.report(adapter_totals=(7, 2, 3, 1), adapter_counts=(AdapterCount("x", "t", 7, 2, 3, 1),))

        assert cluster.counted("penstock_adapter_uses_total", outcome="hit") == 7
        assert cluster.counted("penstock_adapter_uses_total", outcome="wait") == 2
        assert cluster.counted("penstock_adapter_loads_total") == 3
        assert cluster.counted("penstock_adapter_evictions_total") == 1
        (client,) = cluster.fleet.ready_clients(["pool"])
        assert client.adapter_counts == {("x", "t"): AdapterCount("x", "t", 7, 2, 3, 1)}


async def test_a_gap_asks_once_for_a_snapshot():
    async with Cluster(A) as cluster:
        replica = cluster.replicas["a"]
        replica.send(events=[BlockEvents(1, stored=KEY, is_snapshot=True)])
        replica.send(events=[BlockEvents(3, stored=b"l" * 16)])
        replica.send(events=[BlockEvents(4, stored=b"m" * 16)])
        assert (replica.num_announces, cluster.counted("penstock_index_gaps_total")) == (2, 1)
        replica.send(
            events=[
                BlockEvents(4, stored=KEY + b"l" * 16 + b"m" * 16, is_snapshot=True),
                BlockEvents(5, removed=KEY),
            ]
        )

        assert cluster.index.held("a") == {b"l" * 16, b"m" * 16}
        assert replica.num_announces == 2


async def test_events_before_the_first_snapshot_are_no_gap():
    async with Cluster(A) as cluster:
        cluster.replicas["a"].send(events=[BlockEvents(7, stored=KEY)])

        assert (cluster.replicas["a"].num_announces, cluster.counted("penstock_index_gaps_total")) == (1, 0)


async def test_leaving_the_fleet_closes_every_link():
    async with Cluster(A, B) as cluster:
        pass

    assert all(replica.is_closed for replica in cluster.replicas.values())


async def test_a_link_starts_from_the_shared_copy_and_goes_on_with_the_events_behind_it():
    cluster = Cluster(A)
    cluster.seeds["epoch-1"] = BlockEvents(4, stored=KEY, is_snapshot=True)
    async with cluster:
        replica = cluster.replicas["a"]
        replica.report(event_seq=4)
        replica.send(events=[BlockEvents(5, stored=b"l" * 16)], load=replica.load(event_seq=5))

        assert cluster.index.held("a") == {KEY, b"l" * 16}
        assert (replica.num_announces, cluster.counted("penstock_index_gaps_total")) == (0, 0)


async def test_a_shared_copy_that_is_behind_is_noticed_at_the_next_load():
    cluster = Cluster(A)
    cluster.seeds["epoch-1"] = BlockEvents(4, stored=KEY, is_snapshot=True)
    async with cluster:
        replica = cluster.replicas["a"]
        assert cluster.index.held("a") == {KEY}
        replica.report(event_seq=5)
        assert cluster.index.held("a") == frozenset()
        replica.report(event_seq=5)
        replica.send(events=[BlockEvents(6, stored=b"m" * 16)])
        assert cluster.index.held("a") == frozenset()
        replica.send(events=[BlockEvents(6, stored=b"l" * 16, is_snapshot=True)])

        assert cluster.index.held("a") == {b"l" * 16}
        assert (replica.num_announces, cluster.counted("penstock_index_gaps_total")) == (
            1,
            0,
        )  # no event got lost: it was the copy that lagged


async def test_the_snapshot_heals_a_gap():
    async with Cluster(A) as cluster:
        replica = cluster.replicas["a"]
        replica.send(events=[BlockEvents(5, stored=KEY, is_snapshot=True)])
        replica.send(events=[BlockEvents(7, stored=KEY)])
        replica.send(events=[BlockEvents(7, stored=b"l" * 16, is_snapshot=True)], load=replica.load(event_seq=7))

        assert cluster.index.held("a") == {b"l" * 16}
        assert replica.num_announces == 2
