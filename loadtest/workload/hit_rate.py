"""The share of prompt blocks that a cache which never forgets would already have: what a replay must have in common
with its trace."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np


def measure_hit_rate(prompts: Iterable[Sequence[int]], block_tokens: int) -> float:
    """The ideal hit rate of prompts of token ids, in the order they are sent, with blocks of `block_tokens` tokens.

    A block is a hit when an earlier prompt had the same block behind the same blocks. As in traces, the last block of a
    prompt counts even when it is not full, and is equal to another only with the same length.
    """
    return measure_hit_rate_of_ids(_blocks(prompt, block_tokens) for prompt in prompts)


def measure_hit_rate_of_ids(rows: Iterable[Iterable[Hashable]]) -> float:
    """The ideal hit rate of rows of block ids, such as a trace's hash_ids."""
    nodes: dict[tuple[int, Hashable], int] = {}
    hits = total = 0
    for row in rows:
        node = 0
        for block in row:
            known = len(nodes)
            node = nodes.setdefault((node, block), known + 1)
            hits += node <= known
            total += 1
    return hits / total if total else 0.0


def _blocks(prompt: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """A digest for each block, so that a whole trace fits into memory."""
    data = np.asarray(prompt, np.uint32).tobytes()
    step = 4 * block_tokens
    for start in range(0, len(data), step):
        yield blake2b(data[start : start + step], digest_size=16).digest()
