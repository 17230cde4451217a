"""The replica's end of the token stream: a gRPC server of one bidirectional method, bytes in and out, between routers and the engine.

Not the engine, and no other service. All state belongs to one event loop; the engine's thread only hands reports over, once a step.
Invariants: every sequence in the engine belongs to one connected router, and is aborted when that router goes; a router gets only its own
deltas, in order, and every block event; what is held for a router that doesn't read is bounded.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import grpc
import grpc.aio
import msgspec

from penstock.wire.frames import (
    KEY_BYTES,
    PROTOCOL_VERSION,
    STREAM_METHOD,
    Abort,
    Announce,
    BlockEvents,
    Delta,
    Finish,
    Hello,
    Load,
    Submit,
    UpFrame,
    decode_up,
    encode,
    split_keys,
    unpack_ids,
)
from penstock.workers.config import EngineConfig
from penstock.workers.engine import EngineLoad, StepReport
from penstock.workers.outbox import Outbox, credit
from penstock.workers.sequence import SeqOutput, Sequence, Status

MAX_HELD_TOKENS = 65536
MAX_HELD_EVENT_BYTES = 32 * 2**20
"""Of one router that doesn't read; more, and it is cut off."""
MAX_FRAME_BYTES = 64 * 2**20
"""A snapshot of four million blocks."""
HELLO_TIMEOUT_S = 5.0
KEEPALIVE_MS = 5000
"""A router whose machine has vanished is noticed after twice that."""
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # what gRPC really waits for an answer; a minute, if not told
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Op: TypeAlias = Submit | Abort | Hello | Announce

log = logging.getLogger("penstock.stream")


class Engine(Protocol):
    """What the streams need of `penstock.workers.engine.Engine`; any thread may call it."""

    def submit(self, seq: Sequence) -> None: ...
    def abort(self, seq: Sequence) -> None: ...
    def request_snapshot(self, callback: Callable[[BlockEvents], None]) -> None: ...


class StreamInfo(NamedTuple):
    """What every load report repeats."""

    epoch: str
    num_places: int
    """Sequences in the engine at once, waiting ones included."""
    block_size: int
    max_batched_tokens: int

    @classmethod
    def of(cls, epoch: str, config: EngineConfig) -> "StreamInfo":
        return cls(epoch, config.max_num_seqs + config.admission_lookahead, config.block_size, config.max_batched_tokens)


class _Broken(Exception):
    """The stream can't go on; the router is told."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _Router:
    """A connected router copy."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.live: dict[int, Sequence] = {}
        """By sid."""
        self.outbox = Outbox()
        self.wake = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_due_s = 0.0
        self.overflow = asyncio.Event()
        self.last_sid = 0
        """Highest sid received."""
        self.counted_sid = 0
        """Highest sid that the engine's last report knows of. Written on the engine's thread."""
        self.told_credit = 0


class _Live:
    """A sequence in the engine."""

    __slots__ = ("is_fresh", "router", "sid")

    def __init__(self, router: _Router, sid: int) -> None:
        self.router = router
        self.sid = sid
        self.is_fresh = True
        """No delta of it went out yet."""


class _Submitted(NamedTuple):
    """A submission that no report is known to know of."""

    seq: Sequence
    router: _Router
    sid: int
    num_reports: int
    """Made when it was sent."""


class StreamServer:
    """Build it, give `on_step` to the engine, then `start`. Everything but `on_step` is for the loop that called `start`."""

    def __init__(self, info: StreamInfo, on_events: Callable[[BlockEvents], None], clock: Callable[[], float] = time.monotonic) -> None:
        """on_events: also gets all block events, in order, on the loop. clock: that of `Sequence.arrival_s`."""
        self._info = info
        self._on_events = on_events
        self._clock = clock
        self._routers: list[_Router] = []
        self._live: dict[Sequence, _Live] = {}
        self._submitted: deque[_Submitted] = deque()
        self._num_reports = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    async def start(self, engine: Engine, load: EngineLoad, host: str, port: int = 0) -> int:
        """Serve on host:port (0: a free one); returns the port. load: the engine's before its first step."""
        self._engine = engine
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._server = grpc.aio.server(options=_OPTIONS)
        service, method = STREAM_METHOD.removeprefix("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        bound: int = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return bound

    async def drain(self, timeout_s: float) -> bool:
        """Refuse what comes from now on, and wait for what runs; False: something still runs after `timeout_s`."""
        self._is_draining = True
        self._touch_loads(is_urgent=True)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float = 0.1) -> None:
        """End every stream; sequences that still run are aborted."""
        await self._server.stop(grace_s)

    @property
    def num_inflight(self) -> int:
        return len(self._live)

    # on the engine's thread

    def on_step(self, report: StepReport) -> None:
        """Take a step's report; never blocks."""
        self._count_submitted()
        self._loop.call_soon_threadsafe(self._deliver, report)

    def _on_snapshot(self, router: _Router, snapshot: BlockEvents) -> None:
        self._loop.call_soon_threadsafe(self._deliver_snapshot, router, snapshot)

    def _count_submitted(self) -> None:
        """The report knows of submissions that have been admitted, and of those sent before the report before: they came in before this step."""
        submitted = self._submitted
        while submitted and (submitted[0].seq.status is not Status.WAITING or submitted[0].num_reports < self._num_reports):
            sent = submitted.popleft()
            sent.router.counted_sid = sent.sid
        self._num_reports += 1

    # what the engine says

    def _deliver(self, report: StepReport) -> None:
        self._load = report.load
        if report.events is not None:
            self._on_events(report.events)
        for output in report.outputs:
            live = self._live.get(output.seq)
            if live is not None:  # else its router is gone
                self._pass_on(output, live)
        for router in self._routers:
            if report.events is not None:
                router.outbox.add_events(report.events)
            router.outbox.touch_load(is_urgent=self._is_unblocked(router))
            self._check_bounds(router)
            self._schedule(router)

    def _pass_on(self, output: SeqOutput, live: _Live) -> None:
        seq, token_ids, logprobs, finish = output
        if finish is not None:
            self._forget(seq, live)
        if live.is_fresh:
            live.is_fresh = False
            ttft_s = None if seq.first_token_s is None else seq.first_token_s - seq.arrival_s
            delta = Delta(live.sid, token_ids, finish, seq.num_cached_tokens, logprobs, seq.error, ttft_s)
        else:
            delta = Delta(live.sid, token_ids, finish, None, logprobs, seq.error)
        live.router.outbox.add(delta)

    def _forget(self, seq: Sequence, live: _Live) -> None:
        del self._live[seq]
        del live.router.live[live.sid]
        if not self._live:
            self._idle.set()

    def _deliver_snapshot(self, router: _Router, snapshot: BlockEvents) -> None:
        router.outbox.add_events(snapshot)
        self._check_bounds(router)
        self._schedule(router)

    def _check_bounds(self, router: _Router) -> None:
        if router.outbox.num_tokens > MAX_HELD_TOKENS or router.outbox.num_event_bytes > MAX_HELD_EVENT_BYTES:
            router.overflow.set()

    # what routers say

    def _take(self, router: _Router, ops: list[Op]) -> None:
        """Raises _Broken for what no router of ours would send."""
        for op in ops:
            if isinstance(op, Submit):
                self._submit(router, op)
            elif isinstance(op, Abort):
                seq = router.live.get(op.sid)
                if seq is not None:
                    self._engine.abort(seq)
            elif isinstance(op, Announce):
                self._engine.request_snapshot(partial(self._on_snapshot, router))
            else:
                raise _Broken(grpc.StatusCode.INVALID_ARGUMENT, "Only the first message of a stream is a Hello.")

    def _submit(self, router: _Router, op: Submit) -> None:
        if op.sid <= router.last_sid:
            raise _Broken(grpc.StatusCode.INVALID_ARGUMENT, f"Sequence numbers rise on a stream; {op.sid} came after {router.last_sid}.")
        _check(op)
        router.last_sid = op.sid
        if self._is_draining:
            router.outbox.add(Delta(op.sid, [], Finish.REFUSED, error="The replica is draining."))
            self._schedule(router)
            return
        seq = _sequence(op, self._clock())
        router.live[op.sid] = seq
        self._live[seq] = _Live(router, op.sid)
        self._idle.clear()
        self._submitted.append(_Submitted(seq, router, op.sid, self._num_reports))
        self._engine.submit(seq)

    # the frames down

    def _schedule(self, router: _Router) -> None:
        """Have the router's writer woken when its next frame is due."""
        due_s = router.outbox.due_s()
        if due_s is None or router.wake.is_set():
            return
        if router.timer is not None:
            if router.timer_due_s <= due_s:
                return
            router.timer.cancel()
            router.timer = None
        delay_s = due_s - self._clock()
        if delay_s <= 0:
            router.wake.set()
        else:
            router.timer, router.timer_due_s = self._loop.call_later(delay_s, self._on_timer, router), due_s

    def _on_timer(self, router: _Router) -> None:
        router.timer = None
        router.wake.set()

    def _touch_loads(self, *, is_urgent: bool = False) -> None:
        for router in self._routers:
            router.outbox.touch_load(is_urgent=is_urgent or self._is_unblocked(router))
            self._schedule(router)

    def _is_unblocked(self, router: _Router) -> bool:
        """Whether the router has, as it sees it, no credit left, and would if it knew."""
        num_inflight = len(router.live)
        return router.told_credit <= num_inflight < self._credit(router)

    def _credit(self, router: _Router) -> int:
        load, info = self._load, self._info
        lacks_kv = load.num_waiting > 0 and load.prefill_tokens_outstanding > load.free_blocks * info.block_size
        is_closed = self._is_draining or lacks_kv
        return credit(len(router.live), len(self._live), len(self._routers), info.num_places, is_closed=is_closed)

    def _load_for(self, router: _Router) -> Load:
        router.told_credit = self._credit(router)
        num_running, num_waiting, prefill_tokens, kv_tokens, free_blocks, total_blocks, event_seq, costs = self._load
        return Load(
            epoch=self._info.epoch,
            event_seq=event_seq,
            max_inflight=router.told_credit,
            num_running=num_running,
            num_waiting=num_waiting,
            prefill_tokens_outstanding=prefill_tokens,
            kv_tokens=kv_tokens,
            free_blocks=free_blocks,
            total_blocks=total_blocks,
            costs=costs,
            max_batched_tokens=self._info.max_batched_tokens,
            is_draining=self._is_draining,
            last_sid=router.counted_sid,
        )

    # one stream

    async def _serve(self, _requests: object, context: Context) -> None:
        """A router's stream, from its Hello to its end."""
        try:
            hello, *rest = await _first_ops(context)
            router = _Router(_router_id(hello))
            await self._converse(router, rest, context)
        except _Broken as broken:
            log.warning("stream broken", extra={"peer": context.peer(), "reason": broken.message})
            await context.abort(broken.code, broken.message)

    async def _converse(self, router: _Router, ops: list[Op], context: Context) -> None:
        """Serve the router until it goes, or can't be served any more; then nothing of it is left."""
        self._join(router)
        tasks: list[asyncio.Task[Any]] = []
        try:
            self._take(router, ops)
            tasks = [asyncio.create_task(part) for part in (self._read(router, context), self._write(router, context), _overflow(router))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            self._leave(router)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _join(self, router: _Router) -> None:
        log.info("router connected", extra={"router_id": router.router_id})
        self._routers.append(router)
        self._touch_loads()

    def _leave(self, router: _Router) -> None:
        log.info("router gone", extra={"router_id": router.router_id, "num_inflight": len(router.live)})
        self._routers.remove(router)
        if router.timer is not None:
            router.timer.cancel()
        for seq in list(router.live.values()):
            self._engine.abort(seq)
            self._forget(seq, self._live[seq])
        self._touch_loads()

    async def _read(self, router: _Router, context: Context) -> None:
        while (frame := await _read_frame(context)) is not None:
            self._take(router, frame.ops)

    async def _write(self, router: _Router, context: Context) -> None:
        outbox, wake = router.outbox, router.wake
        while True:
            self._schedule(router)
            await wake.wait()
            wake.clear()
            now_s = self._clock()
            frame = outbox.take(now_s, self._load_for(router) if outbox.wants_load(now_s) else None)
            if frame is not None:
                await context.write(encode(frame))


def _sequence(op: Submit, now_s: float) -> Sequence:
    token_ids = unpack_ids(op.token_ids)
    return Sequence(
        request_id=op.request_id,
        token_ids=token_ids,
        sampling=op.sampling,
        num_prompt_tokens=len(token_ids) - op.num_output_tokens,
        block_keys=split_keys(op.block_keys),
        chain_key=op.chain_key,
        arrival_s=now_s,
        deadline=op.deadline,
        adapter=op.adapter,
        tenant=op.tenant,
    )


def _check(op: Submit) -> None:
    """Raises _Broken for lengths that can't be."""
    has_odd_length = len(op.token_ids) % 4 or len(op.block_keys) % KEY_BYTES or len(op.chain_key) != KEY_BYTES
    if has_odd_length or not 0 <= op.num_output_tokens <= len(op.token_ids) // 4:
        raise _Broken(grpc.StatusCode.INVALID_ARGUMENT, f"Sequence {op.sid} is malformed.")


def _router_id(hello: Op) -> str:
    if not isinstance(hello, Hello):
        raise _Broken(grpc.StatusCode.INVALID_ARGUMENT, "The first message of a stream is a Hello.")
    if hello.protocol != PROTOCOL_VERSION:
        raise _Broken(grpc.StatusCode.FAILED_PRECONDITION, f"The router speaks protocol {hello.protocol}, this replica {PROTOCOL_VERSION}.")
    return hello.router_id


async def _first_ops(context: Context) -> list[Op]:
    """At least one; raises _Broken if there is none in time."""
    try:
        frame = await asyncio.wait_for(_read_frame(context), HELLO_TIMEOUT_S)
    except TimeoutError:
        raise _Broken(grpc.StatusCode.DEADLINE_EXCEEDED, f"No Hello came within {HELLO_TIMEOUT_S:.0f} s.") from None
    if frame is None or not frame.ops:
        raise _Broken(grpc.StatusCode.INVALID_ARGUMENT, "The first message of a stream is a Hello.")
    return frame.ops


async def _read_frame(context: Context) -> UpFrame | None:
    """None: the router has closed its half."""
    data = await context.read()
    if data is grpc.aio.EOF:
        return None
    try:
        return decode_up(data)
    except msgspec.MsgspecError:
        raise _Broken(grpc.StatusCode.INVALID_ARGUMENT, "A frame can't be decoded.") from None


async def _overflow(router: _Router) -> None:
    """Raises when more is held for the router than it may leave unread."""
    await router.overflow.wait()
    raise _Broken(grpc.StatusCode.RESOURCE_EXHAUSTED, "The router does not read its stream.")
