"""Choosing tokens on a GPU: the best of log p + noise in each row, among what its parameters and its grammar leave, and
log probabilities; all as `penstock.workers.compute.choice` has them, bit for bit.

So a seed gives the token that the host would choose from the same logits. A program takes a tile of a row; of equal
scores the lowest id wins, in a tile and among tiles. Only what was chosen is fetched: ids, the rows' largest logits,
and of log probabilities the sum of weights and the likeliest tokens, of which the host makes them.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.compute.triton.sampling.adjust import change_rows, finite_or_zero, largest_of
from penstock.workers.compute.triton.sampling.count_lists import CountLists
from penstock.workers.compute.triton.sampling.cut import Rows, find_cuts
from penstock.workers.compute.triton.sampling.exact import gumbel, key_of, scaled_scores, weigh
from penstock.workers.compute.triton.sampling.sampling_inputs import (
    Changes,
    Counted,
    Listed,
    RowInputs,
    SamplingInputs,
    make_sampling_inputs,
    pack_words,
)

TILE_TOKENS = 1024
ROWS_AT_ONCE = 16
"""Rows whose likeliest tokens are found together: they take 16 bytes a token meanwhile."""
_REACH = tl.constexpr(41.0)
"""Noise lies between -3.7 and 36.8, so a score further below the best, which is 0, never wins."""
_ID_BITS = 32
_LAST_ID = (1 << _ID_BITS) - 1
_MAGNITUDE = 0x7FFFFFFF


class DeviceChoices(NamedTuple):
    """What was chosen for R rows, of which L want log probabilities; on the host."""

    token_ids: NDArray[np.int64]
    """[R]; means nothing where `best` is not finite."""
    best: NDArray[np.float64]
    """[R]: the largest logit of each row as it was changed."""
    raw_best: NDArray[np.float64]
    """[R]: the largest logit of each row as the model gave it."""
    weights: NDArray[np.int64]
    """[L]: sum of the weights of the row's logits relative to the largest, as the model gave them."""
    own: NDArray[np.float64]
    """[L]: the chosen token's logit as the model gave it."""
    top_ids: NDArray[np.int64]
    """[L, num_top]: the likeliest tokens, best first."""
    top: NDArray[np.float64]
    """[L, num_top]: their logits."""


@triton.jit
def _best_of_tile(
    logits, changed, sources, tops, temperatures, streams, least_keys, keys, last_ids, scores, chosen, vocab_size,
    num_tiles, lanes: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * lanes + tl.arange(0, lanes)
    scaled = scaled_scores(logits, changed, sources, tops, temperatures, row, ids, vocab_size)
    key = key_of(scaled)
    cut = tl.load(keys + row)
    is_kept = (key < cut) | ((key == cut) & (ids <= tl.load(last_ids + row)))
    is_kept = is_kept & (ids < vocab_size) & (key <= tl.load(least_keys + row)) & (scaled > -_REACH)
    most = tl.full((), float("-inf"), tl.float64)
    best = tl.program_id(1) * 0 + vocab_size
    if tl.max(is_kept.to(tl.int32), 0) > 0:
        score = scaled.to(tl.float64)
        if tl.load(temperatures + row) > 0:
            score += gumbel(tl.load(streams + row).to(tl.uint64, bitcast=True), ids)
        score = tl.where(is_kept, score, float("-inf"))
        most = tl.max(score, 0)
        best = tl.min(tl.where(is_kept & (score == most), ids, vocab_size), 0)
    tl.store(scores + row * num_tiles + tile, most)
    tl.store(chosen + row * num_tiles + tile, best)


@triton.jit
def _add_weights(logits, rows, tops, sums, vocab_size, lanes: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(rows + place)
    ids = tl.program_id(1) * lanes + tl.arange(0, lanes)
    raw = tl.load(logits + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    relative = raw.to(tl.float64) - tl.load(tops + row).to(tl.float64)
    tl.atomic_add(sums + place, tl.sum(weigh(relative), 0), sem="relaxed")


def sample(logits: Tensor, inputs: SamplingInputs, before: Tensor | None = None) -> Tensor:
    """int64 [N]: what `read` makes `DeviceChoices` of, chosen from logits, float32 [R, vocab_size], which stay as they
    are. before: see `change_rows`. Waits for nothing."""
    logits, own = logits.contiguous(), inputs.tensors
    num_rows, vocab_size = logits.shape
    changed = change_rows(logits, own, before) if len(own.changed_rows) else logits[:0]
    raw_best, best = largest_of(logits, changed, own)
    rows = Rows(logits, changed if len(changed) else logits, own.sources, finite_or_zero(best), own.temperatures)
    keys, last_ids = find_cuts(rows, inputs)
    num_tiles = triton.cdiv(vocab_size, TILE_TOKENS)
    scores = torch.empty(num_rows, num_tiles, dtype=torch.float64, device=logits.device)
    chosen = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    _best_of_tile[(num_rows, num_tiles)](
        *rows, own.streams, own.least_keys, keys, last_ids, scores, chosen, vocab_size, num_tiles, lanes=TILE_TOKENS,
        enable_fp_fusion=False,
    )  # fmt: skip
    ids = chosen.gather(1, scores.max(dim=1).indices[:, None])[:, 0].clamp(max=vocab_size - 1)
    parts = [ids, _bits(best), _bits(raw_best)]
    if len(own.logprob_rows):
        parts += _logprob_parts(logits, ids, finite_or_zero(raw_best), own.logprob_rows, inputs.num_top)
    return torch.cat(parts)


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Have every kernel compiled that `sample` launches for rows of so many tokens, so that no step waits for it."""
    id_, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32)
    words = pack_words(np.ones(vocab_size, dtype=np.bool_))
    listed = Listed(None, 1, 1, lambda _: Counted(id_, id_, one))
    changes = Changes(id_, one, id_, one, 2.0, 1.0, 1.0, id_, words, listed, last_row=0)
    row, lists = RowInputs(1.0, 1, 0.5, -1.0, 0, 1, changes), CountLists(device)
    inputs = make_sampling_inputs([row], vocab_size, lists.locate).on(device)
    sample(torch.zeros(1, vocab_size, device=device), inputs, torch.zeros(1, dtype=torch.int64, device=device))


def read(result: Tensor, inputs: SamplingInputs) -> DeviceChoices:
    """The choices in a result of `sample` that was brought to the host."""
    tensors = inputs.tensors
    num_rows, num_wanted, num_top = len(tensors.streams), len(tensors.logprob_rows), inputs.num_top
    sizes = (num_rows, num_rows, num_rows, num_wanted, num_wanted, num_wanted * num_top, num_wanted * num_top)
    ids, best, raw_best, weights, own, top_ids, top = np.split(result.numpy(), np.cumsum(sizes)[:-1])
    shape = (num_wanted, num_top)
    return DeviceChoices(
        ids, best.view(np.float64), raw_best.view(np.float64), weights, own.view(np.float64), top_ids.reshape(shape),
        top.view(np.float64).reshape(shape),
    )  # fmt: skip


def _logprob_parts(logits: Tensor, chosen: Tensor, tops: Tensor, rows: Tensor, num_top: int) -> list[Tensor]:
    """What the log probabilities of some rows are made of: see `DeviceChoices`."""
    vocab_size = logits.shape[1]
    weights = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    _add_weights[(len(rows), triton.cdiv(vocab_size, TILE_TOKENS))](
        logits, rows, tops, weights, vocab_size, lanes=TILE_TOKENS, enable_fp_fusion=False
    )
    own = logits[rows, chosen[rows]]
    firsts = range(0, len(rows), ROWS_AT_ONCE) if num_top else ()
    found = [_likeliest(logits[rows[first : first + ROWS_AT_ONCE]], num_top) for first in firsts]
    ids = torch.cat(found) if found else rows.new_empty(len(rows), 0)
    return [weights, _bits(own), ids.flatten(), _bits(logits[rows[:, None], ids].flatten())]


def _likeliest(rows: Tensor, count: int) -> Tensor:
    """int64 [N, count]: the ids of the largest of each row, best first, of equals the lower id. Each token is one
    integer, so none are equal."""
    bits = (rows + 0.0).view(torch.int32).long()  # no -0
    ascending = torch.where(bits < 0, bits ^ _MAGNITUDE, bits)
    keys = (ascending << _ID_BITS) | (_LAST_ID - torch.arange(rows.shape[1], device=rows.device))
    return _LAST_ID - (keys.topk(count, dim=1).values & _LAST_ID)


def _bits(values: Tensor) -> Tensor:
    return values.double().view(torch.int64)
