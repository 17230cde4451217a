"""One cache, offline: what share of prompts' tokens it would have had, if the prompts came one behind the other. Pure.

The rules are those of a replica's block pool: full blocks of token ids, known by all that stands before them; those
longest unused are forgotten, the deepest of a prompt first; the last token of a prompt is always computed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

KEY_BYTES = 12


class Prompt(NamedTuple):
    """A prompt of which only lengths and equal beginnings count. keys: of its full blocks."""

    num_tokens: int
    keys: list[bytes]


def make_prompt(token_ids: Sequence[int], block_size: int) -> Prompt:
    """The prompt of these token ids."""
    packed, key = np.asarray(token_ids, np.uint32).tobytes(), b""
    keys = []
    for begin in range(0, len(token_ids) // block_size * block_size, block_size):
        key = blake2b(key + packed[4 * begin : 4 * (begin + block_size)], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return Prompt(len(token_ids), keys)


def count_blocks(prompts: Iterable[Prompt]) -> int:
    """Different full blocks of the prompts: what a cache must hold to forget none."""
    return len({key for prompt in prompts for key in prompt.keys})


def measure_share(prompts: Iterable[Prompt], block_size: int, num_blocks: int | None) -> float:
    """Share of the prompts' tokens that a cache of `num_blocks` had. num_blocks None: it forgets nothing."""
    held: OrderedDict[bytes, None] = OrderedDict()
    cached_tokens = num_tokens = 0
    for prompt in prompts:
        hits = next((place for place, key in enumerate(prompt.keys) if key not in held), len(prompt.keys))
        cached_tokens += min(hits, (prompt.num_tokens - 1) // block_size) * block_size
        num_tokens += prompt.num_tokens
        for key in reversed(prompt.keys):
            held[key] = None
            held.move_to_end(key)
        while num_blocks is not None and len(held) > num_blocks:
            held.popitem(last=False)
    return cached_tokens / num_tokens
