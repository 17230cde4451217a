"""Places for drafts behind the decoding rows of a step: KV slots and budget that nobody else wants. Pure.

Not how many tokens are worth a draft (`draft_lengths`), and not the drafts, which the runner makes.
"""

from penstock.wire.frames import StepCosts
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.draft_lengths import DraftLengths
from penstock.workers.engine.sequence import Chunk, Sequence, Step


def reserve_drafts(
    step: Step,
    budget: int,
    costs: StepCosts,
    drafts: DraftLengths,
    pool: BlockPool,
    max_len: int,
    *,
    has_drafter: bool = True,
) -> None:
    """Reserve places behind the decoding rows where drafts pay; nobody is preempted for them. budget: tokens. max_len:
    longest sequence, prompt and output, in tokens. has_drafter: False drafts only for sequences with a prediction."""
    decoding = (chunk for chunk in step.chunks if chunk.num_tokens == 1 and chunk.is_sampled)
    chunks = [chunk for chunk in decoding if not chunk.seq.sampling.num_beams]
    unguessed = [chunk for chunk in chunks if drafts.looks_up and not chunk.seq.prediction]
    if unguessed:
        budget -= _look_up(step, unguessed, budget, costs, drafts, pool, max_len, beside_drafter=has_drafter)
    chunks = [chunk for chunk in chunks if not chunk.num_matched and (has_drafter or chunk.seq.prediction)]
    if not chunks:
        return
    caps = [_cap(chunk.seq, drafts.max_draft_tokens, max_len) for chunk in chunks]
    counts = drafts.choose(chunks, caps, step.shape, costs, budget)
    for chunk, count in zip(chunks, counts, strict=True):
        if count:
            chunk.max_drafts = _reserve_slots(chunk.seq, count, pool)
    unasked = [chunk for chunk, count in zip(chunks, counts, strict=True) if not (count or chunk.seq.prediction)]
    if unasked and drafts.looks_up:
        budget -= sum(counts)
        _look_up(step, unasked, budget, costs, drafts, pool, max_len, beside_drafter=False)


def _look_up(
    step: Step,
    chunks: list[Chunk],
    budget: int,
    costs: StepCosts,
    drafts: DraftLengths,
    pool: BlockPool,
    max_len: int,
    *,
    beside_drafter: bool,
) -> int:
    """Set the drafts that are looked up, in places of their own. Returns how many tokens they have."""
    caps = [_cap(chunk.seq, drafts.max_draft_tokens, max_len) for chunk in chunks]
    drafts.look_up(step, chunks, caps, costs, budget, beside_drafter=beside_drafter)
    num_tokens = 0
    for chunk in chunks:
        if chunk.draft:
            chunk.max_drafts = _reserve_slots(chunk.seq, len(chunk.draft), pool)
            del chunk.draft[chunk.max_drafts :]
            num_tokens += chunk.max_drafts
    return num_tokens


def _cap(seq: Sequence, max_draft_tokens: int, max_len: int) -> int:
    """Most draft tokens that `seq` has room for. Behind an accepted draft another token is chosen: one place is left
    for it."""
    left = min(seq.sampling.max_tokens - seq.num_output_tokens, max_len - seq.num_tokens)
    return min(max_draft_tokens, left - 1)


def _reserve_slots(seq: Sequence, count: int, pool: BlockPool) -> int:
    """Reserve KV slots behind the sequence's tokens, as far as free blocks give them; returns how many."""
    missing = -(-(seq.num_tokens + count) // pool.block_size) - len(seq.block_table)
    seq.block_table += pool.allocate(max(0, min(missing, pool.num_free)))
    return min(count, len(seq.block_table) * pool.block_size - seq.num_tokens)
