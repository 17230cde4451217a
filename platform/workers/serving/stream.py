"""The replica's end of the token stream: a server of channels between routers and the engine.

Not the engine, and no other service. All state belongs to one event loop, in callbacks; the engine's thread only hands
reports over, once a step. Invariants: every sequence in the engine belongs to one connected router, and is aborted when
that router goes; a router gets only its own deltas, in order, and every block event; what is held for a router that
doesn't read is bounded.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from penstock.wire.channel import Channel
from penstock.wire.frames import (
    Abort,
    Announce,
    BlockEvents,
    Delta,
    DownFrame,
    DropAdapter,
    Finish,
    Hello,
    Load,
    LoadAdapter,
    Op,
    Submit,
    Timing,
    decode_up,
    encode,
)
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import EngineLoad, StepReport
from penstock.workers.engine.sequence import Resident, SeqOutput, Sequence, Status
from penstock.workers.serving.adapters import Adapters, Want
from penstock.workers.serving.intake import Broken, check, router_id_of, sequence_of
from penstock.workers.serving.outbox import Outbox, credit

MAX_HELD_TOKENS = 65536
MAX_HELD_EVENT_BYTES = 32 * 2**20
"""Of one router that doesn't read; more, and it is cut off."""
HELLO_TIMEOUT_S = 5.0
TIMER_S = 0.001
"""Resolution of the event loop's timers."""
HEARTBEAT_S = 1.0
"""A router hears of the replica at least so often."""

log = logging.getLogger("penstock.stream")


class Engine(Protocol):
    """What the streams need of `penstock.workers.engine.engine.Engine`; any thread may call it."""

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
        return cls(
            epoch, config.max_num_seqs + config.admission_lookahead, config.block_size, config.max_batched_tokens
        )


class _Router:
    """A connected router copy."""

    def __init__(self, router_id: str, channel: Channel) -> None:
        self.router_id = router_id
        self.channel = channel
        self.live: dict[int, Sequence] = {}
        """By sid."""
        self.outbox = Outbox()
        self.timer: asyncio.TimerHandle | None = None
        self.timer_due_s = 0.0
        self.last_sid = 0
        """Highest sid received."""
        self.counted_sid = 0
        """Highest sid that the report delivered last knows of."""
        self.told_credit = 0


class _Connection:
    """A channel, and the router at its other end once that has said Hello."""

    def __init__(self, server: "StreamServer", loop: asyncio.AbstractEventLoop) -> None:
        self.channel = Channel(self._on_message, self._on_end, self._on_writable)
        self.router: _Router | None = None
        self._server = server
        self._hello_timer = loop.call_later(
            HELLO_TIMEOUT_S, self._break, f"No Hello came within {HELLO_TIMEOUT_S:.0f} s."
        )

    def _on_message(self, data: bytes) -> None:
        try:
            ops = decode_up(data).ops
            if self.router is None:
                self.router = _Router(router_id_of(ops, self._server.is_trusted), self.channel)
                self._hello_timer.cancel()
                self._server.join(self.router)
                del ops[0]
            self._server.take(self.router, ops)
        except msgspec.MsgspecError:
            self._break("A frame can't be decoded.")
        except Broken as broken:
            self._break(str(broken))

    def _break(self, reason: str) -> None:
        log.warning("stream broken", extra={"peer": self.channel.peer, "reason": reason})
        self.channel.send(encode(DownFrame([], error=reason)))
        self.channel.close()

    def _on_writable(self) -> None:
        if self.router is not None:
            self._server.schedule(self.router)

    def _on_end(self, _error: Exception | None) -> None:
        self._hello_timer.cancel()
        if self.router is not None:
            self._server.leave(self.router)
        self._server.connections.discard(self)


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
    """Build it, give `on_step` to the engine, then `start`. Everything but `on_step` is for the loop that called
    `start`."""

    def __init__(
        self,
        info: StreamInfo,
        on_events: Callable[[BlockEvents], None],
        is_trusted: Callable[[Hello], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_events: also gets all block events, in order, on the loop. is_trusted: whether a router may have a stream.
        clock: that of `Sequence.arrival_s`."""
        self.is_trusted = is_trusted
        self._info = info
        self._on_events = on_events
        self._clock = clock
        self.connections: set[_Connection] = set()
        self._routers: list[_Router] = []
        self._live: dict[Sequence, _Live] = {}
        self._parked: dict[Sequence, Want] = {}
        """Sequences that wait for their adapter, not in the engine yet."""
        self._submitted: deque[_Submitted] = deque()
        self._num_reports = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    async def start(
        self, engine: Engine, load: EngineLoad, host: str, port: int = 0, adapters: Adapters | None = None
    ) -> int:
        """Serve on host:port (0: a free one); returns the port. load: the engine's before its first step. adapters:
        None where there are none."""
        self._engine = engine
        self._adapters = adapters
        if adapters is not None:
            adapters.on_change = partial(self._touch_loads, is_urgent=True)
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(self._accept, host, port)
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._beat)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def _accept(self) -> Channel:
        connection = _Connection(self, self._loop)
        self.connections.add(connection)
        return connection.channel

    async def drain(self, timeout_s: float) -> bool:
        """Refuse what comes from now on, and wait for what runs; False: something still runs after `timeout_s`."""
        self._is_draining = True
        self._touch_loads(is_urgent=True)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """End every stream; sequences that still run are aborted."""
        self._heartbeat.cancel()
        self._server.close()
        for connection in self.connections:
            connection.channel.close()
        if self._adapters is not None:
            self._adapters.stop()

    def _beat(self) -> None:
        self._touch_loads()
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._beat)

    @property
    def num_inflight(self) -> int:
        return len(self._live)

    # on the engine's thread

    def on_step(self, report: StepReport) -> None:
        """Take a step's report; never blocks."""
        self._loop.call_soon_threadsafe(self._deliver, report, self._count_submitted())

    def _on_snapshot(self, router: _Router, snapshot: BlockEvents) -> None:
        self._loop.call_soon_threadsafe(self._deliver_snapshot, router, snapshot)

    def _count_submitted(self) -> list[_Submitted]:
        """The report knows of submissions that have been admitted, and of those sent before the report before: they
        came in before this step."""
        submitted, counted = self._submitted, []
        while submitted and (
            submitted[0].seq.status is not Status.WAITING or submitted[0].num_reports < self._num_reports
        ):
            counted.append(submitted.popleft())
        self._num_reports += 1
        return counted

    # what the engine says

    def _deliver(self, report: StepReport, counted: list[_Submitted]) -> None:
        """counted: the submissions that this report is the first to know of. They travel with it: what a router is told
        is of one moment."""
        self._load = report.load
        for sent in counted:
            sent.router.counted_sid = max(sent.router.counted_sid, sent.sid)  # one may have waited for its adapter
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
            self.schedule(router)

    def _pass_on(self, output: SeqOutput, live: _Live) -> None:
        seq, token_ids, logprobs, finish = output
        if finish is not None:
            self._forget(seq, live)
        if live.is_fresh:
            live.is_fresh = False
            delta = Delta(live.sid, token_ids, finish, seq.num_cached_tokens, logprobs, seq.error, _timing(seq))
        elif finish is not None:
            delta = Delta(live.sid, token_ids, finish, None, logprobs, seq.error, _timing(seq))
        else:
            delta = Delta(live.sid, token_ids, finish, None, logprobs, seq.error)
        live.router.outbox.add(delta)

    def _forget(self, seq: Sequence, live: _Live) -> None:
        del self._live[seq]
        del live.router.live[live.sid]
        if seq.lora is not None and self._adapters is not None:
            self._adapters.release(seq.lora.digest)
        if not self._live:
            self._idle.set()

    def _deliver_snapshot(self, router: _Router, snapshot: BlockEvents) -> None:
        router.outbox.add_events(snapshot)
        self.schedule(router)

    # what routers say

    def join(self, router: _Router) -> None:
        log.info("router connected", extra={"router_id": router.router_id})
        self._routers.append(router)
        self._touch_loads()

    def leave(self, router: _Router) -> None:
        log.info("router gone", extra={"router_id": router.router_id, "num_inflight": len(router.live)})
        self._routers.remove(router)
        if router.timer is not None:
            router.timer.cancel()
        for seq in list(router.live.values()):
            if not self._unpark(seq):
                self._engine.abort(seq)
            self._forget(seq, self._live[seq])
        self._touch_loads()

    def take(self, router: _Router, ops: list[Op]) -> None:
        """Raises Broken for what no router of ours would send."""
        for op in ops:
            if isinstance(op, Submit):
                self._submit(router, op)
            elif isinstance(op, Abort):
                seq = router.live.get(op.sid)
                if seq is not None:
                    self._abort(seq)
            elif isinstance(op, Announce):
                self._engine.request_snapshot(partial(self._on_snapshot, router))
            elif isinstance(op, LoadAdapter | DropAdapter):
                if self._adapters is not None:
                    (self._adapters.preload if isinstance(op, LoadAdapter) else self._adapters.drop)(op.digest)
            else:
                raise Broken("Only the first message of a stream is a Hello.")

    def _submit(self, router: _Router, op: Submit) -> None:
        if op.sid <= router.last_sid:
            raise Broken(f"Sequence numbers rise on a stream; {op.sid} came after {router.last_sid}.")
        check(op)
        router.last_sid = op.sid
        if self._is_draining:
            router.outbox.add(Delta(op.sid, [], Finish.REFUSED, error="The replica is draining."))
            self.schedule(router)
            return
        seq = sequence_of(op, self._clock())
        router.live[op.sid] = seq
        self._live[seq] = _Live(router, op.sid)
        self._idle.clear()
        if seq.adapter is None:
            self._enter(seq)
        else:
            self._await_adapter(seq, seq.adapter)

    def _enter(self, seq: Sequence) -> None:
        live = self._live[seq]
        self._submitted.append(_Submitted(seq, live.router, live.sid, self._num_reports))
        self._engine.submit(seq)

    # sequences with an adapter

    def _await_adapter(self, seq: Sequence, digest: str) -> None:
        """Into the engine when the adapter is there, at once where it is; the others go on meanwhile."""
        if self._adapters is None:
            self._refuse(seq, "This replica serves no adapters.")
            return
        want = self._adapters.want(digest, partial(self._enter_adapted, seq), partial(self._refuse, seq))
        if want is not None:
            self._parked[seq] = want

    def _enter_adapted(self, seq: Sequence, adapter: Resident) -> None:
        self._parked.pop(seq, None)
        seq.lora = adapter
        self._enter(seq)

    def _refuse(self, seq: Sequence, reason: str) -> None:
        """Another replica may have the adapter."""
        self._parked.pop(seq, None)
        seq.error = reason
        self._end_unsubmitted(seq, Finish.REFUSED)

    def _abort(self, seq: Sequence) -> None:
        if self._unpark(seq):
            self._end_unsubmitted(seq, Finish.ABORT)
        else:
            self._engine.abort(seq)

    def _unpark(self, seq: Sequence) -> bool:
        """Whether it waited for its adapter; it does no more."""
        want = self._parked.pop(seq, None)
        if want is None or self._adapters is None:
            return False
        self._adapters.cancel(want)
        return True

    def _end_unsubmitted(self, seq: Sequence, finish: Finish) -> None:
        live = self._live[seq]
        self._pass_on(SeqOutput(seq, [], finish=finish), live)
        self.schedule(live.router)

    # the frames down

    def schedule(self, router: _Router) -> None:
        """Send the router's next frame when it is due; while the router doesn't read, hold it, within bounds."""
        outbox = router.outbox
        if not router.channel.is_writable:
            if outbox.num_tokens > MAX_HELD_TOKENS or outbox.num_event_bytes > MAX_HELD_EVENT_BYTES:
                log.warning("router does not read", extra={"router_id": router.router_id})
                router.channel.abort()
            return
        due_s = outbox.due_s()
        if due_s is None:
            return
        delay_s = due_s - self._clock()
        if delay_s <= TIMER_S:
            self._send(router)
            due_s = outbox.due_s()  # a load that came too soon after the last one is still to be told
            if due_s is None:
                return
            delay_s = due_s - self._clock()
        if router.timer is None or due_s < router.timer_due_s - TIMER_S:
            if router.timer is not None:
                router.timer.cancel()
            router.timer, router.timer_due_s = self._loop.call_later(delay_s, self._on_timer, router), due_s

    def _on_timer(self, router: _Router) -> None:
        router.timer = None
        self.schedule(router)

    def _send(self, router: _Router) -> None:
        now_s = self._clock()
        frame = router.outbox.take(now_s, self._load_for(router) if router.outbox.wants_load(now_s) else None)
        if frame is None:
            return
        try:
            data = encode(frame)
        except (
            TypeError,
            ValueError,
            OverflowError,
        ):  # its deltas are gone: the router must resume them, not wait for them
            log.exception("frame can't be encoded", extra={"router_id": router.router_id})
            router.channel.abort()
            return
        router.channel.send(data)

    def _touch_loads(self, *, is_urgent: bool = False) -> None:
        for router in self._routers:
            router.outbox.touch_load(is_urgent=is_urgent or self._is_unblocked(router))
            self.schedule(router)

    def _is_unblocked(self, router: _Router) -> bool:
        """Whether the router has, as it sees it, no credit left, and would if it knew."""
        num_inflight = len(router.live)
        return router.told_credit <= num_inflight < self._credit(router)

    def _credit(self, router: _Router) -> int:
        load, info = self._load, self._info
        lacks_kv = load.num_waiting > 0 and load.prefill_tokens_outstanding > load.free_blocks * info.block_size
        is_closed = self._is_draining or load.is_closed or lacks_kv
        return credit(len(router.live), len(self._live), len(self._routers), info.num_places, is_closed=is_closed)

    def _load_for(self, router: _Router) -> Load:
        router.told_credit = self._credit(router)
        (
            num_running,
            num_waiting,
            prefill_tokens,
            kv_tokens,
            free_blocks,
            total_blocks,
            event_seq,
            costs,
            num_drafted,
            num_accepted,
            _,
        ) = self._load
        return Load(
            epoch=self._info.epoch,
            event_seq=event_seq,
            max_inflight=router.told_credit,
            num_running=num_running,
            num_waiting=num_waiting + len(self._parked),
            prefill_tokens_outstanding=prefill_tokens,
            kv_tokens=kv_tokens,
            free_blocks=free_blocks,
            total_blocks=total_blocks,
            costs=costs,
            max_batched_tokens=self._info.max_batched_tokens,
            is_draining=self._is_draining,
            last_sid=router.counted_sid,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            resident_adapters=() if self._adapters is None else self._adapters.resident,
            failed_adapters=() if self._adapters is None else self._adapters.failures,
        )


def _timing(seq: Sequence) -> Timing | None:
    """Of a traced sequence that has a token."""
    times = seq.times
    if times is None or times.admitted_s is None or times.first_token_s is None:
        return None
    return Timing(times.wait_s, times.admitted_s, times.first_token_s, times.last_token_s, seq.num_preemptions)
