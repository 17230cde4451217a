"""What a modelled step asks of a waiting sequence before it lets it run, and what the prompts of a step amount to. As
`penstock.workers.engine.scheduler` does it, with counts instead of blocks. Pure, but for reading the cache.
"""

from collections.abc import Sequence

from penstock.sim.block_cache import BlockCache
from penstock.sim.sequence import ModelledSequence
from penstock.workers.engine.sequence import StepShape


class PromptChunk:
    """Tokens of a prompt in one step."""

    __slots__ = ("count", "seq", "start")

    def __init__(self, seq: ModelledSequence, start: int, count: int) -> None:
        self.seq = seq
        self.start = start
        self.count = count


def shape_step(chunks: Sequence[PromptChunk], num_rows: int, kv_tokens: int) -> StepShape:
    """Shape of a step of these prompts beside `num_rows` rows that decode and read `kv_tokens` tokens of context."""
    prefill_tokens, query_context, shortest_prompt = 0, 0.0, 0
    rows = num_rows
    for chunk in chunks:
        if chunk.count == 1:
            num_rows += 1
            kv_tokens += chunk.start + 1
        else:
            prefill_tokens += chunk.count
            query_context += chunk.count * (chunk.start + (chunk.count + 1) / 2)
            end = chunk.start + chunk.count
            if end == chunk.seq.num_tokens:
                shortest_prompt = min(shortest_prompt or end, end)
    return StepShape(
        rows + len(chunks), num_rows, prefill_tokens, query_context, kv_tokens, shortest_prompt=shortest_prompt
    )


def count_hits(cache: BlockCache, seq: ModelledSequence, usable: int) -> int:
    """Leading blocks of a waiting sequence that the cache holds, at most `usable`."""
    hits = cache.match(seq.keys, usable)
    if hits == len(seq.keys) and seq.num_preemptions:
        hits += min(cache.private_run(seq), usable - hits)
    return hits


def can_place(cache: BlockCache, seq: ModelledSequence, hits: int, block_size: int) -> bool:
    """Whether the blocks that a sequence lacks are free, those of its `hits` that lie among the free ones aside."""
    num_keyed = min(hits, len(seq.keys))
    from_free = cache.num_free_among(seq.keys[:num_keyed]) + hits - num_keyed
    return -(-seq.num_tokens // block_size) - hits + from_free <= cache.num_free


def is_in_flight(seq: ModelledSequence, index: int, prefilling: Sequence[ModelledSequence], block_size: int) -> bool:
    """Whether one of the prefilling sequences computes block `index` of `seq`, or is about to."""
    key = seq.keys[index : index + 1]
    return bool(key) and any(
        other.keys[index : index + 1] == key and index < other.num_known_blocks(block_size) for other in prefilling
    )


def has_prompt_behind(lacking: Sequence[int], waiting: Sequence[ModelledSequence]) -> bool:
    """Whether one of the running sequences that lack so many tokens each, or the first that waits, has a prompt to
    compute."""
    if any(count > 1 for count in lacking):
        return True
    return bool(waiting) and waiting[0].num_tokens > 1
