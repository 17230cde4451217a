"""The replica's end of the token stream: a server that takes sequences from its sessions with routers into the engine,
and brings each session the deltas of its own.

Not the engine, nor what a session sends and when (`session`). All state belongs to one event loop, in callbacks; the
engine's thread only passes a report to it, once a step. Invariants: every sequence in the engine belongs to one
session, and is aborted when that ends; a router gets only its own deltas, in order, and every block event. An engine
that can compute nothing ends the streams, as the loss of the process would.
"""

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from penstock.perf.turnover import RowTurnover
from penstock.wire.channel import Channel, tls_timeout_s
from penstock.wire.frames import (
    Abort,
    Announce,
    BlockEvents,
    Constraint,
    Delta,
    DropAdapter,
    Finish,
    Load,
    LoadAdapter,
    Op,
    Submit,
    TimeAccounts,
    Timing,
    join_prompt_logprobs,
)
from penstock.wire.targets import NO_TARGETS, ClassTargets
from penstock.workers.engine.engine import EngineLoad, StepReport
from penstock.workers.engine.sequence import Grammar, Resident, SeqOutput, Sequence, Status
from penstock.workers.serving.adapters import Adapters, PendingAdapter
from penstock.workers.serving.grammars import Grammars, PendingGrammar
from penstock.workers.serving.intake import ProtocolError, check_submission, make_sequence
from penstock.workers.serving.load import StreamInfo, grant_credit, lacks_kv
from penstock.workers.serving.opening import Door, Lobby
from penstock.workers.serving.outbox import FRAME_S
from penstock.workers.serving.session import Connection, Session

HEARTBEAT_S = 1.0
"""Longest time between two load reports to a router."""

MAX_WAITING_SHARE = 0.5
"""Most sequences of one tenant that may wait for a slot for their adapter, as a part of the replica's places; more are
refused. They take no place, but all those of an adapter come into the engine at once when it is loaded."""

log = logging.getLogger("penstock.stream")


class Engine(Protocol):
    """The part of `penstock.workers.engine.engine.Engine` that the streams need; any thread may call it."""

    def submit(self, seq: Sequence) -> None: ...
    def abort(self, seq: Sequence) -> None: ...
    def request_snapshot(self, callback: Callable[[BlockEvents], None]) -> None: ...
    def begin_drain(self) -> None: ...
    def accounts(self) -> TimeAccounts: ...


class _LiveSequence:
    """The session and number of a sequence that is in the engine, or waits for its adapter."""

    __slots__ = ("is_fresh", "session", "sid")

    def __init__(self, session: Session, sid: int) -> None:
        self.session = session
        self.sid = sid
        self.is_fresh = True
        """Whether no delta of the sequence went out yet."""


class _Submitted(NamedTuple):
    """A sequence given to the engine that the numbers of no report are known to count."""

    seq: Sequence
    session: Session
    sid: int
    num_reports: int
    """Reports that the engine had made when it got the sequence."""


class StreamServer:
    """The server of one replica's token stream: passes sequences from routers to the engine, and the engine's reports
    back to the routers.

    Build it, give `on_step` to the engine, then call `start`. Everything but `on_step` must be called on the event loop
    that called `start`; a `Connection` calls `make_session`, `join`, `take` and `leave`.
    """

    def __init__(
        self,
        info: StreamInfo,
        on_events: Callable[[BlockEvents], None],
        door: Door,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        stream_interval_s: float = FRAME_S,
        targets: ClassTargets = NO_TARGETS,
    ) -> None:
        """Nothing is served before `start`. on_events: gets all block events, in order, on the loop. door: decides
        which routers may have a stream. clock: the monotonic clock of `Sequence.arrival_s`. unix_clock: the clock of
        deadlines that older gateways send. stream_interval_s: least time between two frames of deltas to a router.
        targets: those that the engine keeps, by class."""
        self.door = door
        self._info = info
        self._max_waiting_of_tenant = max(1, int(MAX_WAITING_SHARE * info.num_places))
        self._on_events = on_events
        self._clock = clock
        self._unix_clock = unix_clock
        self._stream_interval_s = stream_interval_s
        self._targets = targets
        self._turnover = RowTurnover()
        self._connections: set[Connection] = set()
        self._lobby = Lobby()
        self._sessions: list[Session] = []
        self._live: dict[Sequence, _LiveSequence] = {}
        self._parked: dict[Sequence, PendingAdapter] = {}
        """Sequences that wait for their adapter, not in the engine yet."""
        self._compiling: dict[Sequence, PendingGrammar] = {}
        """Sequences that wait for their grammar, before their adapter, if any."""
        self._submitted: deque[_Submitted] = deque()
        self._num_reports = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    async def start(
        self,
        engine: Engine,
        load: EngineLoad,
        host: str,
        port: int = 0,
        adapters: Adapters | None = None,
        tls: ssl.SSLContext | None = None,
        grammars: Grammars | None = None,
        count_compiled: Callable[[], int] = lambda: 0,
    ) -> int:
        """Serve on host:port (0: a free one); returns the port. load: the engine's before its first step. adapters:
        None where there are none. tls: None: streams are not encrypted. grammars: None where no answer is
        constrained. count_compiled: kernels compiled since the replica was ready."""
        self._engine = engine
        self._count_compiled = count_compiled
        self._grammars = grammars
        self._adapters = adapters
        if adapters is not None:
            adapters.on_change = partial(self._touch_loads, is_urgent=True)
        self._load = load
        self._loop = asyncio.get_running_loop()
        limit_s = tls_timeout_s(tls)
        self._server = await self._loop.create_server(
            self._accept, host, port, ssl=tls, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=limit_s
        )
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._send_heartbeat)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def _accept(self) -> Channel:
        connection = Connection(self)
        self._lobby.enter(connection)
        self._connections.add(connection)
        return connection.channel

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new sequences, and wait until the present ones have ended. Returns False if some still run after
        `timeout_s`."""
        self._is_draining = True
        self._engine.begin_drain()
        self._touch_loads(is_urgent=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """End every stream, with a last report of the load; sequences that still run are aborted."""
        self._heartbeat.cancel()
        self._touch_loads(is_urgent=True)
        self._server.close()
        for connection in self._connections:
            connection.channel.close()
        if self._adapters is not None:
            self._adapters.stop()
        if self._grammars is not None:
            self._grammars.stop()

    def _send_heartbeat(self) -> None:
        self._touch_loads()
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._send_heartbeat)

    @property
    def num_inflight(self) -> int:
        return len(self._live)

    # on the engine's thread

    def on_step(self, report: StepReport) -> None:
        """Take a step's report; never blocks."""
        self._loop.call_soon_threadsafe(self._deliver, report, self._count_submitted())

    def _on_snapshot(self, session: Session, snapshot: BlockEvents) -> None:
        self._loop.call_soon_threadsafe(self._deliver_snapshot, session, snapshot)

    def _count_submitted(self) -> list[_Submitted]:
        """The submissions that this report is the first to count: those that have been admitted, and those made before
        the report before, since they came in before this step."""
        submitted, counted = self._submitted, []
        while submitted and (
            submitted[0].seq.status is not Status.WAITING or submitted[0].num_reports < self._num_reports
        ):
            counted.append(submitted.popleft())
        self._num_reports += 1
        return counted

    # reports of the engine

    def _deliver(self, report: StepReport, counted: list[_Submitted]) -> None:
        """Put a report's deltas, events and load into the outboxes of the sessions.

        counted: the submissions that this report is the first to count; they come with it, so that a router's load
        report describes one moment.
        """
        self._load = report.load
        if report.is_broken:
            self._end_streams()
        for sent in counted:
            sent.session.counted_sid = max(sent.session.counted_sid, sent.sid)  # one may have waited for its adapter
        if report.events is not None:
            self._on_events(report.events)
        num_ended = 0
        for output in report.outputs:
            num_ended += output.finish is not None
            live = self._live.get(output.seq)
            if live is not None:  # else its router is gone
                self._add_delta(output, live)
        self._turnover.note(self._loop.time(), report.load.num_running, num_ended)
        for session in self._sessions:
            if report.events is not None:
                session.outbox.add_events(report.events)
            session.outbox.touch_load(is_urgent=self._is_unblocked(session))
            session.schedule()

    def _end_streams(self) -> None:
        """End every stream: routers then know that what ran here was lost, and may come back."""
        log.error("engine broken", extra={"num_inflight": len(self._live)})
        for connection in self._connections:
            connection.channel.abort()

    def _add_delta(self, output: SeqOutput, live: _LiveSequence) -> None:
        seq, token_ids, logprobs, finish, beams, num_beam_tokens = output
        if finish is not None:
            self._forget(seq, live)
        if live.is_fresh:
            live.is_fresh = False
            scores = None if seq.lacks_scores else join_prompt_logprobs(seq.prompt_logprobs)
            cached = seq.num_cached_tokens
            timing = _make_timing(seq)
            delta = Delta(
                live.sid,
                token_ids,
                finish,
                cached,
                logprobs,
                seq.error,
                timing,
                scores,
                beams,
                num_beam_tokens,
                seq.step_s,
            )
        elif finish is not None:
            timing = _make_timing(seq)
            delta = Delta(
                live.sid, token_ids, finish, None, logprobs, seq.error, timing, None, beams, num_beam_tokens, seq.step_s
            )
        else:
            delta = Delta(
                live.sid, token_ids, None, None, logprobs, seq.error, None, None, None, num_beam_tokens, seq.step_s
            )
        live.session.outbox.add(delta)

    def _forget(self, seq: Sequence, live: _LiveSequence) -> None:
        del self._live[seq]
        del live.session.live[live.sid]
        if seq.lora is not None and self._adapters is not None:
            self._adapters.release(seq.lora.digest)
        if not self._live:
            self._idle.set()

    def _deliver_snapshot(self, session: Session, snapshot: BlockEvents) -> None:
        session.outbox.add_events(snapshot)
        session.schedule()

    # sessions and their operations

    def make_session(self, router_id: str, channel: Channel) -> Session:
        return Session(router_id, channel, self._make_load, self._clock, self._stream_interval_s)

    def join(self, connection: Connection, session: Session) -> None:
        """Begin to send to a router that has proven itself."""
        self._lobby.leave(connection)
        log.info("router connected", extra={"router_id": session.router_id})
        self._sessions.append(session)
        self._touch_loads()

    def leave(self, connection: Connection) -> None:
        """Forget a connection that has ended, and abort the sequences of its session if it has one."""
        if connection.session is not None:
            self._end_session(connection.session)
        self._lobby.leave(connection)
        self._connections.discard(connection)

    def _end_session(self, session: Session) -> None:
        log.info("router gone", extra={"router_id": session.router_id, "num_inflight": len(session.live)})
        self._sessions.remove(session)
        session.cancel_timer()
        for seq in list(session.live.values()):
            if not self._cancel_wait(seq):
                self._engine.abort(seq)
            self._forget(seq, self._live[seq])
        self._touch_loads()

    def take(self, session: Session, ops: list[Op]) -> None:
        """Carry out a router's operations. Raises ProtocolError for those that no router of ours would send."""
        for op in ops:
            if isinstance(op, Submit):
                self._submit(session, op)
            elif isinstance(op, Abort):
                seq = session.live.get(op.sid)
                if seq is not None:
                    self._abort(seq)
            elif isinstance(op, Announce):
                self._engine.request_snapshot(partial(self._on_snapshot, session))
            elif isinstance(op, LoadAdapter | DropAdapter):
                self._change_adapters(op)
            else:
                raise ProtocolError("A Hello comes at the opening of a stream only.")

    def _submit(self, session: Session, op: Submit) -> None:
        if op.sid <= session.last_sid:
            raise ProtocolError(f"Sequence numbers rise on a stream; {op.sid} came after {session.last_sid}.")
        check_submission(op)
        session.last_sid = op.sid
        if self._is_draining:
            session.outbox.add(Delta(op.sid, [], Finish.REFUSED, error="The replica is draining."))
            session.schedule()
            return
        seq = make_sequence(op, self._clock(), self._unix_clock(), self._targets)
        session.live[op.sid] = seq
        self._live[seq] = _LiveSequence(session, op.sid)
        self._idle.clear()
        if op.constraint is None:
            self._submit_compiled(seq)
        else:
            self._await_grammar(seq, op.constraint)

    def _submit_compiled(self, seq: Sequence) -> None:
        """Submit a sequence that waits for no grammar."""
        if seq.adapter is None:
            self._submit_to_engine(seq)
        else:
            self._await_adapter(seq, seq.adapter)

    def _submit_to_engine(self, seq: Sequence) -> None:
        live = self._live[seq]
        self._submitted.append(_Submitted(seq, live.session, live.sid, self._num_reports))
        self._engine.submit(seq)

    def _change_adapters(self, op: LoadAdapter | DropAdapter) -> None:
        if self._adapters is None:
            return
        if isinstance(op, LoadAdapter):
            self._adapters.preload(op.digest, op.tenant)
        else:
            self._adapters.drop(op.digest)

    # sequences with a grammar

    def _await_grammar(self, seq: Sequence, constraint: Constraint) -> None:
        """Submit a sequence when its grammar is compiled; the other sequences go on meanwhile."""
        if self._grammars is None:
            self._refuse_constraint(seq, "This replica makes no answer keep to a constraint.")
            return
        if seq.adapter is not None and self._adapters is not None and seq.adapter not in self._adapters.resident:
            self._adapters.preload(seq.adapter, seq.tenant)  # while the grammar is compiled
        output = seq.token_ids[seq.num_prompt_tokens :]
        self._compiling[seq] = self._grammars.want(
            constraint, seq.tenant, output, partial(self._constrain, seq), partial(self._refuse_constraint, seq)
        )

    def _constrain(self, seq: Sequence, grammar: Grammar) -> None:
        del self._compiling[seq]
        seq.constrain(grammar)
        if grammar.is_complete:  # its replica was lost with the end of the answer
            self._end_unsubmitted(seq, Finish.STOP)
        else:
            self._submit_compiled(seq)

    def _refuse_constraint(self, seq: Sequence, reason: str) -> None:
        """Refuse a sequence for what its request wants; every replica would."""
        self._compiling.pop(seq, None)
        seq.error = reason
        self._end_unsubmitted(seq, Finish.INVALID)

    # sequences with an adapter

    def _await_adapter(self, seq: Sequence, digest: str) -> None:
        """Submit a sequence to the engine when its adapter is loaded, at once where it is already; the other sequences
        go on meanwhile."""
        if self._adapters is None:
            self._refuse(seq, "This replica serves no adapters.")
            return
        pending = self._adapters.want(
            digest, partial(self._submit_with_adapter, seq), partial(self._refuse, seq), seq.tenant
        )
        if pending is None:
            return
        if self._adapters.num_waiting_of(seq.tenant) > self._max_waiting_of_tenant:
            self._adapters.cancel(pending)
            self._refuse(
                seq, f"{self._max_waiting_of_tenant} sequences of this tenant wait for this replica's adapter slots."
            )
            return
        self._parked[seq] = pending
        self._touch_loads()

    def _submit_with_adapter(self, seq: Sequence, adapter: Resident) -> None:
        self._parked.pop(seq, None)
        seq.lora = adapter
        self._submit_to_engine(seq)

    def _refuse(self, seq: Sequence, reason: str) -> None:
        """Refuse a sequence whose adapter can't be had; another replica may have the adapter."""
        self._parked.pop(seq, None)
        seq.error = reason
        self._end_unsubmitted(seq, Finish.REFUSED)

    def _abort(self, seq: Sequence) -> None:
        if self._cancel_wait(seq):
            self._end_unsubmitted(seq, Finish.ABORT)
        else:
            self._engine.abort(seq)

    def _cancel_wait(self, seq: Sequence) -> bool:
        """End a sequence's wait for its grammar or adapter. Returns False if it was not waiting."""
        grammar = self._compiling.pop(seq, None)
        if grammar is not None and self._grammars is not None:
            self._grammars.cancel(grammar)
            return True
        pending = self._parked.pop(seq, None)
        if pending is None or self._adapters is None:
            return False
        self._adapters.cancel(pending)
        return True

    def _end_unsubmitted(self, seq: Sequence, finish: Finish) -> None:
        live = self._live[seq]
        self._add_delta(SeqOutput(seq, [], finish=finish), live)
        live.session.schedule()

    # load reports

    def _touch_loads(self, *, is_urgent: bool = False) -> None:
        for session in self._sessions:
            session.outbox.touch_load(is_urgent=is_urgent or self._is_unblocked(session))
            session.schedule()

    def _is_unblocked(self, session: Session) -> bool:
        """Whether the router has no credit left by its last load report, and would have by a new one."""
        num_inflight = len(session.live)
        return session.reported_credit <= num_inflight < self._credit(session)

    def _credit(self, session: Session) -> int:
        load, info = self._load, self._info
        is_closed = self._is_draining or load.is_closed or lacks_kv(load, info.block_size)
        num_placed = len(self._live) - (0 if self._adapters is None else self._adapters.num_waiting)
        num_places = info.num_places if load.num_places is None else min(info.num_places, load.num_places)
        return grant_credit(len(session.live), num_placed, len(self._sessions), num_places, is_closed=is_closed)

    def _make_load(self, session: Session) -> Load:
        """The load report to a router, as of now."""
        engine, info, adapters = self._load, self._info, self._adapters
        before = session.reported_changes
        if adapters is not None:
            session.reported_changes = adapters.counts.num_changes
        return Load(
            epoch=info.epoch,
            event_seq=engine.event_seq,
            max_inflight=self._credit(session),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting + len(self._parked) + len(self._compiling),
            prefill_tokens_outstanding=engine.prefill_tokens_outstanding,
            kv_tokens=engine.kv_tokens,
            free_blocks=engine.free_blocks,
            total_blocks=engine.total_blocks,
            costs=engine.costs,
            max_batched_tokens=info.max_batched_tokens,
            is_draining=self._is_draining,
            last_sid=session.counted_sid,
            num_drafted=engine.num_drafted,
            num_accepted=engine.num_accepted,
            num_sampled=engine.num_sampled,
            num_compiled=self._count_compiled(),
            resident_adapters=() if adapters is None else adapters.resident,
            failed_adapters=() if adapters is None else adapters.failures,
            adapter_totals=() if adapters is None else tuple(adapters.counts.totals),
            adapter_counts=() if adapters is None else adapters.counts.changed_since(before),
            accounts=self._engine.accounts(),
            max_running=info.max_running,
            row_hold_s=self._turnover.row_hold_s,
        )


def _make_timing(seq: Sequence) -> Timing | None:
    """Times of a traced sequence that has a token; None for any other."""
    times = seq.times
    if times is None or times.admitted_s is None or times.first_token_s is None:
        return None
    return Timing(times.wait_s, times.admitted_s, times.first_token_s, times.last_token_s, seq.num_preemptions)
