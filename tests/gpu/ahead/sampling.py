"""Kernels that change rows of logits and choose tokens."""

from itertools import product

import triton

from penstock.workers.compute.triton.sampling import adjust, cut, sample
from penstock.workers.compute.truncation import MOST_TOKENS
from tests.gpu.ahead.source import EVERY, Sources, source_of

MOST_TILES = triton.next_power_of_2(triton.cdiv(MOST_TOKENS, cut.TILE_TOKENS))
"""Tiles of the largest vocabulary whose tokens are weighed."""
SCORES = {
    "logits": "*fp32", "changed": "*fp32", "sources": "*i32", "tops": "*fp32", "temperatures": "*fp32", "keys": "*i32",
    "last_ids": "*i32",
}  # fmt: skip
"""Arguments that all kernels of a step's rows take."""


def sample_sources() -> Sources:
    yield from _choosing()
    yield from _cutting()
    yield from _adjusting()


def _choosing() -> Sources:
    best = SCORES | {"streams": "*i64", "least_keys": "*i32", "scores": "*fp64", "chosen": "*i64"}
    weights = {"logits": "*fp32", "rows": "*i64", "tops": "*fp32", "sums": "*i64"}
    lanes = {"lanes": sample.TILE_TOKENS}
    for capability in EVERY:
        yield f"sample sm_{capability}", capability, source_of(sample._best_of_tile, best, lanes, capability)
        yield f"sample weights sm_{capability}", capability, source_of(sample._add_weights, weights, lanes, capability)


def _cutting() -> Sources:
    for capability, is_count in product(EVERY, (True, False)):
        shares = "*i64" if is_count else "*fp64"
        pointers = SCORES | {"shares": shares, "sums": "*i64", "states": "*i64", "tile_sums": "*i64"}
        constants = {"is_count": is_count, "lanes": cut.TILE_TOKENS}
        for is_first in (True, False):
            source = source_of(cut._add_up, pointers, constants | {"is_first": is_first}, capability)
            yield f"sample add up sm_{capability} {is_count} {is_first}", capability, source
        source = source_of(cut._end, pointers, constants | {"tiles": MOST_TILES}, capability)
        yield f"sample end sm_{capability} {is_count}", capability, source


def _adjusting() -> Sources:
    lists = dict.fromkeys(("rows", "values", "own_produced", "penalties"), "*fp32")
    lists |= dict.fromkeys(("penalized", "list_sizes", "own_starts", "last_rows"), "*i32")
    lists |= dict.fromkeys(("places", "targets", "entries", "lists", "own_ids", "before", "needed"), "*i64")
    masks = {"rows": "*fp32", "mask_rows": "*i32", "words": "*i32"}
    for capability in EVERY:
        for kernel in (adjust._add, adjust._write_lists, adjust._ban, adjust._penalize):
            lanes = adjust.LIST_LANES if kernel is adjust._penalize else adjust.LANES
            source = source_of(kernel, lists, {"lanes": lanes}, capability)
            yield f"sample {kernel.__name__} sm_{capability}", capability, source
        source = source_of(adjust._mask, masks, {"lanes": adjust.TILE_TOKENS}, capability)
        yield f"sample mask sm_{capability}", capability, source
