"""vLLM as a replica's engine: the methods of `penstock.workers.engine.engine.Engine`, computed in a child process.

Not a scheduler: vLLM chooses what runs in a step, and holds the KV cache and the adapters; what its cache holds is
known by its events (`cached_blocks`). Invariants, the same as our own engine's: a submitted sequence is reported with a
`finish` exactly once, and nothing after it; submit, abort and snapshot requests come in from any thread and never wait;
reports go out on the engine's thread. When the child has ended, every sequence is refused, so that another replica goes
on with it, and the engine is unhealthy for good: the replica is replaced, never the child alone.
"""

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from penstock.perf.fit import adapt
from penstock.prefix.hashing import ChainHasher
from penstock.wire.errors import EngineFault
from penstock.wire.frames import BlockEvents, Finish, StepCosts, TimeAccounts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import ADAPT_EVERY, ADAPT_FIRST, ADAPT_RATE, EngineLoad, StepReport
from penstock.workers.engine.sequence import Resident, SeqOutput, Sequence, Status
from penstock.workers.engine.time_shares import Rest, TimeShares
from penstock.workers.engine.timing import TimingRecorder
from penstock.workers.vllm.adapter_loads import AdapterLoads
from penstock.workers.vllm.bridge import (
    Abort,
    AdapterLoaded,
    Add,
    Closed,
    Failed,
    Message,
    Op,
    Output,
    Ready,
    Start,
    Stepped,
)
from penstock.workers.vllm.cached_blocks import CachedBlocks
from penstock.workers.vllm.child import Child
from penstock.workers.vllm.costs import Progress, make_sample, measure
from penstock.workers.vllm.request import FINISHES, VllmAdapter, find_refusal, make_add, make_logprobs

END_S = 10.0
"""Longest wait for the child's processes to be gone."""
LOST = "vLLM's process has ended."

_log = logging.getLogger("penstock.vllm")


class Launch(NamedTuple):
    """How the child is started."""

    command: list[str]
    """The child's command but for its last argument, the descriptor."""
    environment: Mapping[str, str]
    args: Mapping[str, object]
    """Arguments of vLLM's EngineArgs, by name."""
    eos_token_ids: frozenset[int]
    """End-of-sequence tokens of the checkpoint."""


class VllmEngine:
    """Built stopped; `start` starts the child, measures its step costs and then serves."""

    def __init__(
        self,
        launch: Launch,
        config: EngineConfig,
        hasher: ChainHasher,
        on_step: Callable[[StepReport], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        unix_clock: Callable[[], float] = time.time,
        began_s: float | None = None,
    ) -> None:
        """clock: the monotonic clock of `Sequence.arrival_s`, of deadlines and `is_healthy`. unix_clock: the clock of
        recorded times. began_s: time of the clock at which the replica began; None: now."""
        self._launch = launch
        self._config = config
        self._on_step = on_step
        self._clock = clock
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._child: Child | None = None
        self._ready: Ready | None = None
        self._failure: str | None = None
        """Why the child can't go on; None: it can."""
        self._is_broken = False
        """Whether vLLM was lost since the last report."""
        self._live: dict[int, Sequence] = {}
        self._rids: dict[Sequence, int] = {}
        self._last_rid = 0
        self._ended: OrderedDict[int, Sequence] = OrderedDict()
        """The latest sequences that ended, by number, as many as there are places: vLLM may yet tell of their
        blocks."""
        self._cached = CachedBlocks(hasher)
        self._adapters = AdapterLoads(self._inbox.put, self._queue)
        self._ops: list[Op] = []
        """Operations that are not sent yet."""
        self._outputs: list[SeqOutput] = []
        """Outputs that are not reported yet."""
        self._probed: list[Stepped] = []
        self._behind_s = 0.0
        """Seconds that the clocks of the recorded times are set back: a step is reported when it has ended."""
        self._timing = TimingRecorder(lambda: clock() - self._behind_s, lambda: unix_clock() - self._behind_s)
        self._time = TimeShares(clock() if began_s is None else began_s)
        self._next_deadline = math.inf
        self._kv_usage = 0.0
        self._costs = StepCosts()
        self._num_steps = 0
        self._is_stopping = False
        self._is_serving = False
        self._waiting_since: float | None = None
        """Monotonic time since which the child owes a message; None: it owes none."""
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="penstock-engine", daemon=True)

    # from any thread

    def start(self) -> None:
        """Start the thread and the child; returns when the costs are measured and the engine serves. Raises EngineFault
        when vLLM did not come up in `config.vllm.start_timeout_s`."""
        self._thread.start()
        self._has_started.wait()
        if not self._is_serving:
            output = self._child.last_output if self._child is not None else ""
            raise EngineFault(f"vLLM could not start: {self._failure}\n{output}".rstrip())

    def stop(self, *, drain: bool = False, timeout_s: float = 30.0) -> bool:
        """End the thread and the child: with `drain` when every sequence has finished, else with all of them aborted.
        Safe to call again.

        Returns False if the thread still runs after `timeout_s`; a second call without `drain` aborts what is left.
        """
        if self._thread.ident is None:
            return True
        self._inbox.put(self._refuse_more if drain else self._abort_all)
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not drain and self._child is not None:
            self._child.end(END_S)  # it may wait for a child that does not read
            self._thread.join(END_S)
        return not self._thread.is_alive()

    def submit(self, seq: Sequence) -> None:
        self._inbox.put(partial(self._add, seq))

    def abort(self, seq: Sequence) -> None:
        """vLLM frees its KV before its next step; a sequence that has finished is left as it is."""
        self._inbox.put(partial(self._abort, seq))

    def request_snapshot(self, callback: Callable[[BlockEvents], None]) -> None:
        """Calls back with all blocks that vLLM's cache holds."""
        self._inbox.put(lambda: callback(self._cached.snapshot()))

    def begin_drain(self) -> None:
        """Count as drained what time is left without work: no sequence will be submitted any more."""
        self._inbox.put(lambda: self._time.rest_as(Rest.DRAIN))

    def accounts(self) -> TimeAccounts:
        """Where the replica's time has gone until now."""
        return self._time.accounts(self._clock())

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> VllmAdapter:
        """Let vLLM read an adapter; see `AdapterLoads.load`."""
        return self._adapters.load(digest, folder, max_rank)

    def unload_adapter(self, adapter: Resident) -> None:
        """Let vLLM forget an adapter, which no sequence has any more."""
        self._adapters.unload(adapter)

    def is_healthy(self, now: float) -> bool:
        """False when the child or the thread is gone, or the child has not answered for `config.stall_s`."""
        since = self._waiting_since
        has_stalled = since is not None and now - since > self._config.stall_s
        return self._thread.is_alive() and self._failure is None and not has_stalled

    @property
    def max_model_len(self) -> int:
        assert self._ready is not None
        return self._ready.max_model_len

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is. Read it on the engine's thread, or on any before the first submission."""
        seqs = self._live.values()
        num_running = sum(seq.status is Status.RUNNING for seq in seqs)
        total = self._num_blocks
        return EngineLoad(
            num_running=num_running,
            num_waiting=len(seqs) - num_running,
            prefill_tokens_outstanding=sum(len(seq.token_ids) for seq in seqs if seq.status is Status.WAITING),
            kv_tokens=sum(len(seq.token_ids) for seq in seqs if seq.status is Status.RUNNING),
            free_blocks=total - math.ceil(self._kv_usage * total) if seqs else total,
            total_blocks=total,
            event_seq=self._cached.event_seq,
            costs=self._costs,
            is_closed=self._failure is not None,
            unplaced_tokens=sum(len(seq.token_ids) for seq in seqs if seq.status is Status.WAITING),
        )

    # on the engine's thread

    def _main(self) -> None:
        try:
            if self._start_child():
                self._time.start(self._clock())
                self._is_serving = True
                self._has_started.set()
                while self._turn():
                    pass
        except Exception as error:  # noqa: BLE001 a dead thread is noticed by `is_healthy`
            _log.exception("The engine's thread ends.")
            self._failure = self._failure or f"{type(error).__name__}: {error}"
        finally:
            self._time.rest_as(Rest.DRAIN if self._is_stopping else Rest.FAILED)
            self._time.rest()
            if self._child is not None:
                self._child.end(END_S)
            self._adapters.fail(LOST)
            self._has_started.set()

    def _start_child(self) -> bool:
        """Start the child and measure its step times. Returns False if that failed."""
        start = Start(dict(self._launch.args))
        try:
            self._child = Child(self._launch.command, self._launch.environment, start, self._on_message, self._on_end)
        except OSError as error:
            self._failure = f"{self._launch.command[0]} can't be run: {error.strerror}."
            return False
        deadline = self._clock() + self._config.vllm.start_timeout_s
        while self._ready is None and self._failure is None:
            self._await(deadline, "to be ready")
        if self._failure is None:
            self._costs = measure(self._probe, self._config, self.max_model_len, time.perf_counter)
            self._waiting_since = None  # the probe's answers have come
        if self._failure is None and self._ready is not None:
            _log.info(
                "vllm ready",
                extra={
                    "vllm_version": self._ready.version,
                    "num_blocks": self._num_blocks,
                    "child_pid": self._child.pid,
                },
            )
        return self._failure is None

    def _await(self, deadline: float, what: str) -> None:
        """Carry out the next operation. Raises EngineFault when none comes before the deadline."""
        try:
            self._inbox.get(timeout=max(0.0, deadline - self._clock()))()
        except Empty:
            raise EngineFault(
                f"it took longer than engine.vllm.start_timeout_s ({self._config.vllm.start_timeout_s:.0f} s) {what}"
            ) from None

    def _probe(self, adds: list[Add]) -> Iterator[Stepped]:
        self._ops += adds
        self._send()
        unfinished = {add.rid for add in adds}
        deadline = self._clock() + self._config.vllm.start_timeout_s
        while unfinished:
            self._await(deadline, "to compute a probe")
            if self._failure is not None:
                raise EngineFault(self._failure)
            probed, self._probed = self._probed, []
            for stepped in probed:
                unfinished -= {output.rid for output in stepped.outputs if output.finish is not None}
                yield stepped

    def _turn(self) -> bool:
        """One turn of the engine's loop: wait for an operation or the next deadline, carry out all queued operations,
        send to the child, and report outputs. Returns False once the engine is stopping and has no sequence left."""
        self._wait_for_operation()
        while not self._inbox.empty():
            self._inbox.get()()
        self._expire()
        self._send()
        if self._outputs or self._failure is not None:
            self._report()
        return not self._is_stopping or bool(self._live)

    def _wait_for_operation(self) -> None:
        """Carry out the next operation, if one comes before the next deadline. Without a sequence that is idle time;
        with one it belongs to the step under way."""
        is_idle = not self._live
        if is_idle:
            self._time.rest()
        operation = None
        with contextlib.suppress(Empty):
            operation = self._inbox.get(timeout=self._seconds_to_deadline())
        if is_idle:
            self._time.wake(self._clock())
        if operation is not None:
            operation()

    def _seconds_to_deadline(self) -> float | None:
        return (
            None
            if self._next_deadline == math.inf
            else min(max(0.0, self._next_deadline - self._clock()), threading.TIMEOUT_MAX)
        )

    # operations of other threads

    def _add(self, seq: Sequence) -> None:
        reason = find_refusal(seq)
        if self._failure is not None:
            self._end(seq, Finish.REFUSED, LOST)
        elif self._is_stopping:
            self._end(seq, Finish.REFUSED, "The replica is draining.")
        elif reason is not None:
            self._end(seq, Finish.INVALID, reason)
        elif len(seq.token_ids) >= self.max_model_len:
            self._end(
                seq,
                Finish.REFUSED,
                f"The sequence has {len(seq.token_ids)} tokens; vLLM's context is {self.max_model_len}.",
            )
        else:
            self._last_rid = rid = self._last_rid + 1
            self._live[rid], self._rids[seq] = seq, rid
            self._ops.append(make_add(seq, rid, self._launch.eos_token_ids))
            if seq.deadline is not None:
                self._next_deadline = min(self._next_deadline, seq.deadline)
            if seq.times is not None:
                self._timing.add(seq)

    def _abort(self, seq: Sequence) -> None:
        self._drop(seq, Finish.ABORT)

    def _drop(self, seq: Sequence, finish: Finish, error: str | None = None) -> None:
        """End a sequence that vLLM would go on with."""
        rid = self._rids.get(seq)
        if rid is not None:
            self._ops.append(Abort([rid]))
            self._end(seq, finish, error)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_deadline:
            return
        for seq in list(self._live.values()):
            if seq.deadline is not None and seq.deadline <= now:
                self._drop(seq, Finish.DEADLINE, "The deadline of the request passed.")
        self._next_deadline = min(
            (seq.deadline for seq in self._live.values() if seq.deadline is not None), default=math.inf
        )

    def _queue(self, op: Op) -> None:
        if self._failure is not None:
            raise EngineFault(LOST)
        self._ops.append(op)

    def _refuse_more(self) -> None:
        self._is_stopping = True

    def _abort_all(self) -> None:
        self._is_stopping = True
        for seq in list(self._live.values()):
            self._drop(seq, Finish.ABORT)

    def _send(self) -> None:
        ops, self._ops = self._ops, []
        if not ops or self._failure is not None:
            return
        assert self._child is not None
        if self._waiting_since is None and any(isinstance(op, Add) for op in ops):
            self._waiting_since = self._clock()
        with contextlib.suppress(Closed):  # its reader reports it too, with the reason
            self._child.send(ops)

    # messages of the child

    def _on_message(self, message: Message) -> None:
        """Queue a message; called on the child's reader thread."""
        self._inbox.put(partial(self._take, message))

    def _on_end(self, reason: str) -> None:
        """Queue the child's end; called on the child's reader thread."""
        self._inbox.put(partial(self._fail, reason))

    def _take(self, message: Message) -> None:
        if isinstance(message, Ready):
            self._ready = message
        elif isinstance(message, AdapterLoaded):
            self._adapters.take(message)
        elif isinstance(message, Failed):
            self._fail(message.reason)
        elif self._is_serving:
            self._commit(message)
        else:
            self._probed.append(message)

    def _fail(self, reason: str) -> None:
        """Refuse every sequence, now and from now on. Of several reasons the first one stays."""
        if self._failure is None:
            self._failure = reason
            if not self._is_stopping:
                _log.error("vllm lost", extra={"reason": reason, "num_live": len(self._live)})
        self._adapters.fail(LOST)
        self._is_broken |= bool(self._live)
        if self._live:
            self._time.fail(self._clock())
        if not self._is_stopping:
            self._time.rest_as(Rest.FAILED)
        for seq in list(self._live.values()):
            self._end(seq, Finish.REFUSED, LOST)

    def _commit(self, stepped: Stepped) -> None:
        self._kv_usage = stepped.kv_usage
        self._adapt(stepped)
        gains = [(seq, output) for output in stepped.outputs if (seq := self._live.get(output.rid)) is not None]
        self._divide_time(stepped, gains)
        self._mark_running([seq for seq, _ in gains], stepped.seconds)
        outputs = [self._gain(seq, output) for seq, output in gains]
        self._record_cached(stepped)
        self._timing.record_tokens(outputs)
        self._outputs += outputs
        self._waiting_since = self._clock() if self._live else None
        if not outputs:
            self._report()

    def _divide_time(self, stepped: Stepped, gains: list[tuple[Sequence, Output]]) -> None:
        """Divide the time since the last step that brought anything, by the step model and the tokens that are known to
        be computed: of a prompt all of them, when its first token comes. The time of a step that brings nothing, one
        with pieces of prompts only, is divided with the next."""
        if gains:
            rows = [(seq, self._weigh(seq, output)) for seq, output in gains]
            self._time.end_weighted(rows, self._costs, self._clock())
        elif stepped.outputs:  # of sequences that have ended
            self._time.fail(self._clock())

    def _weigh(self, seq: Sequence, output: Output) -> float:
        """What a sequence took of a step by the step model, seconds."""
        costs, context = self._costs, len(seq.token_ids)
        if seq.num_cached_tokens is not None:
            return costs.row_s + costs.kv_token_s * context
        computed = context - output.num_cached_tokens
        query_context = computed * (output.num_cached_tokens + (computed + 1) / 2)
        return costs.row_s + costs.prefill_token_s * computed + costs.attention_s * query_context

    def _record_cached(self, stepped: Stepped) -> None:
        assert self._ready is not None
        self._cached.record(stepped.events, self._find, self._ready.block_size)

    def _find(self, rid: int) -> Sequence | None:
        """A sequence by its number, also one that ended lately."""
        return self._live.get(rid) or self._ended.get(rid)

    def _mark_running(self, seqs: list[Sequence], ago_s: float) -> None:
        for seq in seqs:
            seq.status = Status.RUNNING
        self._behind_s = ago_s
        self._timing.record_admissions()
        self._behind_s = 0.0

    def _gain(self, seq: Sequence, output: Output) -> SeqOutput:
        seq.token_ids += output.token_ids
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = output.num_cached_tokens
        finish = None if output.finish is None else FINISHES[output.finish]
        if finish is not None:
            self._forget(seq, finish, output.error)
        return SeqOutput(seq, output.token_ids, make_logprobs(output.logprobs, seq.sampling.logprobs), finish)

    def _adapt(self, stepped: Stepped) -> None:
        """Correct the costs by a step in which every sequence decoded: of other steps it is not known what was
        computed."""
        decoding = {rid: seq for rid, seq in self._live.items() if seq.status is Status.RUNNING}
        if (
            not decoding
            or len(decoding) != len(self._live)
            or {output.rid for output in stepped.outputs} != decoding.keys()
        ):
            return
        self._num_steps += 1
        if self._num_steps % ADAPT_EVERY == 0:
            before = {rid: Progress(len(seq.token_ids), True) for rid, seq in decoding.items()}
            rate = max(ADAPT_RATE, 1 / (ADAPT_FIRST + self._num_steps // ADAPT_EVERY))
            self._costs = adapt(self._costs, make_sample(stepped, before), rate)

    # ends

    def _end(self, seq: Sequence, finish: Finish, error: str | None = None) -> None:
        if seq.finish is None:
            self._forget(seq, finish, error)
            self._outputs.append(SeqOutput(seq, [], finish=finish))

    def _forget(self, seq: Sequence, finish: Finish, error: str | None) -> None:
        seq.finish, seq.error, seq.status = finish, error, Status.FINISHED
        rid = self._rids.pop(seq, None)
        if rid is not None:
            self._ended[rid] = self._live.pop(rid)
            if len(self._ended) > self._config.num_places:
                self._ended.popitem(last=False)
        if not self._live:
            self._waiting_since = None

    def _report(self) -> None:
        outputs, self._outputs = self._outputs, []
        is_broken, self._is_broken = self._is_broken, False
        events = self._cached.drain()
        self._on_step(StepReport(outputs, events, self.load, is_broken))

    @property
    def _num_blocks(self) -> int:
        """Size of vLLM's KV cache in blocks of our size, since routers count in those."""
        assert self._ready is not None
        return self._ready.num_blocks * self._ready.block_size // self._config.block_size
