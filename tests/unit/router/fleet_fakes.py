"""Replicas that answer through the link's seam without a network: each token is a hash of all before it, so that a gap
or a repeat shows."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

import msgspec

from penstock.base.metrics import Metrics
from penstock.prefix.plain_index import PlainIndex
from penstock.router.config import GatewayConfig, PoolSpec, ProviderConfig
from penstock.router.dispatch.dispatcher import RoutingDispatcher
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.shares.charges import Charges
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting import WaitQueue
from penstock.router.providers.caps import ProviderCaps
from penstock.router.providers.provider import Providers
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import Link, Member, make_pool_callbacks
from penstock.router.replicas.routing_policy import RoutingPolicy
from penstock.router.routing.chains import Chains
from penstock.router.routing.request import Generation
from penstock.tenancy.limits import Limiter
from penstock.tenancy.share import DEFAULT_SHARE, Share
from penstock.wire.discovery import StartTimes
from penstock.wire.frames import (
    PROTOCOL_VERSION,
    Ability,
    BlockEvents,
    Constraint,
    Delta,
    DownFrame,
    Finish,
    Load,
    SamplingParams,
    StepCosts,
    Submit,
    pack_token_ids,
    unpack_token_ids,
)
from penstock.wire.targets import NO_TARGETS, ClassTargets

BLOCK_SIZE = 4
COSTS = StepCosts(base_s=0.01, row_s=0.002, prefill_token_s=0.001)
STEP_S = 0.5
"""Seconds of a step that are a sequence's."""
SECRET = b"0123456789abcdef"


def next_token(history: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(pack_token_ids(history), digest_size=2).digest(), "little")


def answer_to(prompt: list[int], num_tokens: int) -> list[int]:
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class FakeMember:
    replica_id: str
    pool: str = "pool"
    address: str = "127.0.0.1:1"
    epoch: str = "epoch-1"
    model_digest: str = "digest"
    max_model_len: int = 1000
    block_size: int = BLOCK_SIZE
    protocol: int = PROTOCOL_VERSION
    stream_key_id: str = "00" * 16
    abilities: frozenset[str] = frozenset(Ability)
    has_private_prefixes: bool = False
    start: StartTimes | None = None


@dataclass
class Running:
    submit: Submit
    history: list[int]
    num_output: int
    is_begun: bool = False
    step_s: float = 0.0


@dataclass
class FakeReplica:
    """One process behind a member's address. It does nothing by itself: tests call `step`, `report`, `die`."""

    member: FakeMember
    max_inflight: int = 8
    is_up: bool = True
    num_connects: int = 0
    num_announces: int = 0
    is_closed: bool = False
    running: dict[int, Running] = field(default_factory=dict)
    submits: list[Submit] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    adapter_ops: list[tuple[str, str]] = field(default_factory=list)
    """Adapters to load and to drop."""
    last_sid: int = 0
    on_frame: Callable[[DownFrame], None] | None = None
    on_lost: Callable[[], None] | None = None

    def submit(self, submit: Submit) -> None:
        self.submits.append(submit)
        self.last_sid = submit.sid
        self.running[submit.sid] = Running(submit, unpack_token_ids(submit.packed_token_ids), submit.num_output_tokens)

    def abort(self, sid: int) -> None:
        self.aborts.append(sid)
        self.running.pop(sid, None)

    def announce(self) -> None:
        self.num_announces += 1

    def load_adapter(self, digest: str, tenant: str = "") -> None:
        self.adapter_ops.append((f"load for {tenant}" if tenant else "load", digest))

    def drop_adapter(self, digest: str) -> None:
        self.adapter_ops.append(("drop", digest))

    def load(self, **changes: object) -> Load:
        load = Load(
            self.member.epoch,
            0,
            self.max_inflight,
            len(self.running),
            0,
            0,
            0,
            1000,
            1000,
            COSTS,
            512,
            last_sid=self.last_sid,
        )
        return msgspec.structs.replace(load, **changes)

    def send(self, *deltas: Delta, load: Load | None = None, events: list[BlockEvents] | None = None) -> None:
        assert self.on_frame is not None
        self.on_frame(DownFrame(list(deltas), load, events))

    def report(self, **changes: object) -> None:
        self.send(load=self.load(**changes))

    def step(self, num_tokens: int = 1) -> None:
        """Every sequence gains tokens; all in one frame."""
        self.send(*[self._delta(sid, running, num_tokens) for sid, running in list(self.running.items())])

    def finish(self, sid: int, finish: Finish, error: str | None = None) -> None:
        del self.running[sid]
        self.send(Delta(sid, [], finish=finish, error=error))

    def die(self) -> None:
        self.is_up = False
        self.running.clear()
        assert self.on_lost is not None
        self.on_lost()

    def _delta(self, sid: int, running: Running, num_tokens: int) -> Delta:
        tokens = answer_to(running.history, min(num_tokens, running.submit.sampling.max_tokens - running.num_output))
        running.history += tokens
        running.num_output += len(tokens)
        is_done = running.num_output >= running.submit.sampling.max_tokens
        if is_done:
            del self.running[sid]
        first, running.is_begun = not running.is_begun, True
        running.step_s += STEP_S
        return Delta(
            sid,
            tokens,
            finish=Finish.LENGTH if is_done else None,
            num_cached_tokens=self.cached_tokens if first else None,
            step_s=running.step_s,
        )


def _plain_queue(config: GatewayConfig, counters: VirtualCounters, max_share: float) -> WaitQueue:
    return WaitQueue(config.max_queue, config.queue_timeout_s, counters, max_share)


class Cluster:
    """Fake replicas, and a router over them."""

    def __init__(
        self,
        *members: FakeMember,
        config: GatewayConfig | None = None,
        max_inflight: int = 8,
        providers: Sequence[ProviderConfig] = (),
        make_queue: Callable[[GatewayConfig, VirtualCounters, float], WaitQueue] | None = None,
        on_demand: Sequence[str] = (),
        routing: RoutingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        prices: Mapping[str, float] = MappingProxyType({}),
        targets: ClassTargets = NO_TARGETS,
        limiter: Limiter | None = None,
    ) -> None:
        """Pools whose name begins with `cloud` are of that tier, others of the edge. make_queue: another queue than the
        plain one, given the counters and a tenant's share of it. on_demand: pools that get their first replica when a
        request comes. routing: another choice of a replica. clock: the dispatcher's, monotonic seconds. prices: per
        hour, by pool. targets: of all pools. limiter: where what providers may cost is reserved; None: nothing caps
        that."""
        self.config = config or GatewayConfig()
        self.members = list(members)
        self.replicas = {member.replica_id: FakeReplica(member, max_inflight) for member in members}
        pools = {
            name: PoolSpec(
                name=name,
                served_names=("m",),
                tier="cloud" if name.startswith("cloud") else "edge",
                model="demo",
                app_name=name,
                max_model_len=1000,
                starts_on_demand=name in on_demand,
                price_per_hour=prices.get(name),
                targets=targets,
                keeps_tpot=True,
            )
            for name in sorted({member.pool for member in members} | {"pool", *on_demand})
        }
        self.ready_in_s: float | None = None
        """Seconds until a first replica should be there, as the autoscaler says."""
        self.seeds: dict[str, BlockEvents] = {}
        self.index = PlainIndex()
        self.counters = VirtualCounters()
        self.charges = Charges(self.counters)
        self.queue = (make_queue or _plain_queue)(self.config, self.counters, self.config.tenant_queue_share)
        self.metrics = Metrics()
        self.fleet = Fleet(
            pools,
            self.connect,
            self.index,
            make_pool_callbacks(self.metrics, pools, self.queue.wake),
            Random(0),
            self.seed,
        )
        self.chains = Chains(SECRET)
        self.providers = Providers(providers, {}, self.queue.wake, self.metrics)
        self.caps = (
            None
            if limiter is None
            else ProviderCaps(limiter, providers, self.config.provider_cap, self.metrics, Random(0))
        )
        self.dispatcher = RoutingDispatcher(
            pools,
            self.fleet,
            self.index,
            self.queue,
            self.charges,
            self.chains,
            self.config,
            self.metrics,
            Random(0),
            self.providers.by_name,
            ready_in_s=lambda _pool: self.ready_in_s,
            routing=routing,
            clock=clock,
            caps=self.caps,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Cluster":
        await self._stack.enter_async_context(self.providers)
        await self._stack.enter_async_context(self.fleet)
        self.fleet.update(self.members)
        await settle()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()
        self.check_empty()

    async def seed(self, epoch: str) -> BlockEvents | None:
        return self.seeds.get(epoch)

    def check_empty(self) -> None:
        assert len(self.queue) == 0
        assert len(self.charges) == 0
        assert len(self.dispatcher._trials) == 0
        assert not any(status.num_inflight for status in self.fleet.status().values())
        assert not any(replica.running for replica in self.replicas.values())

    @asynccontextmanager
    async def connect(
        self, member: Member, on_frame: Callable[[DownFrame], None], on_lost: Callable[[], None]
    ) -> AsyncIterator[Link]:
        replica = self.replicas[member.replica_id]
        replica.num_connects += 1
        if not replica.is_up:
            raise ConnectionRefusedError(member.replica_id)
        replica.on_frame, replica.on_lost, replica.is_closed = on_frame, on_lost, False
        replica.report()
        try:
            yield replica
        finally:
            replica.is_closed = True
            replica.running.clear()

    def step(self, num_tokens: int = 1) -> None:
        for replica in self.replicas.values():
            if replica.running:
                replica.step(num_tokens)

    async def start(self, prompt: list[int], **changes: object) -> Mailbox:
        return await self.dispatcher.start(generation(prompt, **changes))

    async def read(self, stream: Mailbox) -> list[int]:
        """The rest of the stream, its replica stepping whenever nothing is there."""
        tokens: list[int] = []
        while True:
            reading = asyncio.ensure_future(stream.next())
            await settle()
            while not reading.done():
                self.step()
                await settle()
            delta = reading.result()
            tokens += delta.token_ids
            if delta.finish is not None:
                return tokens

    def counted(self, name: str, **labels: str) -> float:
        """What a counter of the pool has come to."""
        return self.metrics.registry.get_sample_value(name, {"pool": "pool", **labels}) or 0.0

    def attempts(self, reason: str) -> float:
        return (
            self.metrics.registry.get_sample_value("penstock_route_attempts_total", {"pool": "pool", "reason": reason})
            or 0.0
        )


def generation(
    prompt: list[int],
    max_tokens: int = 8,
    request_id: str = "r",
    salt: bytes = b"salt",
    pools: tuple[str, ...] = ("pool",),
    deadline_in_s: float = 60.0,
    adapter: str | None = None,
    tenant: str = "tenant",
    share: Share = DEFAULT_SHARE,
    constraint: Constraint | None = None,
) -> Generation:
    sampling, deadline = SamplingParams(max_tokens, seed=5), time.monotonic() + deadline_in_s
    return Generation(
        request_id,
        pools,
        pack_token_ids(prompt),
        len(prompt),
        sampling,
        tenant,
        salt,
        deadline,
        adapter,
        share=share,
        constraint=constraint,
    )
