"""What parameters and grammars change of rows of logits on a GPU: the very numbers of
`penstock.workers.compute.adjustments`, whose float32 operations these are, in its order and unfused.

Rows are copied, for log probabilities are of the model's own. Biases, penalties and banned tokens are lists of places,
each of which a lane changes; a mask is a bit for each token of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.workers.compute.triton.sampling.sampling_inputs import RowTensors

LANES = 256
TILE_TOKENS = 2048


@triton.jit(do_not_specialize=["num_places"])
def _add(rows, places, values, num_places, lanes: tl.constexpr):
    index = tl.program_id(0) * lanes + tl.arange(0, lanes)
    is_real = index < num_places
    place = tl.load(places + index, mask=is_real, other=0)
    value = tl.load(rows + place, mask=is_real, other=0.0) + tl.load(values + index, mask=is_real, other=0.0)
    tl.store(rows + place, value, mask=is_real)


@triton.jit(do_not_specialize=["num_places"])
def _penalize(rows, places, produced, penalties, num_places, vocab_size, lanes: tl.constexpr):
    index = tl.program_id(0) * lanes + tl.arange(0, lanes)
    is_real = index < num_places
    place = tl.load(places + index, mask=is_real, other=0)
    own = penalties + place // vocab_size * 3
    repetition = tl.load(own, mask=is_real, other=1.0)
    value = tl.load(rows + place, mask=is_real, other=0.0)
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    count = tl.load(produced + index, mask=is_real, other=0.0)
    presence = tl.where(count > 0, tl.load(own + 2, mask=is_real, other=0.0), 0.0)
    value -= tl.load(own + 1, mask=is_real, other=0.0) * count + presence
    tl.store(rows + place, value, mask=is_real)


@triton.jit(do_not_specialize=["num_places"])
def _ban(rows, places, num_places, lanes: tl.constexpr):
    index = tl.program_id(0) * lanes + tl.arange(0, lanes)
    is_real = index < num_places
    place = tl.load(places + index, mask=is_real, other=0)
    tl.store(rows + place, tl.full((lanes,), float("-inf"), tl.float32), mask=is_real)


@triton.jit
def _mask(rows, mask_rows, words, vocab_size, num_words, lanes: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(mask_rows + place).to(tl.int64)
    ids = tl.program_id(1) * lanes + tl.arange(0, lanes)
    is_real = ids < vocab_size
    word = tl.load(words + place * num_words + (ids >> 5), mask=is_real, other=0)
    is_banned = ((word >> (ids & 31)) & 1) == 0
    tl.store(rows + row * vocab_size + ids, tl.full((lanes,), float("-inf"), tl.float32), mask=is_real & is_banned)


def change_rows(logits: Tensor, inputs: RowTensors) -> Tensor:
    """float32 [A, vocab_size]: the rows of logits [R, vocab_size] that are changed."""
    rows = logits.index_select(0, inputs.changed_rows)
    vocab_size = rows.shape[1]
    if count := len(inputs.bias_places):
        _add[(triton.cdiv(count, LANES),)](rows, inputs.bias_places, inputs.bias, count, lanes=LANES)
    if count := len(inputs.counted_places):
        _penalize[(triton.cdiv(count, LANES),)](
            rows, inputs.counted_places, inputs.produced, inputs.penalties, count, vocab_size, lanes=LANES,
            enable_fp_fusion=False,
        )  # fmt: skip
    if count := len(inputs.banned_places):
        _ban[(triton.cdiv(count, LANES),)](rows, inputs.banned_places, count, lanes=LANES)
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
