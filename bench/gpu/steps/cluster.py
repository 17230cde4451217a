"""A gateway's dispatch and replicas in one process, over the real stream: everything between the HTTP surface and the
kernels but Ray and Redis. Replicas share weights and have a cache and an engine each."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from bench.gpu.steps.engines import Weights, engine_config, make_runner
from bench.gpu.steps.shapes import BLOCK_SIZE, Bench, Variant
from bench.gpu.steps.sizes import Scale
from penstock.base.metrics import Metrics
from penstock.base.subsecrets import block_secret, replica_secrets
from penstock.prefix.hashing import ChainHasher
from penstock.prefix.plain_index import PlainIndex
from penstock.router.config import GatewayConfig, PoolSpec
from penstock.router.dispatch.dispatcher import RoutingDispatcher
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.shares.charges import Charges
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting import WaitQueue
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.link import Greeter, connect
from penstock.router.replicas.replica_client import Link, make_pool_callbacks
from penstock.router.replicas.replica_client import Member as ListedMember
from penstock.router.routing.chains import Chains
from penstock.router.routing.request import Generation
from penstock.wire.discovery import StartTimes
from penstock.wire.frames import PROTOCOL_VERSION, Ability, DownFrame, SamplingParams, StepCosts, pack_token_ids
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, EngineLoad
from penstock.workers.serving.adapters import Adapters
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.opening import Door
from penstock.workers.serving.stream import StreamServer

POOL = "pool"
SECRET = bytes(range(32))
HOST = "127.0.0.1"
DEADLINE_S = 100.0
READY_S = 60.0
MAX_RANK = 16


class Member(NamedTuple):
    """A replica as discovery would list it."""

    replica_id: str
    address: str
    epoch: str
    max_model_len: int
    stream_key_id: str
    pool: str = POOL
    model_digest: str = "random weights"
    block_size: int = BLOCK_SIZE
    protocol: int = PROTOCOL_VERSION
    abilities: frozenset[str] = frozenset({Ability.PROMPT_LOGPROBS, Ability.TOKEN_MASKS})
    has_private_prefixes: bool = False
    start: StartTimes | None = None


class Replica(NamedTuple):
    member: Member
    engine: Engine
    server: StreamServer

    def kill(self) -> None:
        """End its streams at once, as the loss of the process would. The engine goes on by itself until it is
        stopped."""
        self.server.stop()


class Answer(NamedTuple):
    token_ids: list[int]
    ttft_s: float
    tpot_s: float
    attempts: int
    replica: str


class Cluster:
    """Use `open_cluster`."""

    def __init__(self, replicas: Sequence[Replica], dispatcher: RoutingDispatcher, fleet: Fleet) -> None:
        self.replicas = replicas
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._numbers = itertools.count()

    async def ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        adapter: str | None = None,
        prediction: Sequence[int] = (),
        begun: Callable[[], None] = lambda: None,
    ) -> Answer:
        """The whole answer. begun: called at its first token. Raises PenstockError."""
        name = str(next(self._numbers))
        packed, deadline = pack_token_ids(prompt), time.monotonic() + DEADLINE_S
        generation = Generation(
            name, (POOL,), packed, len(prompt), sampling, "tenant", b"salt", deadline, adapter,
            prediction=pack_token_ids(prediction),
        )  # fmt: skip
        began_s = time.perf_counter()
        stream = await self._dispatcher.start(generation)
        try:
            return await _read(stream, began_s, begun)
        finally:
            stream.close()

    def is_ready(self, count: int) -> bool:
        """Whether so many replicas have a stream and have reported."""
        return len(self._fleet.ready_clients([POOL])) >= count

    @property
    def num_accepted_drafts(self) -> int:
        loads = [client.load for client in self._fleet.ready_clients([POOL])]
        return sum(load.num_accepted for load in loads if load is not None)


async def _read(stream: Mailbox, began_s: float, begun: Callable[[], None]) -> Answer:
    token_ids: list[int] = []
    first_s = last_s = began_s
    while True:
        delta = await stream.next()
        last_s = time.perf_counter()
        if not token_ids and delta.token_ids:
            first_s = last_s
            begun()
        token_ids += delta.token_ids
        if delta.finish is not None:
            tpot_s = (last_s - first_s) / max(1, len(token_ids) - 1)
            return Answer(token_ids, first_s - began_s, tpot_s, stream.receipt.attempts, stream.receipt.replica)


@asynccontextmanager
async def open_cluster(
    bench: Bench, variant: Variant, weights: Weights, scale: Scale, num_replicas: int, adapters_folder: Path
) -> AsyncIterator[Cluster]:
    """A cluster whose replicas are ready; all of it is gone afterwards."""
    config = engine_config(scale, has_drafts=True)
    replicas: list[Replica] = []
    try:
        for number in range(num_replicas):
            replicas.append(await _start(number, bench, variant, weights, scale, config, adapters_folder))
        changed = asyncio.Event()
        fleet, dispatcher = _make_gateway(scale, changed)
        async with fleet:
            cluster = Cluster(replicas, dispatcher, fleet)
            fleet.update([replica.member for replica in replicas])
            async with asyncio.timeout(READY_S):
                while not cluster.is_ready(num_replicas):
                    changed.clear()
                    await changed.wait()
            yield cluster
    finally:
        for replica in replicas:
            replica.server.stop()
            await asyncio.to_thread(replica.engine.stop)


async def _start(
    number: int, bench: Bench, variant: Variant, weights: Weights, scale: Scale, config: EngineConfig, folder: Path
) -> Replica:
    """What `penstock.workers.replica` makes of a pool's settings, but for the checkpoint, Ray and Redis."""
    epoch, secrets = uuid.uuid4().hex, replica_secrets(SECRET)
    server = StreamServer(StreamInfo.of(epoch, config), lambda _events: None, Door(secrets.stream, epoch))
    runner = await asyncio.to_thread(make_runner, bench, variant, weights, scale, has_drafts=True)
    engine = Engine(runner, config, ChainHasher(secrets.block, config.block_size), server.on_step)
    await asyncio.to_thread(engine.start)
    idle = EngineLoad(0, 0, 0, 0, runner.num_blocks, runner.num_blocks, 0, StepCosts(base_s=0.02))
    adapters = Adapters(folder, partial(runner.load_adapter, max_rank=MAX_RANK), 4)
    port = await server.start(engine, idle, HOST, adapters=adapters)
    key_id = secrets.stream_key_id.hex()
    return Replica(Member(f"replica-{number}", f"{HOST}:{port}", epoch, scale.max_model_len, key_id), engine, server)


def _make_gateway(scale: Scale, changed: asyncio.Event) -> tuple[Fleet, RoutingDispatcher]:
    """What `penstock.router.app` makes, from the fleet of links to the dispatcher. changed: set with each report of a
    replica."""
    config, metrics, index = GatewayConfig(), Metrics(), PlainIndex()
    pool = PoolSpec(
        name=POOL, served_names=("m",), tier="edge", model="random", app_name=POOL, max_model_len=scale.max_model_len
    )
    pools = {POOL: pool}
    counters = VirtualCounters()
    queue = WaitQueue(config.max_queue, config.queue_timeout_s, counters, config.tenant_queue_share)
    greeter = Greeter("gateway", SECRET, accepts_previous=False)

    def open_link(
        member: ListedMember, on_frame: Callable[[DownFrame], None], on_lost: Callable[[], None]
    ) -> AbstractAsyncContextManager[Link]:
        return connect(member.address, greeter.greet(member), on_frame, on_lost)

    def wake(pool: str, replica_id: str) -> None:
        queue.wake(pool, replica_id)
        changed.set()

    fleet = Fleet(pools, open_link, index, make_pool_callbacks(metrics, pools, wake), Random(0))
    dispatcher = RoutingDispatcher(
        pools, fleet, index, queue, Charges(counters), Chains(block_secret(SECRET)), config, metrics, Random(0)
    )
    return fleet, dispatcher
