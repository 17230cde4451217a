"""Receipts beside the clocks of replicas, over the real stream and without Ray: engines that play timed steps, with
drafts, aborts and a replica that is lost in the middle of its answers.

The whole platform, with adapters and processes that die: test_cost and `bench.cost`.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import NamedTuple

import pytest
from msgspec.structs import astuple

from penstock.base.metrics import Metrics
from penstock.base.subsecrets import block_secret, replica_secrets
from penstock.prefix.hashing import ChainHasher
from penstock.prefix.plain_index import PlainIndex
from penstock.router.config import GatewayConfig, PoolSpec
from penstock.router.dispatch.dispatcher import RoutingDispatcher
from penstock.router.dispatch.shares.charges import Charges
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting import WaitQueue
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.link import Greeter, connect
from penstock.router.replicas.pool_costs import PoolCosts
from penstock.router.replicas.replica_client import Link, Member, make_pool_callbacks
from penstock.router.routing.chains import Chains
from penstock.router.routing.request import Receipt
from penstock.wire.frames import DownFrame, StepCosts
from penstock.wire.money import shown
from penstock.workers.config import EngineConfig, SpeculationConfig, TimedConfig
from penstock.workers.engine.engine import Engine, EngineLoad
from penstock.workers.engine.timed import TimedRunner
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.opening import Door
from penstock.workers.serving.stream import StreamServer
from tests.unit.router.fleet_fakes import FakeMember, generation

POOL, HOST, SECRET = "pool", "127.0.0.1", bytes(range(32))
PRICE = 3600.0
"""A unit per second: costs are seconds."""
CONFIG = EngineConfig(
    runner="timed",
    block_size=16,
    max_num_seqs=8,
    speculation=SpeculationConfig(method="ngram"),
    timed=TimedConfig(base_s=0.004, row_s=0.0002, prefill_token_s=0.00002, draft_token_s=0.0001),
)
WITHIN_S = 20.0
UNTOLD_S = 0.2
"""Ample for the step that a replica is computing when it is lost; the course takes a second."""


class Replica(NamedTuple):
    member: FakeMember
    engine: Engine
    server: StreamServer
    began_s: float


class Cluster(NamedTuple):
    replicas: list[Replica]
    dispatcher: RoutingDispatcher
    costs: PoolCosts
    fleet: Fleet


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what is waited for happens behind a socket)
        await asyncio.sleep(0.005)


async def start_replica(number: int) -> Replica:
    began_s = time.monotonic()
    epoch, secrets = uuid.uuid4().hex, replica_secrets(SECRET)
    server = StreamServer(StreamInfo.of(epoch, CONFIG), lambda _: None, Door(secrets.stream, epoch))
    runner = TimedRunner(CONFIG)
    engine = Engine(
        runner,
        CONFIG,
        ChainHasher(secrets.block, CONFIG.block_size),
        server.on_step,
        measure_costs=lambda *_: runner.costs,
        began_s=began_s,
    )
    await asyncio.to_thread(engine.start)
    idle = EngineLoad(0, 0, 0, 0, runner.num_blocks, runner.num_blocks, 0, StepCosts(base_s=0.004))
    port = await server.start(engine, idle, HOST)
    member = FakeMember(
        f"replica-{number}",
        POOL,
        f"{HOST}:{port}",
        epoch,
        block_size=CONFIG.block_size,
        stream_key_id=secrets.stream_key_id.hex(),
    )
    return Replica(member, engine, server, began_s)


@asynccontextmanager
async def running(num_replicas: int) -> AsyncIterator[Cluster]:
    replicas = [await start_replica(number) for number in range(num_replicas)]
    config, counters, index = GatewayConfig(), VirtualCounters(), PlainIndex()
    pool = PoolSpec(
        name=POOL, served_names=("m",), tier="edge", model="m", app_name=POOL, max_model_len=1000, price_per_hour=PRICE
    )
    pools = {POOL: pool}
    costs = PoolCosts(pools, time.monotonic)
    queue = WaitQueue(config.max_queue, config.queue_timeout_s, counters, config.tenant_queue_share)
    greeter = Greeter("gateway", SECRET, accepts_previous=False)

    def open_link(
        member: Member, on_frame: Callable[[DownFrame], None], on_lost: Callable[[], None]
    ) -> AbstractAsyncContextManager[Link]:
        return connect(member.address, greeter.greet(member), on_frame, on_lost)

    callbacks = make_pool_callbacks(Metrics(), pools, queue.wake, costs.take)
    try:
        async with asyncio.timeout(WITHIN_S), Fleet(pools, open_link, index, callbacks, Random(0)) as fleet:
            dispatcher = RoutingDispatcher(
                pools,
                fleet,
                index,
                queue,
                Charges(counters),
                Chains(block_secret(SECRET)),
                config,
                Metrics(),
                Random(0),
            )
            fleet.update([replica.member for replica in replicas])
            await until(lambda: len(fleet.ready_clients([POOL])) == num_replicas)
            yield Cluster(replicas, dispatcher, costs, fleet)
    finally:
        for replica in replicas:
            replica.server.stop()
            await asyncio.to_thread(replica.engine.stop)


async def ask(cluster: Cluster, number: int) -> Receipt:
    """Read an answer, every third only in part."""
    draw = Random(number)
    prompt = [draw.randrange(2, 50) for _ in range(draw.randrange(4, 60))]
    stream = await cluster.dispatcher.start(generation(prompt, draw.randrange(5, 60), f"r{number}"))
    num_left = draw.randrange(1, 5) if number % 3 == 0 else 10**9
    try:
        while num_left and (await stream.next()).finish is None:
            num_left -= 1
    finally:
        stream.close()
    return stream.receipt


async def test_receipts_are_the_time_of_the_steps_and_with_the_rest_the_time_that_passed() -> None:
    async with running(2) as cluster:
        asking = [asyncio.create_task(ask(cluster, number)) for number in range(36)]
        await until(lambda: sum(task.done() for task in asking) >= 9)
        lost, kept = cluster.replicas
        lost.server.stop()  # to its router it is lost, in the middle of its answers
        lost_s = time.monotonic()
        cluster.fleet.update([kept.member])
        receipts = await asyncio.gather(*asking)
        await until(lambda: all(receipt.is_settled for receipt in receipts))
        now = time.monotonic()
        lived = lost_s - lost.began_s + now - kept.began_s
        kept_accounts = kept.engine.accounts()
        cluster.costs.take(POOL, kept.member.epoch, kept_accounts)
        totals = {kind: shown(nano) for (_, kind), nano in cluster.costs.totals_nano().items()}

    assert sum(receipt.attempts > 1 for receipt in receipts), "no answer was resumed"
    assert totals["requests"] == pytest.approx(sum(receipt.step_s for receipt in receipts), rel=0.01)
    assert sum(astuple(kept_accounts)) == pytest.approx(now - kept.began_s, abs=UNTOLD_S)
    assert sum(totals.values()) == pytest.approx(lived, abs=UNTOLD_S)
    assert sum(shown(receipt.cost_nano) for receipt in receipts) == pytest.approx(
        sum(receipt.step_s for receipt in receipts)
    )
