"""The steps of a modelled replica: what `penstock.workers.engine.scheduler` chooses, counted instead of carried out.

The same one-phase schedule for sequences of one tenant without adapters, drafts, beams, scores or the class batch,
with or without a target of seconds per token:
most loads consist of those, and a step of them costs a microsecond here, however many rows decode. A step without
prompts changes only sums; a row is looked at when it begins, ends, needs a block where none is free, or a prompt is
computed beside it. Tests hold it against the scheduler itself, step by step, on random loads. Not the replica's reports
(`replica`), nor the clock (`engine`).

Invariant: the sums are those of the rows that decode.
"""

from collections import deque

from penstock.perf.pace import (
    Clock,
    Rows,
    allowed_s,
    can_keep,
    count_places,
    fit_tokens,
    has_room,
    least_tokens,
    pace_s,
)
from penstock.sim.admission import PromptChunk, can_place, count_hits, has_prompt_behind, is_in_flight, shape_step
from penstock.sim.block_cache import BlockCache
from penstock.sim.due_rows import DueRows
from penstock.sim.engine import NEVER_S, EngineState
from penstock.sim.sequence import ModelledSequence
from penstock.sim.step_times import Noise, StepTimes
from penstock.wire.frames import StepCosts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.bypasses import Bypasses
from penstock.workers.engine.key_changes import KeyChanges
from penstock.workers.engine.scheduler import MAX_DEFERRED, MAX_PARTIAL, NO_COSTS


def is_uniform(costs: StepCosts, tpot_s: float, max_model_len: int) -> bool:
    """Whether a target is kept by every sequence that is alone, or by none: rows yield to others where it depends on
    their contexts."""
    ends = (Rows(1, 1), Rows(1, max_model_len, 1))
    return len({can_keep(costs, pace_s(tpot_s), row) for row in ends}) == 1


class Batching:
    """The `penstock.sim.engine.Batch` that counts. report_s: least time between two states that are noted. costs: what
    the scheduler would keep targets by. Sequences with a target have all the same, and each of them can keep it alone,
    with its context, or none can (`is_uniform`)."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        times: StepTimes,
        noise: Noise,
        report_s: float,
        costs: StepCosts = NO_COSTS,
    ) -> None:
        self.cache = BlockCache(config.timed.num_blocks)
        self.max_len = min(max_model_len, config.timed.num_blocks * config.block_size)
        self.running: list[ModelledSequence] = []
        self.waiting: deque[ModelledSequence] = deque()
        self.step_ends_s: list[float] = []
        self.finished: list[ModelledSequence] = []
        self.noted: EngineState | None = None
        self.num_output_tokens = 0
        self._noted_s = -NEVER_S
        self._report_s = report_s
        self._max_rows = config.max_num_seqs
        self._num_places = config.num_places
        self._lookahead = config.num_places - config.max_num_seqs
        self._max_tokens = config.token_budget
        self._size = config.block_size
        self._times = times
        self._noise = noise
        self._costs = costs
        self._has_targets = False
        self._pace_s: float | None = None
        """Seconds per token to which steps keep; None: no sequence has a target that can be kept."""
        self._chunks: list[PromptChunk] = []
        """Prompts in the step that is under way."""
        self._partial: list[PromptChunk] = []
        self._num_steps = 0
        self._num_prefilling = 0
        self._last_sid = 0
        self._offsets = 0
        """Offsets of the decoding rows, summed."""
        self._growing = [0] * config.block_size
        """Decoding rows by the number of steps, modulo the block size, before which they need a block."""
        self._due = DueRows(self.max_len, config.block_size)
        self._waiting_tokens = 0
        self._is_stuck = False
        """Whether what waits has been tried and nothing has changed since."""

    def token_times(self, seq: ModelledSequence) -> list[float]:
        """Times of the tokens that a sequence has got."""
        since = self.step_ends_s[seq.first_step - 1 : self._num_steps] if seq.is_decoding else []
        return seq.token_times_s + since

    def num_output(self, seq: ModelledSequence) -> int:
        """Tokens that a sequence has got."""
        return len(seq.token_times_s) + (self._num_steps - seq.first_step + 1 if seq.is_decoding else 0)

    def drain_changes(self) -> KeyChanges | None:
        return self.cache.drain_changes()

    def state(self) -> EngineState:
        """The numbers as they are after the last step."""
        return self._state_at(self._num_steps, self.cache.num_free)

    def _state_at(self, num_steps: int, num_free: int) -> EngineState:
        """The numbers as they were after a step since which nothing came or ended."""
        prefill_tokens, kv_tokens = self._waiting_tokens, self._offsets
        num_decoding = len(self.running) - self._num_prefilling
        kv_tokens += num_decoding * num_steps
        if self._num_prefilling:
            for seq in self.running:
                if not seq.is_decoding:
                    kv_tokens += seq.num_tokens
                    lacking = seq.num_tokens - seq.num_computed_tokens
                    prefill_tokens += lacking if lacking > 1 else 0
        unplaced = sum([seq.num_tokens for seq in self.waiting if not seq.is_passable]) if self.waiting else 0
        return EngineState(
            len(self.running),
            len(self.waiting),
            prefill_tokens,
            kv_tokens,
            num_free,
            unplaced,
            self._last_sid,
            num_steps,
            min(self._num_places, count_places(len(self.running), self._lookahead, has_batch=False))
            if self._has_targets
            else self._num_places,
        )

    # steps without prompts

    def decode(self, end_s: float, now: float) -> float:
        """Let steps end until `now` that only decode, the first at `end_s`, up to one that ends a row, or behind which
        something else comes than another such step. Returns the end of the step that is then under way."""
        rows = len(self.running)
        if self._chunks or (self.waiting and not (self._is_stuck or rows >= self._max_rows)):
            return end_s
        ends_s, growing, size = self.step_ends_s, self._growing, self._size
        cache, factors, steps = self.cache, self._noise.factors, self._num_steps
        last = self._due.next_step() - 1
        kv_tokens = self._offsets + rows * steps
        base_s, token_s, until = self._times.decode_line(rows, kv_tokens)
        report_s, due_s = self._report_s, self._noted_s + self._report_s
        begun, noted, num_free = steps, 0, cache.num_free
        append, num_factors = ends_s.append, len(factors)
        while end_s <= now and steps < last:
            missing = growing[-(steps + 1) % size]
            if missing > cache.num_free:
                break
            steps += 1
            append(end_s)
            if end_s >= due_s:
                noted, num_free, due_s = steps, cache.num_free, end_s + report_s
            if missing:
                cache.allocate(missing)
            kv_tokens += rows
            if kv_tokens >= until:
                base_s, token_s, until = self._times.decode_line(rows, kv_tokens)
            if steps >= num_factors:
                self._noise.extend()
                num_factors = len(factors)
            end_s += (base_s + token_s * kv_tokens) * factors[steps]
        if noted:  # of the states that were due for a report only the last is of use
            self.noted, self._noted_s = self._state_at(noted, num_free), ends_s[noted - 1]
        self._num_steps = steps
        self.num_output_tokens += rows * (steps - begun)
        return end_s

    # any step

    def begin(self, now: float, submitted: list[ModelledSequence], aborted: list[ModelledSequence]) -> float:
        """Take what has come, and begin the next step. Returns its end, or NEVER_S if there is no work."""
        for seq in submitted:
            self._last_sid = max(self._last_sid, seq.sid)
            self._note_target(seq)
            if seq.num_tokens >= self.max_len:
                seq.is_refused = True
                self.finished.append(seq)
            else:
                self.waiting.append(seq)
                self._waiting_tokens += seq.num_tokens
                self._is_stuck = False
        for seq in aborted:
            self._drop(seq)
        if not self.running and not self.waiting:
            return NEVER_S
        return now + self._schedule(now)

    def _note_target(self, seq: ModelledSequence) -> None:
        self._has_targets |= seq.tpot_s is not None
        own_s = None if seq.tpot_s is None else pace_s(seq.tpot_s)
        row = Rows(1, seq.num_tokens)
        self._pace_s = own_s if own_s is not None and can_keep(self._costs, own_s, row) else None

    def _schedule(self, now: float) -> float:
        """Choose what the next step computes. Returns its time in seconds."""
        self._chunks, self._partial = [], []
        steps = self._num_steps
        missing = self._growing[-steps % self._size]
        preempted = False
        max_tokens = self._max_tokens
        if self._pace_s is not None and (self._num_prefilling or self.waiting):
            max_tokens = self._bound_step(self._pace_s, now)
        if self._num_prefilling or missing > self.cache.num_free:
            num_rows, budget, preempted = self._schedule_running(max_tokens)
        else:
            num_rows, budget = len(self.running), max_tokens - len(self.running)
            self.cache.allocate(missing)
        kv_tokens = self._offsets + num_rows * steps
        if self.waiting and not preempted and not self._is_stuck:
            budget = self._admit(budget)
            self._is_stuck = not self._chunks
        for chunk in self._partial:
            count = min(budget, chunk.seq.num_tokens - chunk.start - chunk.count)
            chunk.count += count
            budget -= count
        if steps >= len(self._noise.factors):
            self._noise.extend()
        return self._times.at(shape_step(self._chunks, num_rows, kv_tokens)) * self._noise.factors[steps]

    def _bound_step(self, own_s: float, now: float) -> int:
        """Tokens of the step that begins `now`, as `penstock.workers.engine.paced_steps` has it."""
        steps, limit_s, rows = self._num_steps, NEVER_S, Rows()
        prompts: list[ModelledSequence] = []
        for seq in self.running:
            if seq.num_lacking > 1:
                prompts.append(seq)
                continue
            num_output = self.num_output(seq)
            num_tokens = seq.offset + steps if seq.is_decoding else seq.num_tokens
            rows = rows.plus(Rows(1, num_tokens))
            if num_output:
                since_s = seq.token_times_s[0] if seq.token_times_s else self.step_ends_s[seq.first_step - 1]
                clock = Clock(since_s, num_output - 1, seq.max_tokens - num_output)
                limit_s = min(limit_s, allowed_s(clock, own_s, now))
        if limit_s == NEVER_S:
            return self._max_tokens
        most = self._max_tokens - rows.num_rows
        depth = max((seq.num_computed_tokens for seq in prompts), default=0)
        count = max(fit_tokens(self._costs, limit_s, rows, depth, most), len(prompts), 1)
        if prompts or self.waiting:
            count = max(count, least_tokens(self._costs, own_s))
        return rows.num_rows + max(0, min(count, most))

    def _contexts(self, steps: int) -> list[int]:
        """Tokens of the running sequences behind so many steps."""
        return [other.offset + steps if other.is_decoding else other.num_tokens for other in self.running]

    def _keeps_target(self, seq: ModelledSequence, steps: int) -> bool:
        """Whether a waiting sequence may run beside the others behind so many steps."""
        if self._pace_s is None or not self.running:
            return True
        contexts = [*self._contexts(steps), seq.num_tokens]
        return has_room(self._costs, self._pace_s, Rows(len(contexts), sum(contexts)), Rows(1, max(contexts)))

    def _schedule_running(self, max_tokens: int) -> tuple[int, int, bool]:
        """Chunks for the running prompts and blocks for the decoding rows, in order. Returns the decoding rows, the
        budget left, and whether a sequence lost its blocks. max_tokens: of the step."""
        running, steps, size = self.running, self._num_steps, self._size
        budget, num_rows, preempted = max_tokens, 0, False
        lacking = [1 if seq.is_decoding else seq.num_tokens - seq.num_computed_tokens for seq in running]
        num_prompts = sum([count > 1 for count in lacking])
        num_single = len(running) - num_prompts
        is_shared = num_prompts + bool(self.waiting) > 1
        position = 0
        while position < len(running):
            seq = running[position]
            position += 1
            if seq.is_decoding:
                num_single -= 1
                if not (seq.offset + steps - 1) % size:
                    while not self.cache.num_free and running:
                        preempted = True
                        if self._preempt_last() is seq:
                            break
                    if not seq.is_decoding:
                        continue
                    self.cache.allocate(1)
                num_rows += 1
                budget -= 1
                continue
            count = lacking[position - 1]
            if count == 1:
                num_single -= 1
                chunk = PromptChunk(seq, seq.num_computed_tokens, 1)
            else:
                left = budget - num_single
                if is_shared and has_prompt_behind(lacking[position : len(running)], self.waiting):
                    left = -(-left // 2)
                if not left:
                    continue
                chunk = PromptChunk(seq, seq.num_computed_tokens, min(count, left))
            self._chunks.append(chunk)
            budget -= chunk.count
            if chunk.count < count:
                self._partial.append(chunk)
        return num_rows, budget, preempted

    def _preempt_last(self) -> ModelledSequence:
        """Take its blocks from the newest running sequence, which waits again, before all others; returns it."""
        seq = self.running.pop()
        if seq.is_decoding:
            seq.num_tokens = seq.offset + self._num_steps
            self._stop_decoding(seq)
        else:
            self._num_prefilling -= 1
        self._release(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.waiting.appendleft(seq)
        self._waiting_tokens += seq.num_tokens
        self._is_stuck = False
        return seq

    def _admit(self, budget: int) -> int:
        """Let waiting sequences run; returns the budget left."""
        waiting, size = self.waiting, self._size
        passed: list[ModelledSequence] = []
        bypasses = Bypasses()
        prefilling = [seq for seq in self.running if seq.num_lacking > 1] if self._num_prefilling else []
        while waiting and budget and len(self.running) < self._max_rows and len(passed) < MAX_DEFERRED:
            seq = waiting.popleft()
            passed.append(seq)
            usable = (seq.num_tokens - 1) // size
            hits = count_hits(self.cache, seq, usable)
            if hits < usable and is_in_flight(seq, hits, prefilling, size):
                continue
            missing = seq.num_tokens - hits * size
            limit = -(-budget // 2) if waiting and waiting[0].num_tokens > 1 else budget
            if missing > limit and len(self._partial) >= MAX_PARTIAL:
                continue
            if not can_place(self.cache, seq, hits, size) or not self._keeps_target(seq, self._num_steps):
                if bypasses.pass_over(seq):
                    continue
                break
            passed.pop()
            self._place(seq, hits)
            chunk = PromptChunk(seq, seq.num_computed_tokens, min(missing, limit))
            self._chunks.append(chunk)
            budget -= chunk.count
            if chunk.count < missing:
                self._partial.append(chunk)
            prefilling.append(seq)
            if not bypasses.admit():
                break
        waiting.extendleft(reversed(passed))
        return budget

    def _place(self, seq: ModelledSequence, hits: int) -> None:
        """Give a waiting sequence the blocks of all its tokens, and make it run."""
        num_keyed = min(hits, len(seq.keys))
        self.cache.take(seq.keys[:num_keyed])
        if hits > num_keyed:
            self.cache.take_private(seq)
        seq.num_placed_tokens = seq.num_tokens
        self.cache.allocate(-(-seq.num_tokens // self._size) - hits)
        seq.held_keys = list(seq.keys[:num_keyed])
        seq.num_computed_tokens = hits * self._size
        seq.num_bypasses, seq.is_passable = 0, False
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        self.running.append(seq)
        self._waiting_tokens -= seq.num_tokens
        self._num_prefilling += 1

    # the end of a step

    def commit(self, ended_s: float) -> None:
        """Take over what the step has computed, which ended at `ended_s`."""
        self.step_ends_s.append(ended_s)
        self._num_steps += 1
        self.num_output_tokens += len(self.running) - self._num_prefilling
        ending = [seq for seq, chunk in self._take_changes() if self._take_over(seq, chunk)]
        self._chunks = []
        for seq in ending:
            self._finish(seq)
        if ended_s >= self._noted_s + self._report_s or not self.running:
            self.noted, self._noted_s = self.state(), ended_s

    def _take_changes(self) -> list[tuple[ModelledSequence, PromptChunk | None]]:
        """The prompts of the step and the rows that are due behind it, in the order of the running ones."""
        changes: list[tuple[ModelledSequence, PromptChunk | None]] = [(chunk.seq, chunk) for chunk in self._chunks]
        changes += [(seq, None) for seq in self._due.pop_until(self._num_steps)]
        if len(changes) > 1:
            places = {seq: place for place, seq in enumerate(self.running)}
            changes.sort(key=lambda change: places[change[0]])
        return changes

    def _take_over(self, seq: ModelledSequence, chunk: PromptChunk | None) -> bool:
        """Count what the step has computed of a prompt, or the block that a row has filled. Returns whether the
        sequence has all its tokens."""
        if chunk is None:
            if seq.last_step(self.max_len) <= self._num_steps:
                return True
            self._publish(seq, seq.offset + self._num_steps - 1)
            self._due.push(seq)
            return False
        seq.num_computed_tokens = chunk.start + chunk.count
        self._publish(seq, seq.num_computed_tokens)
        if seq.num_computed_tokens < seq.num_tokens:
            return False
        self._start_decoding(seq)
        return seq.last_step(self.max_len) <= self._num_steps

    def _start_decoding(self, seq: ModelledSequence) -> None:
        """Count the first token of a sequence whose prompt has been computed."""
        self.num_output_tokens += 1
        self._num_prefilling -= 1
        steps = self._num_steps
        seq.is_decoding, seq.first_step = True, steps
        seq.offset = seq.num_tokens + 1 - steps
        self._offsets += seq.offset
        self._growing[(seq.offset - 1) % self._size] += 1
        self._due.push(seq)

    def _stop_decoding(self, seq: ModelledSequence) -> None:
        """Keep the times of a row's tokens, and count it no more."""
        seq.token_times_s += self.step_ends_s[seq.first_step - 1 : self._num_steps]
        self._offsets -= seq.offset
        self._growing[(seq.offset - 1) % self._size] -= 1
        seq.is_decoding = False
        seq.num_computed_tokens = seq.offset + self._num_steps - 1
        self._publish(seq, seq.num_computed_tokens)

    def _finish(self, seq: ModelledSequence) -> None:
        seq.num_tokens = seq.offset + self._num_steps
        self._stop_decoding(seq)
        self.running.remove(seq)
        self._release(seq)
        self._is_stuck = False
        seq.num_ended_steps = self._num_steps
        self.finished.append(seq)

    def _publish(self, seq: ModelledSequence, num_computed_tokens: int) -> None:
        """Offer the blocks that have become full and that others may want."""
        full = seq.keys[len(seq.held_keys) : num_computed_tokens // self._size]
        if full:
            seq.held_keys += self.cache.publish(full)

    def _release(self, seq: ModelledSequence) -> None:
        """Free a sequence's blocks; those full of computed tokens stay in the cache."""
        num_full, num_held = seq.num_computed_tokens // self._size, len(seq.held_keys)
        num_blocks = -(-max(seq.num_placed_tokens, seq.num_computed_tokens) // self._size)
        self.cache.free(seq, num_full - num_held, num_blocks - num_full)

    def _drop(self, seq: ModelledSequence) -> None:
        """End a sequence that nobody waits for any more, wherever it is."""
        if seq in self.waiting:
            self.waiting.remove(seq)
            self._waiting_tokens -= seq.num_tokens
        elif seq in self.running:
            if seq.is_decoding:
                seq.num_tokens = seq.offset + self._num_steps
                self._stop_decoding(seq)
            else:
                self._num_prefilling -= 1
            self.running.remove(seq)
            self._release(seq)
        else:
            return
        self._is_stuck = False
        self.finished.append(seq)
