"""The engine: a thread that schedules, runs and commits steps, and reports after each what its sequences gained.

Not a server: submit, abort and snapshot requests come in from any thread and never wait for a step; reports go out
through `on_step`, called on the engine's thread, which must not block. Where a device computes by itself, the next step
is scheduled and launched while it computes one, if that one's tokens decide nothing else (`steps_ahead`), so
that it never waits for the host; ends are then noticed a step late. Else a report goes out while it computes.
Invariants: a submitted sequence is reported with a `finish` exactly once, and nothing after it; before a step begins
the blocks of aborted and expired sequences are free; an idle engine holds no block. A step that fails is computed again
in parts (`isolation`): only sequences with which a step fails alone end in an error.

Decisions: docs/decisions/engine.md
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from penstock.perf.fit import StepSample, adapt, predict_sample_s
from penstock.prefix.hashing import ChainHasher
from penstock.wire.errors import EngineFault
from penstock.wire.frames import BlockEvents, Finish, StepCosts, TimeAccounts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.isolation import ROW_FAILED, can_compute, run_apart
from penstock.workers.engine.probe import measure, measure_rows
from penstock.workers.engine.row_times import RowTimes
from penstock.workers.engine.runner import Runner
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sampled, SeqOutput, Sequence, Step, StepShape
from penstock.workers.engine.steps_ahead import assume, retract
from penstock.workers.engine.time_shares import Rest, TimeShares
from penstock.workers.engine.timing import TimingRecorder

ADAPT_EVERY = 8
"""One step in so many corrects the costs."""
ADAPT_RATE = 0.02
"""Share of a measured step's relative error that the costs take over; more in the beginning, since a probe on a busy
machine can be far off."""
ADAPT_FIRST = 4
"""The first correction takes over 1 / (ADAPT_FIRST + 1), the second 1 / (ADAPT_FIRST + 2), ..."""
MAX_FAILURES = 1
"""Steps in a row of which nothing can be computed, that make the engine closed and unhealthy: it looks idle, so
gateways would send it their requests again."""
LOST = "The replica's device failed while it computed this sequence."
"""What a sequence is refused with when the runner can compute nothing, so that another replica goes on with it."""
CHECK_EVERY_S = 60.0
"""Least time between two full checks of the block pool; they cost milliseconds, and only an idle engine makes them."""

_log = logging.getLogger("penstock.engine")


class EngineLoad(NamedTuple):
    """How busy the engine is; the fields mean what those of `penstock.wire.frames.Load` mean."""

    num_running: int
    num_waiting: int
    prefill_tokens_outstanding: int
    kv_tokens: int
    free_blocks: int
    total_blocks: int
    event_seq: int
    costs: StepCosts
    num_drafted: int = 0
    num_accepted: int = 0
    is_closed: bool = False
    """Whether the engine refuses every new sequence."""
    num_places: int | None = None
    """Sequences that may be in the engine at once now; None: as many as the configuration says."""
    unplaced_tokens: int = 0
    """Tokens of the waiting sequences for which KV blocks must be free before others are admitted."""
    num_sampled: int = 0


class StepReport(NamedTuple):
    """Everything that changed since the report before."""

    outputs: list[SeqOutput]
    events: BlockEvents | None
    """Blocks that the cache gained and lost, numbered consecutively from 1; None: it did not change."""
    load: EngineLoad
    is_broken: bool = False
    """Whether the engine could compute nothing: the refused sequences of this report were lost with it."""


@dataclass(slots=True)
class _Launched:
    """A step that is under way."""

    step: Step
    begun_s: float
    """Time of its launch."""
    wait: Callable[[], list[list[Sampled]]] | None
    """Waits for its end; None: it could not be launched."""


class Engine:
    """Built stopped; `start` measures the runner's step costs and then serves."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        hasher: ChainHasher,
        on_step: Callable[[StepReport], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        unix_clock: Callable[[], float] = time.time,
        measure_costs: Callable[[Runner, EngineConfig], StepCosts] = measure,
        measure_rows: Callable[[Runner, EngineConfig, StepCosts], RowTimes | None] = measure_rows,
        began_s: float | None = None,
    ) -> None:
        """clock: the monotonic clock of `Sequence.arrival_s`, of deadlines and `is_healthy`. unix_clock: the clock of
        recorded times. measure_costs: called once, before the first step. measure_rows: called then
        where drafts are weighed by it. began_s: time of the clock at which the
        replica began; None: now."""
        self._runner = runner
        self._config = config
        self._on_step = on_step
        self._clock = clock
        self._measure_costs = measure_costs
        self._measure_rows = measure_rows
        self._pool = BlockPool(runner.num_blocks, config.block_size)
        self._scheduler = Scheduler(self._pool, hasher, config, runner.max_model_len, runner.eos_token_ids)
        self._operations: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._timing = TimingRecorder(clock, unix_clock)
        self._time = TimeShares(clock() if began_s is None else began_s)
        self._held: list[SeqOutput] | None = None
        """Outputs of an asynchronous runner's last step, until the next step is launched or another operation comes;
        None: all are reported."""
        self._under_way: _Launched | None = None
        """The step behind which the next one is launched before it ends."""
        self._last_end_s = -math.inf
        """Time at which a step was last waited for."""
        self._ended: list[SeqOutput] = []
        """Ends of sequences outside a commit, not reported yet."""
        self._next_deadline = math.inf
        self._event_seq = 0
        self._costs = StepCosts()
        self._num_steps = 0
        self._num_failures = 0
        self._is_broken = False  # nothing could be computed since the last report
        self._busy_since: float | None = None
        self._checked_s = -math.inf
        self._is_stopping = False
        self._is_serving = False
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="penstock-engine", daemon=True)

    # from any thread

    def start(self) -> None:
        """Start the thread; returns when the costs are measured and the engine serves. Raises EngineFault if that
        failed."""
        self._thread.start()
        self._has_started.wait()
        if not self._is_serving:
            raise EngineFault("The engine ended while it measured the runner's step times; the log has the cause.")

    def stop(self, *, drain: bool = False, timeout_s: float = 30.0) -> bool:
        """End the thread and wait for it: with `drain` when every sequence has finished, else with all of them aborted.
        Safe to call again.

        Sequences submitted from now on are refused, and dropped once the thread has ended. Returns False if the thread
        still runs after `timeout_s`; a second call without `drain` aborts what is left.
        """
        if self._thread.ident is None:
            return True
        self._operations.put(self._refuse_more if drain else self._abort_all)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, seq: Sequence) -> None:
        self._operations.put(lambda: self._add(seq))

    def abort(self, seq: Sequence) -> None:
        """Frees the sequence's KV before the next step begins; one that has finished is left as it is."""
        self._operations.put(lambda: self._end(seq, Finish.ABORT))

    def request_snapshot(self, callback: Callable[[BlockEvents], None]) -> None:
        """Calls back on the engine's thread, between steps, with every key of the cache as of the last block events."""
        self._operations.put(
            lambda: callback(BlockEvents(self._event_seq, b"".join(self._pool.cached_keys()), is_snapshot=True))
        )

    def begin_drain(self) -> None:
        """Count as drained what time is left without work: no sequence will be submitted any more."""
        self._operations.put(lambda: self._time.rest_as(Rest.DRAIN))

    def accounts(self) -> TimeAccounts:
        """Where the replica's time has gone until now."""
        return self._time.accounts(self._clock())

    def is_healthy(self, now: float) -> bool:
        """False when the thread is gone, the runner could compute nothing in the last step, or a step takes longer than
        `config.stall_s`."""
        return self.can_compute and not self.has_stalled(now)

    @property
    def can_compute(self) -> bool:
        """False when the thread is gone, or the runner could compute nothing in the last step."""
        return self._thread.is_alive() and self._num_failures < MAX_FAILURES

    def has_stalled(self, now: float, since: float = -math.inf) -> bool:
        """Whether a step takes longer than `config.stall_s`, not counting what was before `since`."""
        busy_since = self._busy_since
        return busy_since is not None and now - max(busy_since, since) > self._config.stall_s

    # on the engine's thread

    def step(self) -> None:
        """Schedule a step and launch it; end the one before, if that is still under way, and this one, unless the next
        can be launched behind it."""
        self._busy_since = self._clock()
        before, self._under_way = self._under_way, None
        if before is not None:
            assume(before.step)
        step = self._scheduler.schedule(self._costs, self._find_begin(before))
        self._timing.record_admissions()
        launched = self._launch(step) if step.chunks or before is None else None
        self._report_held()  # while an asynchronous runner computes
        if before is not None:
            launched = self._end_before(before, launched, step.preempted)
        if launched is not None and self._can_run_ahead(launched):
            self._under_way = launched
        elif launched is not None:
            self._end_step(launched.step, self._wait(launched))
        self._busy_since = None

    def _main(self) -> None:
        try:
            self._costs = self._measure_costs(self._runner, self._config)
            if self._scheduler.drafts.looks_up:
                self._scheduler.drafts.prices.times = self._measure_rows(self._runner, self._config, self._costs)
            self._time.start(self._clock())
            self._is_serving = True
            self._has_started.set()
            while self._prepare():
                if self._is_busy:
                    self.step()
        except Exception:  # noqa: BLE001 a dead thread is noticed by `is_healthy`
            _log.exception("The engine's thread ends.")
        finally:
            self._time.rest_as(Rest.DRAIN if self._is_stopping else Rest.FAILED)
            self._time.rest()
            self._has_started.set()

    def _prepare(self) -> bool:
        """Carry out the operations of other threads, between two steps; waits for one while idle. Returns False if the
        engine is to stop."""
        if not self._is_busy or not self._operations.empty():
            self._report_held()
        if not self._is_busy and self._operations.empty():
            self._check_idle()
            if self._is_stopping:
                return False
            self._time.rest()
            operation = self._operations.get()
            self._time.wake(self._clock())
            operation()
        while not self._operations.empty():
            self._operations.get()()
        self._expire()
        if self._ended:
            self._report([])
        return True

    @property
    def _is_busy(self) -> bool:
        return self._scheduler.has_work or self._under_way is not None

    def _check_idle(self) -> None:
        assert self._pool.num_free == self._pool.num_blocks, (
            f"{self._pool.num_blocks - self._pool.num_free} blocks are held by nobody"
        )
        now = self._clock()
        if now - self._checked_s >= CHECK_EVERY_S:
            self._pool.check([])
            self._checked_s = now

    def _add(self, seq: Sequence) -> None:
        if self._is_stopping:
            self._end(seq, Finish.REFUSED, "The replica is draining.")
        elif not self._scheduler.add(seq):
            self._note_end(seq)
            return
        if seq.deadline is not None:
            self._next_deadline = min(self._next_deadline, seq.deadline)
        if seq.times is not None:
            self._timing.add(seq)

    def _end(self, seq: Sequence, finish: Finish, error: str | None = None) -> None:
        if seq.finish is None:
            self._scheduler.finish(seq, finish, error)
            self._note_end(seq)

    def _note_end(self, seq: Sequence) -> None:
        self._runner.forget(seq)
        self._ended.append(SeqOutput(seq, [], finish=seq.finish))

    def _refuse_more(self) -> None:
        self._is_stopping = True

    def _abort_all(self) -> None:
        self._is_stopping = True
        for seq in list(self._scheduler.sequences()):
            self._end(seq, Finish.ABORT)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_deadline:
            return
        self._report_held()
        for seq in list(self._scheduler.sequences()):
            if seq.deadline is not None and seq.deadline <= now:
                self._end(seq, Finish.DEADLINE, "The deadline of the request passed.")
        self._next_deadline = min(
            (seq.deadline for seq in self._scheduler.sequences() if seq.deadline is not None), default=math.inf
        )

    def _launch(self, step: Step) -> _Launched:
        begun_s = self._clock()
        try:
            return _Launched(step, begun_s, self._runner.launch(step))
        except Exception:  # noqa: BLE001 whatever it was, it ends the sequences that cause it and not the engine
            _log.exception("A step of %d sequences could not be launched.", len(step.chunks))
            return _Launched(step, begun_s, None)

    def _find_begin(self, before: _Launched | None) -> float:
        """Time at which the next step begins: now, or when the one before it is expected to end."""
        now = self._clock()
        if before is None or not self._scheduler.has_targets:
            return now
        seconds = predict_sample_s(self._costs, _make_sample(before.step.shape, 0.0))
        return max(now, max(before.begun_s, self._last_end_s) + seconds)

    def _can_run_ahead(self, launched: _Launched) -> bool:
        if not self._config.overlap:
            return False
        is_under_way = launched.wait is not None and self._runner.is_asynchronous
        step = launched.step
        return is_under_way and self._scheduler.can_run_ahead(step) and self._runner.can_run_ahead(step)

    def _wait(self, launched: _Launched) -> list[list[Sampled]] | None:
        """The tokens chosen in a step, for each chunk. Returns None if it failed."""
        if launched.wait is None:
            self._time.fail(self._clock())
            return None
        try:
            sampled = launched.wait()
        except Exception:  # noqa: BLE001 as above
            self._time.fail(self._clock())
            _log.exception("A step of %d sequences failed.", len(launched.step.chunks))
            return None
        self._num_failures = 0
        self._num_steps += 1
        begun_s = max(launched.begun_s, self._last_end_s)  # a device computes one step at a time
        self._last_end_s = self._clock()
        self._time.end_step(launched.step, self._costs, self._last_end_s)
        seconds, drafts = self._last_end_s - begun_s, self._scheduler.drafts
        if drafts.learns_times:
            sample = _make_sample(launched.step.shape, seconds)
            drafts.record_time(launched.step.shape, predict_sample_s(self._costs, sample), seconds)
        if self._num_steps % ADAPT_EVERY == 0:
            self._adapt(launched.step.shape, seconds)
        return sampled

    def _end_before(self, before: _Launched, launched: _Launched | None, preempted: list[Sequence]) -> _Launched | None:
        """End a step behind which another was scheduled. Returns that one; None if it is not under way, or was computed
        for nothing, because the step before it failed. preempted: by the one that was scheduled."""
        sampled = self._wait(before)
        if sampled is not None:
            self._end_step(before.step, sampled, is_followed=launched is not None)
            return launched
        if launched is not None and launched.wait is not None:
            with suppress(Exception):  # what it makes of tokens that are none does not matter
                launched.wait()
            self._time.fail(self._clock())
        self._end_step(retract(before.step, preempted), None)
        return None

    def _end_step(self, step: Step, sampled: list[list[Sampled]] | None, *, is_followed: bool = False) -> None:
        """Take over what was computed, or what can be of a step that failed, and report it, unless the device has
        nothing to do meanwhile. is_followed: another step is under way."""
        if sampled is None:
            self._report_held()  # before the ends of what failed
            step = Step([chunk for chunk in step.chunks if _is_going(chunk)], [], step.copies)
            sampled = self._recover(step) if step.chunks else []
        outputs = self._refuse(step) if sampled is None else self._commit(step, sampled)
        self._timing.record_tokens(outputs)
        if self._runner.is_asynchronous and not is_followed:
            self._held = outputs
        else:
            self._report(outputs)

    def _recover(self, step: Step) -> list[list[Sampled]] | None:
        """Compute a step that has failed in parts; what fails alone gets an error. Returns None if the runner can
        compute nothing, before the parts or behind them."""
        sampled = run_apart(step, self._try) if self._can_compute_in_free_block() else None
        failed = [
            chunk.seq
            for chunk, choices in zip(step.chunks, sampled or (), strict=sampled is not None)
            if choices and choices[0].error == ROW_FAILED
        ]
        # its last block is its own, not in the cache, and of no more use
        if sampled is None or (failed and not can_compute(failed[0].block_table[-1], self._check, self._runner.forget)):
            self._num_failures += 1
            self._is_broken = True
            self._time.rest_as(Rest.FAILED)
            _log.error("the runner computes nothing", extra={"num_failures": self._num_failures})
            return None
        self._num_failures = 0
        for seq in failed:
            _log.error("sequence fails alone", extra={"request_id": seq.request_id})
        return sampled

    def _can_compute_in_free_block(self) -> bool:
        """Whether the runner computes a made-up token. True where no block is free: what becomes of the parts will
        show it."""
        table = self._pool.allocate(min(1, self._pool.num_free))
        can = not table or can_compute(table[0], self._check, self._runner.forget)
        self._pool.free(table)
        return can

    def _try(self, step: Step) -> list[list[Sampled]] | None:
        """Compute a part of a step that has failed. Returns None if it fails too."""
        sampled = self._run(step)
        if sampled is None:
            self._time.fail(self._clock())
        else:
            self._time.end_step(step, self._costs, self._clock())
        return sampled

    def _check(self, step: Step) -> list[list[Sampled]] | None:
        """Compute a step that nobody has asked for. Returns None if it fails."""
        sampled = self._run(step)
        self._time.fail(self._clock())
        return sampled

    def _run(self, step: Step) -> list[list[Sampled]] | None:
        self._busy_since = self._clock()
        try:
            return self._runner.launch(step)()
        except Exception:  # noqa: BLE001 the step's own exception is in the log
            return None

    def _adapt(self, shape: StepShape, seconds: float) -> None:
        rate = max(ADAPT_RATE, 1 / (ADAPT_FIRST + self._num_steps // ADAPT_EVERY))
        self._costs = adapt(self._costs, _make_sample(shape, seconds), rate)

    def _refuse(self, step: Step) -> list[SeqOutput]:
        for chunk in step.chunks:
            self._end(chunk.seq.leader or chunk.seq, Finish.REFUSED, LOST)
        return []

    def _commit(self, step: Step, sampled: list[list[Sampled]]) -> list[SeqOutput]:
        outputs = self._scheduler.commit(step, sampled)
        for output in outputs:
            if output.finish is not None:
                self._runner.forget(output.seq)
        return outputs

    def _report_held(self) -> None:
        if self._held is not None:
            outputs, self._held = self._held, None
            self._report(outputs)

    def _report(self, outputs: list[SeqOutput]) -> None:
        outputs, self._ended = self._ended + outputs, []
        is_broken, self._is_broken = self._is_broken, False
        self._on_step(StepReport(outputs, self._drain_events(), self._load(), is_broken))

    def _drain_events(self) -> BlockEvents | None:
        changes = self._pool.drain_changes()
        if changes is None:
            return None
        self._event_seq += 1
        return BlockEvents(self._event_seq, b"".join(changes.stored), b"".join(changes.removed))

    def _load(self) -> EngineLoad:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        num_rows = kv_tokens = num_sampled = 0
        for seq in running:
            kv_tokens += seq.num_context_tokens
            num_rows += len(seq.beams) or 1
            num_sampled += len(seq.beams) or seq.needs_sampling
        drafts, ahead = self._scheduler.drafts, self._scheduler.ahead
        return EngineLoad(
            num_rows,
            ahead.num_waiting,
            ahead.prefill_tokens,
            kv_tokens,
            self._pool.num_free,
            self._pool.num_blocks,
            self._event_seq,
            self._costs,
            drafts.num_drafted,
            drafts.num_accepted,
            is_closed=self._num_failures >= MAX_FAILURES,
            unplaced_tokens=sum(len(seq.token_ids) for seq in waiting if not seq.is_passable),
            num_sampled=num_sampled,
            num_places=self._scheduler.num_places,
        )


def _make_sample(shape: StepShape, seconds: float) -> StepSample:
    return StepSample(
        shape.rows,
        shape.prefill_tokens,
        shape.query_context,
        shape.kv_tokens,
        shape.draft_tokens,
        seconds,
        shape.draft_rounds,
        shape.sampled_rows,
    )


def _is_going(chunk: Chunk) -> bool:
    return (chunk.seq.leader or chunk.seq).finish is None
