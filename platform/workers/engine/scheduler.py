"""The one-phase scheduler: a token budget per step, so that `num_computed_tokens` catches up with the tokens known.

Prefill chunks, decode rows, resumed sequences, prefix hits and speculation are the same arithmetic (vLLM V1's
scheduler, without its phases). Pure: no torch, no clock. First come, first served, and those of the class batch behind
all others:

* running sequences first, each with all it lacks, as far as the budget goes after a row for every decoding one;
* then waiting ones, admitted when the blocks of all their known tokens are free, minus what the cache holds. At most
  MAX_BYPASSES are admitted past one that is not, so that it waits for a bounded number of others;
* tenants that lack tokens divide the budget by weight (`prompt_shares`). While others of its tenant lack tokens too, a
  prompt takes at most half of what is left when its turn comes, and at most MAX_PARTIAL prompts of a tenant are
  computed in part; what nobody else wanted goes to them in the end;
* beside sequences of other classes, prompts of the class batch take at most BATCH_PROMPT_S of a step, but a token
  each;
* a prompt whose log probabilities are wanted takes no block of the cache whose tokens are to be scored, and a step
  scores MAX_SCORED_TOKENS of all prompts, half of what is left for each while others wait;
* a running sequence that finds no free block takes them from the newest, which starts over later (recompute; its
  published blocks stay in the cache as long as nobody needs them). The oldest always proceeds, so every sequence
  finishes;
* before all that, rows lose their blocks and places to a sequence that waits and whose tenant has fewer by weight
  (`row_shares`): as many of the newest as it needs, also where it is targets that leave no room for one more. The
  class batch counts as one like others after MAX_OVERTAKEN admissions past it, so it does not starve;
* a search takes as many rows as it has beams, all or none of them: when it loses its blocks, it starts over. Beams
  share blocks until one writes to a block that others read: then it gets a copy;
* where answers have a target of seconds per token, a step has as many tokens as keep the strictest one; rows of others
  come behind the prompts, if there is time, and nobody is admitted who would break it (`paced_steps`);
* last, places for drafts behind decode rows, from budget and blocks that nobody else wants.

A device may be given a step before the one that it computes has ended (`steps_ahead`): what that one computes is then
assumed, and its `commit` says what it was, publishes blocks and ends sequences. A row that the step behind it has for
one of these is for nothing, and that step's commit passes over it. What such a row writes stands in a block that is
free by then, and before whatever the block's next owner writes.

Invariants: `schedule` and `commit` alternate, but that one step may be assumed and the next one scheduled between them;
`finish` may come at any time but between `schedule` and the end of what is done with it. (Where a step could not be
computed, `finish` of each of its sequences stands for `commit`.) Only tokens the target chose enter `token_ids`, and
only their KV is counted as computed, published or kept: what was drafted in vain leaves nothing but stale slots that
are written over.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from penstock.perf.pace import count_places
from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, StepCosts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.beam_rows import advance, begin_search, find_refusal, num_lacking_blocks, take_blocks
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.bypasses import MAX_BLOCKED, Bypasses
from penstock.workers.engine.draft_lengths import DraftLengths, Use
from penstock.workers.engine.draft_places import reserve_drafts
from penstock.workers.engine.paced_steps import PacedStep, admits, pace_step
from penstock.workers.engine.prompt_budget import PromptBudget
from penstock.workers.engine.results import Results
from penstock.workers.engine.row_shares import RowShares
from penstock.workers.engine.sequence import Chunk, Sampled, SeqOutput, Sequence, Status, Step
from penstock.workers.engine.steps_ahead import are_independent

NO_COSTS = StepCosts()
MAX_DEFERRED = 16
"""Most waiting sequences that a step passes over because a running one is just computing their prefix, or because
MAX_PARTIAL longer ones are under way."""
MAX_CONTENDERS = 128
"""Waiting sequences, the first ones, for which rows of other tenants may give way."""
MAX_OVERTAKEN = 10
"""Most sequences that are admitted past the first of the class batch that waits; then it is one like others."""
MAX_PARTIAL = 2
"""Most prompts of a tenant that are admitted with a part of their tokens while others wait; they hold the blocks of
all. Those of the class batch count for each other only."""


class Ahead(NamedTuple):
    """Sequences that wait for a place, and tokens of prompts not computed yet, those of running sequences among
    them."""

    num_waiting: int
    prefill_tokens: int


class Scheduler:
    """Chooses what each step computes, and takes over its results. It owns the sequences and who holds which block."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: ChainHasher,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """max_model_len: tokens of a sequence, prompt and output, that the model allows."""
        self.pool = pool
        self.running: list[Sequence] = []
        """Sequences that hold blocks, in order of admission, those of the class batch last."""
        self.waiting: deque[Sequence] = deque()
        """Sequences without blocks, the next one to be admitted first, those of the class batch last."""
        self.max_len = min(max_model_len, pool.num_blocks * pool.block_size)
        """Longest sequence, prompt and output, in tokens."""
        self._config = config
        self._block_size = pool.block_size
        self._eos_token_ids = eos_token_ids
        speculation = config.speculation
        self.drafts = DraftLengths(
            speculation.max_draft_tokens,
            is_adaptive=speculation.adaptive,
            knows_chances=speculation.method == "head" and config.runner == "torch",
        )
        self._has_drafter = speculation.method != "none"
        """Whether there are drafts for sequences without a prediction of their own."""
        self.has_targets = False
        """Whether a sequence with a target of seconds per token has come."""
        self._results = Results(pool, hasher, self.drafts, eos_token_ids, self.max_len)

    def can_run_ahead(self, step: Step) -> bool:
        """Whether the step that comes next can be scheduled before this one's tokens are known."""
        return not self._has_drafter and are_independent(step)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_places(self) -> int:
        """Sequences that may be here at once now."""
        if not self.has_targets:
            return self._config.num_places
        has_batch = any(seqs and seqs[-1].is_batch for seqs in (self.running, self.waiting))
        lookahead = self._config.num_places - self._config.max_num_seqs
        return min(self._config.num_places, count_places(len(self.running), lookahead, has_batch=has_batch))

    @property
    def ahead(self) -> Ahead:
        """What another sequence would wait for. The class batch does not count where sequences with a target have come:
        it yields to all others, wherever it is."""
        is_yielding = self.has_targets
        waiting = [len(seq.token_ids) for seq in self.waiting if not (is_yielding and seq.is_batch)]
        prefill_tokens = sum(waiting)
        for seq in self.running:
            lacking = len(seq.token_ids) - seq.num_computed_tokens
            if lacking > 1 and not (is_yielding and seq.is_batch):
                prefill_tokens += lacking
        return Ahead(len(waiting), prefill_tokens)

    @property
    def num_rows(self) -> int:
        """Rows of the running sequences."""
        return sum([seq.num_rows for seq in self.running])

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, seq: Sequence) -> bool:
        """Queue a sequence. Returns False if it is finished already: refused, with the reason in `error`, or resumed
        when it had all its tokens."""
        self.has_targets |= seq.tpot_s is not None
        seq.error = self._refusal(seq) or find_refusal(seq, self._config.max_num_seqs, self.pool)
        if seq.error is not None:
            self._end(seq, Finish.REFUSED)
        elif seq.num_output_tokens >= seq.sampling.max_tokens and not _is_prompt_wanted(seq):
            self._end(seq, Finish.LENGTH)
        else:
            begin_search(seq, self._eos_token_ids)
            self.waiting.insert(len(self.waiting) if seq.is_batch else self._num_urgent_waiting(), seq)
        return seq.finish is None

    def _num_urgent_waiting(self) -> int:
        """Waiting sequences that are not of the class batch: they come first."""
        return sum(not seq.is_batch for seq in self.waiting)

    def _refusal(self, seq: Sequence) -> str | None:
        num_blocks = seq.num_tokens // self._block_size
        if not seq.token_ids:
            return "The sequence has no tokens."
        if seq.num_tokens >= self.max_len:
            return (
                f"The sequence has {seq.num_tokens} tokens; this replica holds at most {self.max_len}, "
                "and one must be left for output."
            )
        if len(seq.block_keys) > num_blocks:
            return (
                f"The sequence came with {len(seq.block_keys)} block keys and has only {num_blocks} full blocks "
                f"of {self._block_size} tokens."
            )
        return None

    def finish(self, seq: Sequence, finish: Finish, error: str | None = None) -> None:
        """End a sequence, wherever it is, and free its blocks; nothing happens if it has ended. Between `schedule` and
        `commit` only in place of the latter."""
        if seq.finish is not None:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._end(seq, finish)
        seq.error = error or seq.error

    def _end(self, seq: Sequence, finish: Finish) -> None:
        seq.status, seq.finish = Status.FINISHED, finish
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        for table in seq.block_tables:
            self.pool.free(table)
        seq.block_table, seq.beams = [], []
        if seq.search is not None:
            seq.search.start_over()
        seq.num_computed_tokens = seq.num_published_blocks = 0

    # schedule

    def schedule(self, costs: StepCosts = NO_COSTS, now: float = 0.0) -> Step:
        """The next step; empty only when there is no work.

        costs: what steps take, by which drafts are weighed and targets kept. now: time at which it begins, seconds of
        any clock that goes on; where a step is under way, its expected end.
        """
        step = Step([], [])
        token_budget = self._config.token_budget
        prompts = PromptBudget(self.running, self.waiting, token_budget, costs, num_candidates=MAX_DEFERRED)
        if self.waiting and self.running:
            self._give_way(step, costs)
        num_displaced = len(step.preempted)
        paced = self._pace(costs, now)
        budget = self._schedule_running(step, prompts, paced)
        if self.waiting and len(step.preempted) == num_displaced:
            budget = self._admit(step, budget, prompts, costs)
        if budget and prompts.partial:
            budget = prompts.top_up(budget)
        if paced is not None and paced.deferred:
            budget -= self._add_deferred(step, paced)
        use = self._begin_drafts(step, costs) if self._has_drafter else Use.NONE
        # a step that is only seen tells what others are compared with, so it has no drafts of predictions either
        if budget > 0 and not step.preempted and use is not Use.OBSERVED:
            self._reserve_drafts(step, budget, costs, has_drafter=use is Use.DRAFTED)
        return step

    def _begin_drafts(self, step: Step, costs: StepCosts) -> Use:
        """What the step may do with the drafter, by how many sequences run; the chunks are told where it is nothing."""
        use = self.drafts.begin(max(1, len(self.running), len(step.chunks)), costs)
        if use is Use.NONE:
            for chunk in step.chunks:
                chunk.is_observed = False
        return use

    def _pace(self, costs: StepCosts, now: float) -> PacedStep | None:
        """The bounds of the step, where it has others than the token budget."""
        if not self.has_targets:
            return None
        first = self.waiting[0] if self.waiting else None
        return pace_step(self.running, first, costs, self._config.token_budget, now)

    def _add_deferred(self, step: Step, paced: PacedStep) -> int:
        """Rows that have yielded to others, as far as there is time and blocks are free. Returns how many."""
        num_before = len(step.chunks)
        for seq in paced.deferred:
            seq.num_skipped += 1
        for seq in paced.choose_deferred(step.shape):
            start = seq.num_computed_tokens
            missing = start // self._block_size + 1 - len(seq.block_table)
            has_next = seq.token_ids[-1] >= 0 or not self._results.is_longest(seq)
            if has_next and missing <= self.pool.num_free:
                seq.block_table += self.pool.allocate(max(0, missing))
                seq.num_skipped = 0
                step.chunks.append(Chunk(seq, start, 1))
        return len(step.chunks) - num_before

    def _reserve_drafts(self, step: Step, budget: int, costs: StepCosts, *, has_drafter: bool) -> None:
        if not has_drafter:
            if not (self.drafts.looks_up or any(seq.prediction for seq in self.running)):
                return
            # what a draft's token costs is not measured where there is no drafter
            costs = msgspec.structs.replace(costs, draft_token_s=costs.draft_token_s or costs.prefill_token_s)
        reserve_drafts(step, budget, costs, self.drafts, self.pool, self.max_len, has_drafter=has_drafter)

    def _give_way(self, step: Step, costs: StepCosts) -> None:
        """Let sequences run whose tenants have less than their share, in the places, blocks and time of rows of others.
        One that finds room without that is left to `_admit`."""
        shares = RowShares(self.running)
        num_places = self._config.max_num_seqs - self.num_rows
        num_blocked = 0
        for seq in tuple(itertools.islice(self.waiting, MAX_CONTENDERS)):
            if next(shares.victims(seq), None) is not None:
                hits = self._find_hits(seq)
                has_room = num_places >= seq.num_rows and self._can_place(seq, hits) and self._keeps_targets(seq, costs)
                victims = [] if has_room else self._find_victims(seq, hits, shares, costs)
                if victims is None:
                    num_blocked += 1
                    if num_blocked >= MAX_BLOCKED:
                        return
                    continue
                for victim in victims:
                    self._preempt(victim, step)
                if victims:
                    self.waiting.remove(seq)
                    self._place(seq, hits)
                    shares = RowShares(self.running)
                    num_places += sum(victim.num_rows for victim in victims)
            num_places -= seq.num_rows

    def _find_victims(
        self, seq: Sequence, hits: list[int], shares: RowShares, costs: StepCosts
    ) -> list[Sequence] | None:
        """The rows that have to give way for a waiting sequence to run: for its place, its blocks, and the time that
        targets leave. Returns None where those that may are not enough. hits: blocks that the cache holds."""
        victims: list[Sequence] = []
        for victim in shares.victims(seq):
            victims.append(victim)
            num_rows = self.num_rows - sum(each.num_rows for each in victims) + seq.num_rows
            has_place = num_rows <= self._config.max_num_seqs
            has_room = has_place and self._can_place(
                seq, hits, [table for each in victims for table in each.block_tables]
            )
            if has_room and self._keeps_targets(seq, costs, besides=victims):
                return victims
        return None

    def _keeps_targets(self, seq: Sequence, costs: StepCosts, besides: Iterable[Sequence] = ()) -> bool:
        """Whether a waiting sequence may run without breaking anyone's target, when those `besides` it have gone."""
        if not self.has_targets:
            return True
        gone = set(besides)
        return admits([other for other in self.running if other not in gone], seq, costs)

    def _schedule_running(self, step: Step, prompts: PromptBudget, paced: PacedStep | None) -> int:
        """Chunks for the running sequences, in order, but those that may yield; returns the budget left."""
        running, chunks, size = self.running, step.chunks, self._block_size
        budget = self._config.token_budget if paced is None else paced.token_budget
        deferred = set() if paced is None else set(paced.deferred)
        num_prompts = sum(seq.num_uncomputed_tokens > 1 for seq in running)
        num_decodes = sum(len(seq.beams) or seq.num_uncomputed_tokens == 1 for seq in running) - len(deferred)
        is_shared = num_prompts + bool(self.waiting) > 1
        if num_prompts + len(self.waiting) > 1:
            prompts.divide(budget - num_decodes)
        position = 0
        while position < len(running):
            seq = running[position]
            position += 1
            if paced is not None:
                if seq in deferred:
                    continue
                seq.num_skipped = 0
            if seq.beams:
                num_decodes -= len(seq.beams)
                if self._grow_beams(seq, step):
                    chunks += [Chunk(beam, beam.num_computed_tokens, 1) for beam in seq.beams]
                    budget -= len(seq.beams)
                continue
            start = seq.num_computed_tokens
            count = lacking = len(seq.token_ids) - start
            if count == 1:
                num_decodes -= 1
                if seq.token_ids[-1] < 0 and self._results.is_longest(seq):
                    continue  # it ends with the token that is under way
            else:
                left = budget - num_decodes
                count = min(lacking, prompts.share(seq, left, position) if is_shared or seq.is_batch else left)
            count = prompts.bound_scored(seq, start, count)
            if count and (start + count <= len(seq.block_table) * size or self._grow(seq, start + count, step)):
                chunks.append(Chunk(seq, start, count))
                budget -= count
                prompts.take(seq, start, count)
                if count < lacking:
                    prompts.partial.append(chunks[-1])
        return budget

    def _grow(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens, taken from newer sequences if none are free. Returns
        False if `seq` was the newest itself, and so was preempted."""
        missing = -(-num_tokens // self._block_size) - len(seq.block_table)
        while self.pool.num_free < missing:
            if self._preempt_last(step) is seq:
                return False
        seq.block_table += self.pool.allocate(missing)
        return True

    def _grow_beams(self, leader: Sequence, step: Step) -> bool:
        """Give each beam a block for its next token, taken from newer sequences if none are free. Returns False if the
        search was the newest itself, and so was preempted."""
        while self.pool.num_free < num_lacking_blocks(leader, self.pool):
            if self._preempt_last(step) is leader:
                return False
        step.copies.extend(take_blocks(leader, self.pool))
        return True

    def _preempt_last(self, step: Step) -> Sequence:
        """Take its blocks from the newest running sequence, of the class batch if there are any; returns it."""
        seq = self.running[-1]
        self._preempt(seq, step)
        return seq

    def _preempt(self, seq: Sequence, step: Step) -> None:
        """Take its blocks from a running sequence, which waits again, as the first of its class."""
        self.running.remove(seq)
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.waiting.insert(self._num_urgent_waiting() if seq.is_batch else 0, seq)
        step.preempted.append(seq)

    def _admit(self, step: Step, budget: int, prompts: PromptBudget, costs: StepCosts) -> int:
        """Let waiting sequences run; returns the budget left."""
        passed: list[Sequence] = []
        bypasses = Bypasses()
        prefilling = [seq for seq in self.running if seq.num_uncomputed_tokens > 1 or self._has_unpublished(seq)]
        while self.waiting and budget and self.num_rows < self._config.max_num_seqs and len(passed) < MAX_DEFERRED:
            seq = self.waiting.popleft()
            passed.append(seq)
            hits = self._find_hits(seq)
            sooner = [other for other in prefilling if other.is_batch <= seq.is_batch]
            if len(hits) < _num_usable(seq, self._block_size) and _is_next_block_in_flight(seq, len(hits), sooner):
                continue
            num_missing = seq.num_tokens - len(hits) * self._block_size
            limit = prompts.share(seq, budget, len(self.running))
            if seq.lacks_scores:
                limit = prompts.bound_scored(seq, len(hits) * self._block_size, min(limit, num_missing))
            if not limit or (num_missing > limit and prompts.num_partial_beside(seq) >= MAX_PARTIAL):
                continue
            has_place = self.num_rows + seq.num_rows <= self._config.max_num_seqs
            if not has_place or not self._can_place(seq, hits) or not self._keeps_targets(seq, costs):
                if bypasses.pass_over(seq):
                    continue
                break
            passed.pop()
            self._place(seq, hits)
            chunk = Chunk(seq, seq.num_computed_tokens, min(num_missing, limit))
            step.chunks.append(chunk)
            budget -= chunk.num_tokens
            prompts.take(seq, chunk.start, chunk.num_tokens)
            if chunk.end < seq.num_tokens:
                prompts.partial.append(chunk)
            prefilling.append(seq)
            if not bypasses.admit():
                break
        self.waiting.extendleft(reversed(passed))
        return budget

    def _find_hits(self, seq: Sequence) -> list[int]:
        """The cached blocks that a waiting sequence begins with."""
        return self.pool.match(seq.block_keys, _num_usable(seq, self._block_size))

    def _can_place(self, seq: Sequence, hits: list[int], freed: Iterable[list[int]] = ()) -> bool:
        """Whether the blocks of all tokens of a waiting sequence are free. hits: those that the cache holds. freed:
        block tables that would be freed before."""
        return self.pool.can_take(hits, -(-seq.num_tokens // self._block_size) - len(hits), freed)

    def _place(self, seq: Sequence, hits: list[int]) -> None:
        """Give a waiting sequence the blocks of all its tokens, and make it run."""
        self.pool.take(hits)
        seq.block_table = hits + self.pool.allocate(-(-seq.num_tokens // self._block_size) - len(hits))
        seq.num_computed_tokens = len(hits) * self._block_size
        seq.num_published_blocks = len(hits)
        seq.num_bypasses, seq.is_passable = 0, False
        if seq.num_found_blocks is None:
            seq.num_found_blocks = len(hits)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
        seq.status = Status.RUNNING
        if not seq.is_batch:
            self._count_overtaken()
        num_ahead = len(self.running) if seq.is_batch else sum(not other.is_batch for other in self.running)
        self.running.insert(num_ahead, seq)

    def _count_overtaken(self) -> None:
        first = next((other for other in self.waiting if other.is_batch), None)
        if first is not None:
            first.num_overtaken += 1
            if first.num_overtaken >= MAX_OVERTAKEN:
                first.is_batch, first.weight = False, 0.0

    # commit

    def _has_unpublished(self, seq: Sequence) -> bool:
        """Whether a step that is under way fills a block, which its commit publishes."""
        return seq.num_computed_tokens // self._block_size > seq.num_published_blocks

    def commit(self, step: Step, sampled: list[list[Sampled]]) -> list[SeqOutput]:
        """Take over what the runner computed.

        sampled: for each chunk what was chosen at the places behind its known tokens, in order: nothing where the chunk
        ends before the last known token or no token could be chosen yet, whose row is then computed again; else as many
        as there are places up to the first that differs from the draft, and that one. Sequences that have ended since
        the step was scheduled are passed over.
        """
        results = self._results
        outputs: list[SeqOutput] = []
        searching: dict[Sequence, list[Sampled]] = {}
        has_finished = False
        for chunk, choices in zip(step.chunks, sampled, strict=True):
            seq = chunk.seq
            if (seq.leader or seq).finish is not None:
                continue
            if chunk.is_assumed:
                outputs += self._commit_assumed(chunk, choices)
                has_finished |= seq.finish is not None
                continue
            if seq.leader is not None:
                searching.setdefault(seq.leader, []).append(choices[0])
                continue
            if chunk.prompt_logprobs is not None:
                seq.prompt_logprobs.append(chunk.prompt_logprobs)
            if not choices:
                seq.num_computed_tokens = min(chunk.end, len(seq.token_ids) - 1)
                results.publish(seq)
                if chunk.max_drafts:
                    results.trim(seq)
                if chunk.end == len(seq.token_ids) and not seq.sampling.max_tokens:  # only the prompt was wanted
                    outputs.append(SeqOutput(seq, [], finish=Finish.LENGTH))
                    self._end(seq, Finish.LENGTH)
                    has_finished = True
                continue
            if seq.search is not None and choices[0].error is None:
                seq.num_computed_tokens = chunk.end
                results.publish(seq)
                searching[seq] = [choices[0]]
                continue
            output = results.accept(chunk, choices)
            outputs.append(output)
            if output.finish is Finish.ERROR:  # what it computed is not to be trusted: scores that are no numbers last
                self.pool.withdraw(seq.block_table[seq.num_found_blocks :])
            else:
                seq.num_computed_tokens = len(seq.token_ids) - 1
                results.publish(seq)
            if output.finish is not None:
                self._end(seq, output.finish)
                has_finished = True
            elif chunk.max_drafts:
                results.trim(seq)
        for leader, rows in searching.items():
            outputs.append(advance(leader, rows, self.pool))
            if outputs[-1].finish is not None:
                self._end(leader, outputs[-1].finish)
                has_finished = True
        if has_finished:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        return outputs

    def _commit_assumed(self, chunk: Chunk, choices: list[Sampled]) -> list[SeqOutput]:
        """Take over a row that was assumed; its sequence may have lost its blocks since."""
        seq, results = chunk.seq, self._results
        if chunk.row is None:
            results.publish(seq)
            return []
        del seq.token_ids[chunk.end :]
        output = results.accept(chunk, choices)
        if output.finish is Finish.ERROR:
            self.pool.withdraw(seq.block_table[seq.num_found_blocks :])
        else:
            results.publish(seq)
        if output.finish is not None:
            if seq.status is Status.WAITING:
                self.waiting.remove(seq)
            self._end(seq, output.finish)
        return [output]


def _num_usable(seq: Sequence, block_size: int) -> int:
    """Full blocks that the cache may give a sequence: its last token is computed, which makes the logits, and so are
    those tokens of a prompt whose rows are still to give log probabilities, which no block holds."""
    num_tokens = seq.num_scored_tokens if seq.lacks_scores else seq.num_tokens - 1
    return num_tokens // block_size


def _is_prompt_wanted(seq: Sequence) -> bool:
    """Whether a sequence without output is computed all the same, for the log probabilities of its prompt."""
    return seq.sampling.prompt_logprobs is not None and not seq.num_output_tokens


def _is_next_block_in_flight(seq: Sequence, index: int, prefilling: list[Sequence]) -> bool:
    """Whether a running sequence computes block `index` of `seq`, or is about to: waiting for it is cheaper than
    computing it twice.

    The wait is bounded: running sequences proceed, and none that shares the block is admitted ahead of `seq`. Equal
    keys have equal indices.
    """
    key = seq.block_keys[index : index + 1]
    return bool(key) and any(other.block_keys[index : index + 1] == key for other in prefilling)
