"""Where top_k and top_p end in rows of scores, found without sorting: digit by digit of the score that is the last one
left, and then its id.

A score's key is the bits of the float, which grow as it falls. Each pass adds up, for the 16 values of the next four
bits, the tokens (top_k) or their weights (top_p) among those that share the digits found so far; where the sum reaches
its target is the next digit. Sums are integers, so their order does not matter, and atomic additions give the same at
every run. All rows take part in each pass, a tile a program; those that want none of it end at once, and so do tiles
without a token that still counts. Nothing depends on what the host knows of the scores, so no pass waits for it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.sampling.exact import key_of, scaled_scores, weigh
from penstock.workers.compute.triton.sampling.sampling_inputs import EVERY_KEY, SamplingInputs

TILE_TOKENS = 2048
PASSES = 8
DIGITS = 16
_PASSES = tl.constexpr(PASSES)
_DIGITS = tl.constexpr(DIGITS)
_DIGIT_BITS = tl.constexpr(4)


class Rows(NamedTuple):
    """Where R rows of scores come from: see `exact.scaled_scores`."""

    logits: Tensor
    """float32 [R, vocab_size], as the model gave them."""
    changed: Tensor
    """float32 [A, vocab_size]: the rows that are changed."""
    sources: Tensor
    """int32 [R]: index among the changed rows, or -1."""
    tops: Tensor
    """float32 [R]: the largest logit of each row, finite."""
    temperatures: Tensor
    """float32 [R]."""


@triton.jit
def _is_wanted(share, is_count: tl.constexpr):
    return share > 0 if is_count else share < 1.0


@triton.jit
def _find_target(total, share, is_count: tl.constexpr):
    """What the sum has to reach: top_k, or `truncation.target_weight`."""
    target = share
    if not is_count:
        wanted = total.to(tl.float64) * share
        whole = wanted.to(tl.int64)
        whole += (whole.to(tl.float64) < wanted).to(tl.int64)
        target = tl.maximum(tl.minimum(total, whole), 1)
    return target


@triton.jit
def _follow(sums, states, share, row, place, is_count: tl.constexpr):
    """The first `place` digits, 1 or more, of the key, and what the sum behind them has still to reach."""
    found = tl.load(sums + (row * _PASSES + place - 1) * _DIGITS + tl.arange(0, _DIGITS))
    state = states + (row * _PASSES + place - 1) * 2
    target = tl.load(state + 1)
    target = tl.where(place == 1, _find_target(tl.sum(found, 0), share, is_count), target)
    reached = tl.cumsum(found, 0)
    is_before = reached < target
    digit = tl.minimum(tl.sum(is_before.to(tl.int64), 0), _DIGITS - 1)
    return tl.load(state) * _DIGITS + digit, target - tl.max(tl.where(is_before, reached, 0), 0)


@triton.jit(do_not_specialize=["place"])
def _add_up(
    logits, changed, sources, tops, temperatures, shares, keys, sums, states, tile_sums, place, vocab_size, num_tiles,
    is_first: tl.constexpr, is_count: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    share = tl.load(shares + row)
    if _is_wanted(share, is_count):
        prefix = row * 0
        if not is_first:
            prefix, target = _follow(sums, states, share, row, place, is_count)
            state = states + (row * _PASSES + place) * 2
            tl.store(state, prefix, mask=tile == 0)
            tl.store(state + 1, target, mask=tile == 0)
        ids = tile * lanes + tl.arange(0, lanes)
        scaled = scaled_scores(logits, changed, sources, tops, temperatures, row, ids, vocab_size)
        key = key_of(scaled)
        shift = (_PASSES - 1 - place) * _DIGIT_BITS
        own = key.to(tl.int64) >> shift
        is_here = (ids < vocab_size) & (key <= tl.load(keys + row)) & ((own >> _DIGIT_BITS) == prefix)
        if tl.max(is_here.to(tl.int32), 0) > 0:
            amount = is_here.to(tl.int64)
            if not is_count:
                amount = tl.where(is_here, weigh(scaled.to(tl.float64)), 0)
            digits = own & (_DIGITS - 1)
            for digit in tl.static_range(0, _DIGITS):
                total = tl.sum(tl.where(digits == digit, amount, 0), 0)
                where = (row * _PASSES + place) * _DIGITS + digit
                tl.atomic_add(sums + where, total, mask=total != 0, sem="relaxed")
                tl.store(tile_sums + (row * num_tiles + tile) * _DIGITS + digit, total, mask=place == _PASSES - 1)


@triton.jit
def _end(
    logits, changed, sources, tops, temperatures, shares, keys, last_ids, sums, states, tile_sums, vocab_size,
    num_tiles, is_count: tl.constexpr, lanes: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(shares + row)
    if _is_wanted(share, is_count):
        key, target = _follow(sums, states, share, row, _PASSES, is_count)
        tl.store(keys + row, key.to(tl.int32))
        if not is_count:  # of equals the lower ids come first
            each = tl.arange(0, tiles)
            where = tile_sums + (row * num_tiles + each) * _DIGITS + (key & (_DIGITS - 1))
            reached = tl.cumsum(tl.load(where, mask=each < num_tiles, other=0), 0)
            is_before = reached < target
            tile = tl.minimum(tl.sum(is_before.to(tl.int32), 0), num_tiles - 1)
            target -= tl.max(tl.where(is_before, reached, 0), 0)
            ids = tile * lanes + tl.arange(0, lanes)
            scaled = scaled_scores(logits, changed, sources, tops, temperatures, row, ids, vocab_size)
            is_equal = (ids < vocab_size) & (key_of(scaled).to(tl.int64) == key)
            reached = tl.cumsum(tl.where(is_equal, weigh(scaled.to(tl.float64)), 0), 0)
            last = tl.min(tl.where(is_equal & (reached >= target), ids, vocab_size), 0)
            tl.store(last_ids + row, last)


def find_cuts(rows: Rows, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """What top_k and top_p leave of R rows: int32 [R], the key of the last score that is left, and int32 [R], the last
    id that is left of those with that score."""
    num_rows, vocab_size = rows.logits.shape
    keys = torch.full((num_rows,), EVERY_KEY, dtype=torch.int32, device=rows.logits.device)
    last_ids = torch.full_like(keys, vocab_size)
    if inputs.has_top_k:
        _find(rows, inputs.tensors.top_k, keys, last_ids, is_count=True)
    if inputs.has_top_p:
        _find(rows, inputs.tensors.top_p, keys, last_ids, is_count=False)
    return keys, last_ids


def _find(rows: Rows, shares: Tensor, keys: Tensor, last_ids: Tensor, *, is_count: bool) -> None:
    """Narrow the cuts. shares: top_k or top_p of each row."""
    num_rows, vocab_size = rows.logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE_TOKENS)
    sums, states, tile_sums = (
        torch.zeros(num_rows, *shape, dtype=torch.int64, device=keys.device)
        for shape in ((PASSES, DIGITS), (PASSES, 2), (num_tiles, DIGITS))
    )
    for place in range(PASSES):
        _add_up[(num_rows, num_tiles)](
            *rows, shares, keys, sums, states, tile_sums, place, vocab_size, num_tiles, is_first=place == 0,
            is_count=is_count, lanes=TILE_TOKENS, enable_fp_fusion=False,
        )  # fmt: skip
    _end[(num_rows,)](
        *rows, shares, keys, last_ids, sums, states, tile_sums, vocab_size, num_tiles, is_count=is_count,
        lanes=TILE_TOKENS, tiles=triton.next_power_of_2(num_tiles), enable_fp_fusion=False,
    )  # fmt: skip
