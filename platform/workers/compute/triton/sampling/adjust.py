"""What parameters and grammars change of rows of logits on a GPU: the very numbers of
`penstock.workers.compute.adjustments`, whose float32 operations these are, in its order and unfused.

Rows are copied, for log probabilities are of the model's own. Biases and banned tokens are lists of places, each of
which a lane changes; a mask is a bit for each token of a row. Penalties strike the tokens of a list that stays on the
device (`count_lists`) and those that a row has beside it, a program a row. The token that the step before has chosen,
which may be known to nobody else, is read where it was chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.sampling.sampling_inputs import RowTensors

LANES = 256
LIST_LANES = 1024
"""Tokens of a list that a program strikes at once."""
TILE_TOKENS = 2048
_COUNT_SHIFT = tl.constexpr(32)
_ID_MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["num_places"])
def _add(rows, places, values, num_places, lanes: tl.constexpr):
    index = tl.program_id(0) * lanes + tl.arange(0, lanes)
    is_real = index < num_places
    place = tl.load(places + index, mask=is_real, other=0)
    value = tl.load(rows + place, mask=is_real, other=0.0) + tl.load(values + index, mask=is_real, other=0.0)
    tl.store(rows + place, value, mask=is_real)


@triton.jit(do_not_specialize=["num_entries"])
def _write_lists(targets, entries, num_entries, lanes: tl.constexpr):
    index = tl.program_id(0) * lanes + tl.arange(0, lanes)
    is_real = index < num_entries
    target = tl.load(targets + index, mask=is_real, other=0).to(tl.pointer_type(tl.int64))
    tl.store(target, tl.load(entries + index, mask=is_real, other=0), mask=is_real)


@triton.jit
def _strike(values, ids, counts, is_struck, repetition, frequency, presence):
    value = tl.load(values + ids, mask=is_struck, other=0.0)
    value = tl.where(value > 0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
    value -= frequency * counts + tl.where(counts > 0, presence, 0.0)
    tl.store(values + ids, value, mask=is_struck)


@triton.jit
def _penalize(
    rows, penalized, lists, list_sizes, own_starts, own_ids, own_produced, penalties, last_rows, before, vocab_size,
    lanes: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(penalized + index).to(tl.int64)
    values = rows + row * vocab_size
    repetition = tl.load(penalties + 3 * index)
    frequency = tl.load(penalties + 3 * index + 1)
    presence = tl.load(penalties + 3 * index + 2)
    last_row = tl.load(last_rows + row)
    last = tl.load(before + last_row, mask=last_row >= 0, other=-1)
    begin = tl.load(own_starts + index)
    end = tl.load(own_starts + index + 1)
    entries = tl.load(lists + index).to(tl.pointer_type(tl.int64))
    size = tl.load(list_sizes + index)
    lane = tl.arange(0, lanes)
    num_last = tl.full((), 0, tl.int64)  # times that the last token was produced before
    for first in range(0, size, lanes):
        is_real = first + lane < size
        entry = tl.load(entries + first + lane, mask=is_real, other=0)
        ids = entry & _ID_MASK
        is_last = is_real & (ids == last)
        num_last += tl.sum(tl.where(is_last, entry >> _COUNT_SHIFT, 0), 0)
        is_struck = is_real & (ids != last)
        for other in range(begin, end):
            is_struck = is_struck & (ids != tl.load(own_ids + other))
        _strike(values, ids, (entry >> _COUNT_SHIFT).to(tl.float32), is_struck, repetition, frequency, presence)
    for first in range(begin, end, lanes):
        is_real = first + lane < end
        ids = tl.load(own_ids + first + lane, mask=is_real, other=0)
        counts = tl.load(own_produced + first + lane, mask=is_real, other=0.0)
        _strike(values, ids, counts, is_real, repetition, frequency, presence)
    ids = tl.where(lane == 0, last, 0)
    counts = (tl.zeros_like(ids) + num_last + 1).to(tl.float32)
    _strike(values, ids, counts, (lane == 0) & (last >= 0), repetition, frequency, presence)


@triton.jit(do_not_specialize=["num_places"])
def _ban(rows, places, needed, last_rows, before, num_places, vocab_size, lanes: tl.constexpr):
    index = tl.program_id(0) * lanes + tl.arange(0, lanes)
    is_real = index < num_places
    place = tl.load(places + index, mask=is_real, other=0)
    wanted = tl.load(needed + index, mask=is_real, other=-1)
    last_row = tl.load(last_rows + place // vocab_size, mask=is_real, other=-1)
    last = tl.load(before + last_row, mask=is_real & (last_row >= 0), other=-1)
    is_banned = is_real & ((wanted < 0) | (wanted == last))
    tl.store(rows + place, tl.full((lanes,), float("-inf"), tl.float32), mask=is_banned)


@triton.jit
def _mask(rows, mask_rows, words, vocab_size, num_words, lanes: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(mask_rows + place).to(tl.int64)
    ids = tl.program_id(1) * lanes + tl.arange(0, lanes)
    is_real = ids < vocab_size
    word = tl.load(words + place * num_words + (ids >> 5), mask=is_real, other=0)
    is_banned = ((word >> (ids & 31)) & 1) == 0
    tl.store(rows + row * vocab_size + ids, tl.full((lanes,), float("-inf"), tl.float32), mask=is_real & is_banned)


def change_rows(logits: Tensor, inputs: RowTensors, before: Tensor | None = None) -> Tensor:
    """float32 [A, vocab_size]: the rows of logits [R, vocab_size] that are changed. before: int64, the tokens that the
    step before has chosen; None: the inputs name none of its rows. Lists are brought up to date."""
    rows = logits.index_select(0, inputs.changed_rows)
    vocab_size = rows.shape[1]
    chosen = inputs.changed_rows if before is None else before
    if count := len(inputs.bias_places):
        _add[(triton.cdiv(count, LANES),)](rows, inputs.bias_places, inputs.bias, count, lanes=LANES)
    if count := len(inputs.list_targets):
        _write_lists[(triton.cdiv(count, LANES),)](inputs.list_targets, inputs.list_entries, count, lanes=LANES)
    if count := len(inputs.penalized):
        _penalize[(count,)](
            rows, inputs.penalized, inputs.lists, inputs.list_sizes, inputs.own_starts, inputs.own_ids,
            inputs.own_produced, inputs.penalties, inputs.last_rows, chosen, vocab_size, lanes=LIST_LANES,
            enable_fp_fusion=False,
        )  # fmt: skip
    if count := len(inputs.banned_places):
        _ban[(triton.cdiv(count, LANES),)](
            rows, inputs.banned_places, inputs.needed, inputs.last_rows, chosen, count, vocab_size, lanes=LANES
        )
    if count := len(inputs.mask_rows):
        _mask[(count, triton.cdiv(vocab_size, TILE_TOKENS))](
            rows, inputs.mask_rows, inputs.mask_words, vocab_size, inputs.mask_words.shape[1], lanes=TILE_TOKENS
        )
    return rows


def largest_of(logits: Tensor, changed: Tensor, inputs: RowTensors) -> tuple[Tensor, Tensor]:
    """float32 [R] each: the largest logit of every row as the model gave it, and as it was changed; NaN before all
    numbers."""
    raw = logits.amax(dim=1)
    return raw, raw.index_copy(0, inputs.changed_rows, changed.amax(dim=1)) if len(changed) else raw


def finite_or_zero(values: Tensor) -> Tensor:
    return values.where(values.isfinite(), torch.zeros_like(values))
