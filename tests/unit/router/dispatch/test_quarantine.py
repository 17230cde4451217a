import asyncio
from collections.abc import Sequence

import pytest

from penstock.router.dispatch import dispatcher
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.quarantine import MAX_LOSSES, NEAR_TOKENS, Loss, find_most_suspicious
from penstock.wire.errors import EngineFault
from tests.unit.router.fleet_fakes import Cluster, FakeMember, answer_to, settle

POISON = [666] * 8
NO_TOKEN, BEGUN = Loss(0, False), Loss(5, True)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request on trial has as long for its first token as its deadline allows."""
    monkeypatch.setattr(dispatcher, "LONGEST_S", 600.0)


@pytest.mark.parametrize(
    ("histories", "blamed"),
    [
        ([], set()),
        ([[BEGUN, Loss(40, True)]], {0}),
        ([[BEGUN, Loss(40, True)], [BEGUN, Loss(90, True)]], {0, 1}),
        ([[BEGUN, Loss(40, True)], [BEGUN, Loss(5 + NEAR_TOKENS - 1, True)]], {1}),
        ([[BEGUN, Loss(5 + NEAR_TOKENS, True)], [BEGUN, Loss(5, False)]], {1}),
        ([[BEGUN, Loss(5, False)], [NO_TOKEN, NO_TOKEN], [NO_TOKEN, Loss(1, True)]], {1}),
    ],
)
def test_of_those_at_two_losses_the_most_suspicious_end(histories: list[list[Loss]], blamed: set[int]) -> None:
    assert find_most_suspicious(histories) == blamed


class Stream:
    """A stream that is read all the time."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.tokens: list[int] = []
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while True:
                delta = await self.mailbox.next()
                self.tokens += delta.token_ids
                if delta.finish is not None:
                    return
        finally:
            self.mailbox.close()


def is_poisoned(cluster: Cluster, name: str) -> bool:
    return any(running.history[:8] == POISON for running in cluster.replicas[name].running.values())


async def kill_poisoned(cluster: Cluster) -> int:
    """Kill each replica that the poison is on; returns how many."""
    poisoned = [name for name in cluster.replicas if is_poisoned(cluster, name)]
    for name in poisoned:
        cluster.replicas[name].die()
    await settle()
    return len(poisoned)


async def lose_a_with(cluster: Cluster, count: int) -> list[Stream]:
    """Streams of nine tokens on replica a, lost before their first one; b is there."""
    cluster.fleet.update([FakeMember("a")])
    streams = [Stream(await cluster.start([number] * 8, max_tokens=9)) for number in range(count)]
    cluster.fleet.update([FakeMember("a"), FakeMember("b")])
    await settle()
    cluster.replicas["a"].die()
    await settle()
    return streams


async def finish(cluster: Cluster, streams: Sequence[Stream]) -> None:
    while not all(stream.task.done() for stream in streams):
        cluster.step()
        await settle()


@pytest.mark.parametrize("num_before", [0, 3])  # tokens before it kills for the first time
async def test_a_request_that_kills_its_replicas_kills_two_and_none_of_its_neighbours(num_before: int) -> None:
    async with Cluster(*[FakeMember(str(number)) for number in range(4)], max_inflight=40) as cluster:
        innocent = [
            Stream(await cluster.start([number] * 8, request_id=f"i{number}", max_tokens=60)) for number in range(32)
        ]
        cluster.step()
        await settle()
        poison = Stream(await cluster.start(POISON, request_id="poison", max_tokens=60))
        for _ in range(num_before):
            cluster.step()
            await settle()
        num_killed = 0
        while not all(stream.task.done() for stream in (*innocent, poison)):
            while num_now := await kill_poisoned(cluster):  # before it gives the poison a token
                num_killed += num_now
            cluster.step()
            await settle()

        assert num_killed == MAX_LOSSES
        with pytest.raises(EngineFault, match=r"request poison ran on 2 replicas when they were lost"):
            await poison.task
        if num_before == 0:  # later the neighbours that it met twice are no less suspicious
            assert [stream.tokens for stream in innocent] == [answer_to([number] * 8, 60) for number in range(32)]
        for stream in innocent:
            stream.task.exception()


async def test_of_requests_that_came_together_the_one_that_kills_ends_alone() -> None:
    async with Cluster(*[FakeMember(str(number)) for number in range(4)], max_inflight=40) as cluster:
        cluster.fleet.update([FakeMember("0")])
        prompts = [*[[number] * 8 for number in range(5)], POISON, *[[number] * 8 for number in range(5, 9)]]
        streams = [
            Stream(await cluster.start(prompt, request_id=f"r{number}", max_tokens=20))
            for number, prompt in enumerate(prompts)
        ]
        cluster.fleet.update([FakeMember(str(number)) for number in range(4)])
        num_killed = 0
        while not all(stream.task.done() for stream in streams):
            while num_now := await kill_poisoned(cluster):
                num_killed += num_now
            cluster.step()
            await settle()

        assert num_killed == MAX_LOSSES
        poison = streams.pop(5)
        with pytest.raises(EngineFault):
            await poison.task
        prompts.pop(5)
        assert [stream.tokens for stream in streams] == [answer_to(prompt, 20) for prompt in prompts]


async def test_a_request_that_gets_no_token_holds_up_the_next_ones_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "LONGEST_S", 0.05)
    async with Cluster(FakeMember("a"), FakeMember("b"), max_inflight=40) as cluster:
        streams = await lose_a_with(cluster, 4)
        others = cluster.replicas["b"]
        async with asyncio.timeout(10):
            while len(others.running) < 4:  # noqa: ASYNC110 (the fake has no event)
                await asyncio.sleep(0.01)
        await settle()
        assert all(stream.mailbox.receipt.queued_s >= 0.05 * place for place, stream in enumerate(streams))
        await finish(cluster, streams)
        assert [stream.tokens for stream in streams] == [answer_to([number] * 8, 9) for number in range(4)]


async def test_the_next_one_goes_when_the_one_before_is_closed_or_has_its_token() -> None:
    async with Cluster(FakeMember("a"), FakeMember("b"), max_inflight=40) as cluster:
        streams = await lose_a_with(cluster, 3)
        others = cluster.replicas["b"]
        assert len(others.submits) == 1
        streams[0].task.cancel()
        await settle()
        assert len(others.submits) == 2
        cluster.step()
        await settle()
        assert len(others.submits) == 3
        await finish(cluster, streams)


async def test_those_that_must_wait_for_a_place_are_told_apart_when_there_is_one() -> None:
    async with Cluster(FakeMember("a"), FakeMember("b"), FakeMember("c"), max_inflight=40) as cluster:
        cluster.fleet.update([FakeMember("a")])
        prompts = [[1] * 8, POISON, [2] * 8]
        streams = [Stream(await cluster.start(prompt, max_tokens=5)) for prompt in prompts]
        await settle()
        cluster.replicas["a"].die()
        cluster.fleet.update([])
        await settle()
        cluster.fleet.update([FakeMember("b"), FakeMember("c")])
        num_killed = 0
        while not all(stream.task.done() for stream in streams):
            while num_now := await kill_poisoned(cluster):
                num_killed += num_now
            cluster.step()
            await settle()

        assert num_killed == 1, "and the first one, which died by itself"
        with pytest.raises(EngineFault):
            await streams.pop(1).task
        assert [stream.tokens for stream in streams] == [answer_to([number] * 8, 5) for number in (1, 2)]


async def test_those_that_have_got_tokens_since_a_loss_go_on_together_when_their_replica_leaves() -> None:
    async with Cluster(FakeMember("a"), FakeMember("b"), FakeMember("c"), max_inflight=40) as cluster:
        streams = await lose_a_with(cluster, 3)
        for _ in range(3):
            cluster.step()
            await settle()
        cluster.fleet.update([FakeMember("b"), FakeMember("c")])
        await settle()
        cluster.replicas["b"].report(is_draining=True)
        cluster.replicas["b"].die()
        await settle()
        assert len(cluster.replicas["c"].running) == 3
        await finish(cluster, streams)


async def test_neighbours_that_got_further_than_where_they_were_lost_are_not_blamed() -> None:
    async with Cluster(FakeMember("a"), FakeMember("b"), FakeMember("c"), max_inflight=40) as cluster:
        cluster.fleet.update([FakeMember("a")])
        poison = Stream(await cluster.start(POISON, request_id="poison", max_tokens=60))
        neighbour = Stream(await cluster.start([1] * 8, request_id="n", max_tokens=60))
        cluster.step()
        await settle()
        cluster.fleet.update([FakeMember("a"), FakeMember("b")])
        await settle()
        cluster.replicas["a"].die()
        await settle()
        replica = cluster.replicas["b"]
        (sid,) = [sid for sid, running in replica.running.items() if running.history[:8] != POISON]
        replica.send(replica._delta(sid, replica.running[sid], NEAR_TOKENS))
        await settle()
        cluster.fleet.update([FakeMember("b"), FakeMember("c")])
        await settle()
        replica.die()
        await settle()
        with pytest.raises(EngineFault):
            await poison.task
        while not neighbour.task.done():
            cluster.step()
            await settle()

        assert neighbour.tokens == answer_to([1] * 8, 60)
        assert neighbour.mailbox.receipt.attempts == 3


async def test_a_replica_that_was_leaving_does_not_count_as_lost() -> None:
    async with Cluster(*[FakeMember(str(number)) for number in range(4)]) as cluster:
        stream = Stream(await cluster.start([1] * 8, max_tokens=9))
        for _ in range(3):
            cluster.step()
            await settle()
            replica = cluster.replicas[stream.mailbox.receipt.replica]
            replica.report(is_draining=True)
            replica.die()
            await settle()
        while not stream.task.done():
            cluster.step()
            await settle()

        assert stream.tokens == answer_to([1] * 8, 9)
        assert stream.mailbox.receipt.attempts == 4
