"""The steps of a modelled replica: what `penstock.workers.engine.scheduler` chooses, counted instead of carried out.

The same one-phase schedule for sequences of one tenant without adapters, drafts, beams, scores or the class batch:
most loads consist of those, and a step of them costs a microsecond here, however many rows decode. A step without
prompts changes only sums; a row is looked at when it begins, ends, needs a block where none is free, or a prompt is
computed beside it. Tests hold it against the scheduler itself, step by step, on random loads. Not the replica's reports
(`replica`).

Invariants: `advance(now)` leaves the state as it is after the last step that ended until `now`; steps follow each other
without a gap while there is work.
"""

import heapq
import itertools
from collections import deque
from typing import NamedTuple

from penstock.sim.block_cache import BlockCache, KeyChanges
from penstock.sim.sequence import ModelledSequence
from penstock.sim.step_times import Noise, StepTimes
from penstock.workers.config import EngineConfig
from penstock.workers.engine.scheduler import MAX_BLOCKED, MAX_BYPASSES, MAX_DEFERRED, MAX_PARTIAL
from penstock.workers.engine.sequence import StepShape

NEVER_S = float("inf")


class EngineState(NamedTuple):
    """The numbers of a load report; fields as in `penstock.wire.frames.Load`."""

    num_running: int
    num_waiting: int
    prefill_tokens: int
    kv_tokens: int
    free_blocks: int
    unplaced_tokens: int
    num_sampled: int
    last_sid: int
    num_steps: int
    """Steps that had ended."""


class _Chunk:
    """Tokens of a prompt in one step."""

    __slots__ = ("count", "seq", "start")

    def __init__(self, seq: ModelledSequence, start: int, count: int) -> None:
        self.seq = seq
        self.start = start
        self.count = count


class Batching:
    """The engine of one replica. report_s: least time between two states that are noted."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        times: StepTimes,
        noise: Noise,
        report_s: float,
    ) -> None:
        self.cache = BlockCache(config.timed.num_blocks)
        self.max_len = min(max_model_len, config.timed.num_blocks * config.block_size)
        self.running: list[ModelledSequence] = []
        self.waiting: deque[ModelledSequence] = deque()
        self.end_s = NEVER_S
        """End of the step that is under way; infinite while there is none."""
        self.step_ends_s: list[float] = []
        self.finished: list[ModelledSequence] = []
        """Sequences that have ended since the owner last emptied the list, in order."""
        self.noted: EngineState | None = None
        """The state at the latest step that was due for a report; None: none since the owner took the last one."""
        self.num_output_tokens = 0
        self._noted_s = -NEVER_S
        self._report_s = report_s
        self._max_rows = config.max_num_seqs
        self._max_tokens = config.token_budget
        self._size = config.block_size
        self._times = times
        self._noise = noise
        self._inbox: list[ModelledSequence] = []
        self._aborted: list[ModelledSequence] = []
        self._chunks: list[_Chunk] = []
        """Prompts in the step that is under way."""
        self._partial: list[_Chunk] = []
        self._num_steps = 0
        self._num_prefilling = 0
        self._last_sid = 0
        self._offsets = 0
        """Offsets of the decoding rows, summed."""
        self._growing = [0] * config.block_size
        """Decoding rows by the number of steps, modulo the block size, before which they need a block."""
        self._due: list[tuple[int, int, ModelledSequence]] = []
        """Heap of the decoding rows by the step behind which they end, or have filled a block that others may want."""
        self._order = itertools.count()
        self._num_sampled = 0
        self._waiting_tokens = 0
        self._is_stuck = False
        """Whether what waits has been tried and nothing has changed since."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._inbox)

    def submit(self, seq: ModelledSequence, now: float) -> None:
        """Take a sequence; the step that is under way goes on without it."""
        self._inbox.append(seq)
        if self.end_s == NEVER_S:
            self._begin(now)

    def abort(self, seq: ModelledSequence, now: float) -> None:
        """Drop a sequence with the step that is under way. Those that have ended are ignored."""
        seq.is_aborted = True
        self._aborted.append(seq)
        if self.end_s == NEVER_S:
            self._begin(now)

    def advance(self, now: float) -> None:
        """Let all steps come to their ends that end until `now`."""
        while self.end_s <= now:
            if not self._chunks and not self._inbox and not self._aborted:
                self._decode(now)
                if self.end_s > now:
                    return
            ended_s = self.end_s
            self._commit()
            self._begin(ended_s)

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
        prefill_tokens, kv_tokens = self._waiting_tokens, self._offsets
        num_decoding = len(self.running) - self._num_prefilling
        kv_tokens += num_decoding * self._num_steps
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
            self.cache.num_free,
            unplaced,
            self._num_sampled,
            self._last_sid,
            self._num_steps,
        )

    # steps without prompts

    def _decode(self, now: float) -> None:
        """Let steps end until `now` that only decode, up to one that ends a row, or behind which something else comes
        than another such step."""
        rows = len(self.running)
        if self.waiting and not (self._is_stuck or rows >= self._max_rows):
            return
        ends_s, growing, size = self.step_ends_s, self._growing, self._size
        cache, factors, steps = self.cache, self._noise.factors, self._num_steps
        last = self._next_due() - 1
        kv_tokens = self._offsets + rows * steps
        base_s, token_s, until = self._times.decode_line(rows, kv_tokens)
        end_s, due_s = self.end_s, self._noted_s + self._report_s
        begun = steps
        while end_s <= now and steps < last:
            missing = growing[-(steps + 1) % size]
            if missing > cache.num_free:
                break
            steps += 1
            ends_s.append(end_s)
            if end_s >= due_s:
                self._num_steps, due_s = steps, end_s + self._report_s
                self._note(end_s)
            if missing:
                cache.allocate(missing)
            kv_tokens += rows
            if kv_tokens >= until:
                base_s, token_s, until = self._times.decode_line(rows, kv_tokens)
            if steps >= len(factors):
                self._noise.extend()
            end_s += (base_s + token_s * kv_tokens) * factors[steps]
        self._num_steps, self.end_s = steps, end_s
        self.num_output_tokens += rows * (steps - begun)

    def _next_due(self) -> int:
        """Number of the next step behind which a row ends, or has filled a block that others may want."""
        due = self._due
        while due and not self._is_due(*due[0]):
            heapq.heappop(due)
        return due[0][0] if due else 1 << 62

    def _is_due(self, step: int, _order: int, seq: ModelledSequence) -> bool:
        return seq.is_decoding and step == seq.next_step(self.max_len, self._size)

    # any step

    def _begin(self, now: float) -> None:
        """Take what has come, and begin the next step, if there is work."""
        for seq in self._inbox:
            self._last_sid = max(self._last_sid, seq.sid)
            if seq.num_tokens >= self.max_len:
                seq.is_refused = True
                self.finished.append(seq)
            else:
                self.waiting.append(seq)
                self._waiting_tokens += seq.num_tokens
                self._is_stuck = False
        self._inbox.clear()
        for seq in self._aborted:
            self._drop(seq)
        self._aborted.clear()
        if not self.running and not self.waiting:
            self.end_s = NEVER_S
            return
        self.end_s = now + self._schedule()

    def _schedule(self) -> float:
        """Choose what the next step computes. Returns its time in seconds."""
        self._chunks, self._partial = [], []
        steps = self._num_steps
        missing = self._growing[-steps % self._size]
        preempted = False
        if self._num_prefilling or missing > self.cache.num_free:
            num_rows, budget, preempted = self._schedule_running()
        else:
            num_rows, budget = len(self.running), self._max_tokens - len(self.running)
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
        return self._times.at(self._shape(num_rows, kv_tokens)) * self._noise.factors[steps]

    def _shape(self, num_rows: int, kv_tokens: int) -> StepShape:
        prefill_tokens, query_context = 0, 0.0
        rows = num_rows
        for chunk in self._chunks:
            if chunk.count == 1:
                num_rows += 1
                kv_tokens += chunk.start + 1
            else:
                prefill_tokens += chunk.count
                query_context += chunk.count * (chunk.start + (chunk.count + 1) / 2)
        return StepShape(rows + len(self._chunks), num_rows, prefill_tokens, query_context, kv_tokens)

    def _schedule_running(self) -> tuple[int, int, bool]:
        """Chunks for the running prompts and blocks for the decoding rows, in order. Returns the decoding rows, the
        budget left, and whether a sequence lost its blocks."""
        running, steps, size = self.running, self._num_steps, self._size
        budget, num_rows, preempted = self._max_tokens, 0, False
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
                chunk = _Chunk(seq, seq.num_computed_tokens, 1)
            else:
                left = budget - num_single
                if is_shared and self._has_prompt_behind(position, lacking):
                    left = -(-left // 2)
                if not left:
                    continue
                chunk = _Chunk(seq, seq.num_computed_tokens, min(count, left))
            self._chunks.append(chunk)
            budget -= chunk.count
            if chunk.count < count:
                self._partial.append(chunk)
        return num_rows, budget, preempted

    def _has_prompt_behind(self, position: int, lacking: list[int]) -> bool:
        """Whether a prompt that runs from `position` on, or the first that waits, lacks tokens too."""
        if any(count > 1 for count in lacking[position : len(self.running)]):
            return True
        return bool(self.waiting) and self.waiting[0].num_tokens > 1

    def _preempt_last(self) -> ModelledSequence:
        """Take its blocks from the newest running sequence, which waits again, before all others; returns it."""
        seq = self.running.pop()
        if seq.is_decoding:
            seq.num_tokens = seq.offset + self._num_steps
            self._stop_decoding(seq)
        else:
            self._num_prefilling -= 1
        self._release(seq)
        self._num_sampled -= seq.needs_sampling
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
        blocked: list[ModelledSequence] = []
        prefilling = [seq for seq in self.running if seq.num_lacking > 1] if self._num_prefilling else []
        while waiting and budget and len(self.running) < self._max_rows and len(passed) < MAX_DEFERRED:
            seq = waiting.popleft()
            passed.append(seq)
            usable = (seq.num_tokens - 1) // size
            hits = self._num_hits(seq, usable)
            if hits < usable and self._is_in_flight(seq, hits, prefilling):
                continue
            missing = seq.num_tokens - hits * size
            limit = -(-budget // 2) if waiting and waiting[0].num_tokens > 1 else budget
            if missing > limit and len(self._partial) >= MAX_PARTIAL:
                continue
            if not self._can_place(seq, hits):
                blocked.append(seq)
                seq.is_passable = seq.num_bypasses < MAX_BYPASSES
                if not seq.is_passable or len(blocked) >= MAX_BLOCKED:
                    break
                continue
            passed.pop()
            self._place(seq, hits)
            chunk = _Chunk(seq, seq.num_computed_tokens, min(missing, limit))
            self._chunks.append(chunk)
            budget -= chunk.count
            if chunk.count < missing:
                self._partial.append(chunk)
            prefilling.append(seq)
            for other in blocked:
                other.num_bypasses += 1
            if any(other.num_bypasses >= MAX_BYPASSES for other in blocked):
                break
        waiting.extendleft(reversed(passed))
        return budget

    def _num_hits(self, seq: ModelledSequence, usable: int) -> int:
        """Leading blocks of a waiting sequence that the cache holds, at most `usable`."""
        hits = self.cache.match(seq.keys, usable)
        if hits == len(seq.keys) and seq.num_preemptions:
            hits += min(self.cache.private_run(seq), usable - hits)
        return hits

    def _can_place(self, seq: ModelledSequence, hits: int) -> bool:
        num_keyed = min(hits, len(seq.keys))
        from_free = self.cache.num_free_among(seq.keys[:num_keyed]) + hits - num_keyed
        return -(-seq.num_tokens // self._size) - hits + from_free <= self.cache.num_free

    def _is_in_flight(self, seq: ModelledSequence, index: int, prefilling: list[ModelledSequence]) -> bool:
        """Whether a running sequence computes block `index` of `seq`, or is about to."""
        key = seq.keys[index : index + 1]
        return bool(key) and any(
            other.keys[index : index + 1] == key and index < other.num_known_blocks(self._size) for other in prefilling
        )

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
        self._num_sampled += seq.needs_sampling

    # the end of a step

    def _commit(self) -> None:
        """Take over what the step has computed."""
        ended_s = self.end_s
        self.step_ends_s.append(ended_s)
        self._num_steps += 1
        self.num_output_tokens += len(self.running) - self._num_prefilling
        ending = [seq for seq, chunk in self._take_changes() if self._take_over(seq, chunk)]
        self._chunks = []
        for seq in ending:
            self._finish(seq)
        if ended_s >= self._noted_s + self._report_s or not self.running:
            self._note(ended_s)

    def _note(self, now: float) -> None:
        self.noted, self._noted_s = self.state(), now

    def _take_changes(self) -> list[tuple[ModelledSequence, _Chunk | None]]:
        """The prompts of the step and the rows that are due behind it, in the order of the running ones."""
        changes: list[tuple[ModelledSequence, _Chunk | None]] = [(chunk.seq, chunk) for chunk in self._chunks]
        while self._next_due() <= self._num_steps:
            changes.append((heapq.heappop(self._due)[-1], None))
        if len(changes) > 1:
            places = {seq: place for place, seq in enumerate(self.running)}
            changes.sort(key=lambda change: places[change[0]])
        return changes

    def _take_over(self, seq: ModelledSequence, chunk: _Chunk | None) -> bool:
        """Count what the step has computed of a prompt, or the block that a row has filled. Returns whether the
        sequence has all its tokens."""
        if chunk is None:
            if seq.last_step(self.max_len) <= self._num_steps:
                return True
            self._publish(seq, seq.offset + self._num_steps - 1)
            self._push_due(seq)
            return False
        seq.num_computed_tokens = chunk.start + chunk.count
        self._publish(seq, seq.num_computed_tokens)
        if seq.num_computed_tokens < seq.num_tokens:
            return False
        self._start_decoding(seq)
        return seq.last_step(self.max_len) <= self._num_steps

    def _push_due(self, seq: ModelledSequence) -> None:
        heapq.heappush(self._due, (seq.next_step(self.max_len, self._size), next(self._order), seq))

    def _start_decoding(self, seq: ModelledSequence) -> None:
        """Count the first token of a sequence whose prompt has been computed."""
        self.num_output_tokens += 1
        self._num_prefilling -= 1
        steps = self._num_steps
        seq.is_decoding, seq.first_step = True, steps
        seq.offset = seq.num_tokens + 1 - steps
        self._offsets += seq.offset
        self._growing[(seq.offset - 1) % self._size] += 1
        self._push_due(seq)

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
        self._num_sampled -= seq.needs_sampling
        self._release(seq)
        self._is_stuck = False
        seq.num_ended_steps = self._num_steps
        self.finished.append(seq)

    def _publish(self, seq: ModelledSequence, num_computed_tokens: int) -> None:
        """Offer the blocks that have become full and that others may want."""
        keys, held = seq.keys, seq.held_keys
        for key in keys[len(held) : num_computed_tokens // self._size]:
            held.append(key if self.cache.publish(key) else None)

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
            self._num_sampled -= seq.needs_sampling
            self._release(seq)
        else:
            return
        self._is_stuck = False
        self.finished.append(seq)
