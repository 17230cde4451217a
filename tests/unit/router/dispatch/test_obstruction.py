"""The effect of a change at a replica on those that wait: nobody is passed over who would have been placed."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from penstock.router.config import GatewayConfig
from penstock.router.dispatch.attempt import Attempt, AttemptResult, MayHelp
from penstock.router.dispatch.holds import Hold
from penstock.router.dispatch.lane import Claim, Lane
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting import WaitQueue
from penstock.tenancy.share import Share
from penstock.wire.frames import BlockEvents
from tests.unit.router.fleet_fakes import Cluster, FakeMember, generation, settle


class CheckedQueue(WaitQueue):
    """A queue that tries each head at every change, and compares: where no help was expected, it must have to wait."""

    num_spared = num_tried = 0

    async def admit(
        self,
        lane: Lane,
        attempt: Attempt,
        claim: Claim,
        *,
        deadline_in_s: float,
        may_help: MayHelp,
        hold: Hold | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> AttemptResult:
        def check(replica_id: str) -> bool:
            is_helped = may_help(replica_id)
            result = attempt() if not is_helped else None
            assert result in (None, AttemptResult.MUST_WAIT), (lane, replica_id)
            self.num_spared += not is_helped
            self.num_tried += is_helped
            return is_helped

        return await super().admit(
            lane, attempt, claim, deadline_in_s=deadline_in_s, may_help=check, hold=hold, on_wait=on_wait
        )


def make_cluster(num_replicas: int, reserved_places: float, max_inflight: int) -> tuple[Cluster, CheckedQueue]:
    members = [FakeMember(f"replica-{number}") for number in range(num_replicas)]
    queues: list[CheckedQueue] = []

    def make_queue(config: GatewayConfig, counters: VirtualCounters, max_share: float) -> CheckedQueue:
        queues.append(CheckedQueue(config.max_queue, config.queue_timeout_s, counters, max_share))
        return queues[0]

    config = GatewayConfig(reserved_places=reserved_places)
    cluster = Cluster(*members, config=config, max_inflight=max_inflight, make_queue=make_queue)
    return cluster, queues[0]


@pytest.mark.parametrize(("num_replicas", "reserved_places"), [(2, 0.0), (2, 0.3), (5, 0.0), (5, 0.3)])
async def test_who_is_not_tried_again_would_have_had_to_wait(num_replicas: int, reserved_places: float) -> None:
    random, num_spared, num_tried = Random(num_replicas), 0, 0
    for _ in range(3):
        cluster, queue = make_cluster(num_replicas, reserved_places, max_inflight=4)
        async with cluster:
            starts = [
                asyncio.ensure_future(
                    cluster.dispatcher.start(
                        generation(
                            [random.randrange(9) for _ in range(random.choice((8, 8, 40, 300)))],
                            request_id=f"r{number}",
                            tenant=f"tenant-{number % 3}",
                            share=Share(weight=random.choice((1.0, 2.0))),
                        )
                    )
                )
                for number in range(14 * num_replicas)
            ]
            await settle()
            for _ in range(120):
                random.choice(changes(cluster, random))()
                await settle()
            num_spared, num_tried = num_spared + queue.num_spared, num_tried + queue.num_tried
            await close(starts)
    assert num_spared > 50
    assert num_tried > 5


async def test_a_tenant_that_is_below_its_share_again_is_tried_again() -> None:
    async with Cluster(FakeMember("a"), max_inflight=0) as cluster:
        dispatcher, is_below = cluster.dispatcher, [True]
        dispatcher._obstructions._may_overdraw = lambda _state, _num_places: is_below[0]
        mailbox = Mailbox(dispatcher._new_state(generation([1, 2, 3]), None), dispatcher, 8)
        assert dispatcher._try_place(mailbox) is AttemptResult.MUST_WAIT
        cluster.replicas["a"].report(num_waiting=1000)
        told = []
        for is_below[0] in (True, False, True):
            told.append(dispatcher._may_help(mailbox, "a"))
        mailbox.close()

    assert told == [False, False, True]


def changes(cluster: Cluster, random: Random) -> list[Callable[[], None]]:
    """What may happen next."""
    replica = random.choice(list(cluster.replicas.values()))
    free = random.choice((0, 3, 10, 1000))
    stored = b"".join(submit.block_keys for submit in replica.submits[-3:])
    return [
        replica.report,
        lambda: replica.report(free_blocks=free),
        lambda: replica.report(free_blocks=free, num_waiting=random.randrange(5)),
        lambda: replica.report(is_draining=random.random() < 0.3),
        lambda: replica.step(random.randrange(1, 5)) if replica.running else None,
        lambda: replica.send(events=[BlockEvents(len(replica.submits), stored, is_snapshot=True)]),
    ]


async def close(starts: list[asyncio.Future[Mailbox]]) -> None:
    for start in starts:
        start.cancel()
    for result in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(result, Mailbox):
            result.close()
        elif not isinstance(result, asyncio.CancelledError):
            raise result
    await settle()
