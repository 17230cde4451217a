"""Masks of a step's constrained rows, computed before the step where that takes microseconds, else in threads while the
model computes the rows' logits.

Most masks take less time than it takes to wake a thread, which then has a core that the model computes on. But nobody
knows beforehand how long the next one takes, so a sequence's masks are computed in the step's own thread only after
several quick ones, and after a slow one there it takes twice as many to be trusted again.

A row whose mask is not ready soon after its logits is late: it gets no token in this step, and its logits are computed
again in the next one, so that a grammar that is slow to follow holds up no other row. Invariant: a mask is that of the
sequence's tokens when it is used; one that was computed for other tokens is thrown away.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

from penstock.workers.compute.grammar.matcher import Allowed, GrammarFault, Matcher
from penstock.workers.engine.sequence import Chunk, Sequence

MAX_THREADS = 4
WAIT_S = 0.002
"""Longest wait for masks behind the logits: most are there long before."""
LONE_WAIT_S = 0.016
"""Longest further wait where every row of the step waits for its mask."""
QUICK_S = 0.0004
"""CPU time of a row's masks below which they are quick."""
OWN_THREAD_S = 0.0003
"""Time that masks may take of a step's own thread, before it computes."""
FIRST_TRUST = 4
"""Quick masks in a row after which a sequence's next ones are expected to be quick."""


class RowMasks(NamedTuple):
    """Masks of a sequence's next places, as far as its draft fits the grammar."""

    allowed: list[Allowed]
    must_end: list[bool]
    """Whether the answer ends with whatever is chosen at the place: the grammar lets no text follow."""
    error: str | None = None
    """Why there are no more."""


class _Ends(NamedTuple):
    """Tokens that are no text of an answer and end it."""

    offered: list[int]
    """Tokens that may be chosen wherever the answer may end."""
    last: list[int]
    """Tokens that may be chosen where nothing else may follow."""


class _Job(NamedTuple):
    num_output_tokens: int
    future: "Future[RowMasks]"


class _Pace:
    """How quick the masks of a sequence have been."""

    __slots__ = ("_num_quick", "_wanted")

    def __init__(self) -> None:
        self._num_quick, self._wanted = 0, FIRST_TRUST

    @property
    def is_quick(self) -> bool:
        """Whether the next masks are expected to be quick."""
        return self._num_quick >= self._wanted

    def add(self, seconds: float) -> None:
        if seconds < QUICK_S:
            self._num_quick += 1
            return
        if self.is_quick:
            self._wanted *= 2
        self._num_quick = 0


class MaskThreads:
    """Computes masks. Its methods belong to the thread that runs steps."""

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int, num_threads: int) -> None:
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._executor = ThreadPoolExecutor(min(MAX_THREADS, num_threads), thread_name_prefix="mask")
        self._jobs: dict[Sequence, _Job] = {}
        self._paces: dict[Sequence, _Pace] = {}
        self._own_until_s = 0.0
        """Time until which the step's own thread computes masks."""

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Begin with the masks of a step, before its batch is made: drafts are cut where the grammar does not allow
        them."""
        self._own_until_s = 0.0
        for chunk in chunks:
            seq = chunk.seq
            if seq.grammar is None or not chunk.is_sampled:
                continue
            job = self._jobs.get(seq)
            if job is not None and job.num_output_tokens == seq.num_output_tokens:
                chunk.draft = None  # the row was late, or its step failed: its masks are as good as new
            else:
                self._begin(chunk, matcher_of(seq))

    def find_late(self, seqs: Seq[Sequence], num_rows: int) -> frozenset[Sequence]:
        """Wait a little for the masks that have been begun. Returns the sequences that have to do without. num_rows:
        sequences of the step that are to get tokens, these and others."""
        pending = {
            job.future: seq
            for seq in seqs
            if seq.grammar is not None and (job := self._jobs.get(seq)) is not None and not job.future.done()
        }
        undone = wait(pending, WAIT_S).not_done if pending else set()
        if undone and len(undone) == num_rows:
            undone = wait(undone, LONE_WAIT_S).not_done
        return frozenset(pending[future] for future in undone)

    def is_ready(self, seq: Sequence) -> bool:
        """Whether the masks of a sequence have been begun, and are there."""
        job = self._jobs.get(seq)
        return job is not None and job.future.done()

    def of(self, seq: Sequence) -> RowMasks:
        """Masks of a sequence that is not late."""
        return self._jobs[seq].future.result()

    def settle(self, seq: Sequence, token_ids: Seq[int]) -> bool:
        """Go behind the tokens that were chosen, and forget the masks. Returns whether nothing may follow. Raises
        GrammarFault."""
        self._jobs.pop(seq, None)
        matcher = matcher_of(seq)
        matcher.go_to(seq.token_ids[seq.num_prompt_tokens :], token_ids)
        return matcher.is_complete

    def is_end(self, seq: Sequence, token_id: int) -> bool:
        """Whether the token ends the answer, and so does not go through the grammar."""
        return token_id in self._eos or token_id in seq.sampling.stop_token_ids

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept of a sequence that has ended; what is under way for it ends by itself."""
        self._jobs.pop(seq, None)
        self._paces.pop(seq, None)

    def _begin(self, chunk: Chunk, matcher: Matcher) -> None:
        seq = chunk.seq
        output, draft = seq.token_ids[seq.num_prompt_tokens :], chunk.draft or []
        if draft:
            draft = _cut(matcher, output, draft)
            chunk.draft = draft or None
        pace = self._paces.setdefault(seq, _Pace())
        compute = partial(_compute_timed, pace, matcher, output, draft, self._ends(seq))
        future = self._compute_here(compute) if pace.is_quick else self._executor.submit(compute)
        self._jobs[seq] = _Job(len(output), future)

    def _compute_here(self, compute: Callable[[], RowMasks]) -> "Future[RowMasks]":
        """Compute masks that are expected to be quick, as long as there is time for that; else in a thread."""
        now_s = time.perf_counter()
        self._own_until_s = self._own_until_s or now_s + OWN_THREAD_S
        if now_s > self._own_until_s:
            return self._executor.submit(compute)
        future: Future[RowMasks] = Future()
        future.set_result(compute())
        return future

    def _ends(self, seq: Sequence) -> _Ends:
        stops = {token_id for token_id in seq.sampling.stop_token_ids if 0 <= token_id < self._vocab_size}
        last = sorted(stops | self._eos)
        return _Ends(sorted(stops) if seq.sampling.ignore_eos else last, last)


def matcher_of(seq: Sequence) -> Matcher:
    assert isinstance(seq.grammar, Matcher)
    return seq.grammar


def _compute_timed(pace: _Pace, matcher: Matcher, output: Seq[int], draft: Seq[int], ends: _Ends) -> RowMasks:
    begun_s = time.thread_time()  # without what the thread waits for others
    masks = compute_masks(matcher, output, draft, ends)
    pace.add(time.thread_time() - begun_s)
    return masks


def compute_masks(matcher: Matcher, output: Seq[int], draft: Seq[int], ends: _Ends) -> RowMasks:
    """Masks of the place behind the output, and of those behind each token of the draft that may stand there."""
    allowed: list[Allowed] = []
    must_end: list[bool] = []
    try:
        matcher.go_to(output)
        for place in range(len(draft) + 1):
            row, may_end = matcher.allowed()
            must_end.append(may_end and row.is_empty())
            if may_end:
                row.add(ends.last if must_end[-1] else ends.offered)
            allowed.append(row)
            if place == len(draft) or not matcher.try_step(draft[place]):
                break
    except GrammarFault as fault:
        return RowMasks(allowed, must_end, str(fault))
    return RowMasks(allowed, must_end)


def _cut(matcher: Matcher, output: Seq[int], draft: list[int]) -> list[int]:
    """The beginning of the draft that the grammar allows."""
    try:
        matcher.go_to(output)
    except GrammarFault:
        return []  # which its masks will tell
    return draft[: matcher.count_fitting(draft)]
