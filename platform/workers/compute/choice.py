"""The choice of tokens from rows of logits, adjusted already: by the C++ kernels where they are built, else by numpy.

The two choose the same tokens and give the same log probabilities, bit for bit. Greedily it is the largest logit, else
the best of score and noise among what truncation leaves; of equals always the lowest id.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from penstock.wire.frames import TokenLogprobs
from penstock.workers.compute.kernels.choice import ChoiceInput, ChoiceKernels, Chosen
from penstock.workers.compute.noise import logarithm, noisy_argmax
from penstock.workers.compute.truncation import FRACTION_BITS, MOST_TOKENS, Row, find_cut, kept_ids, weigh


def choose_rows(rows: Sequence[ChoiceInput], kernels: ChoiceKernels | None) -> list[Chosen | None]:
    """Choose from each row; None where the scores are not numbers or leave no token."""
    if len(rows) == 1 and rows[0].temperature == 0 and rows[0].num_top is None:
        return [choose_by_numpy(rows[0])]  # sooner than the kernels are called
    if kernels is not None and rows and len(rows[0].logits) < MOST_TOKENS:
        return kernels.choose(rows, torch.get_num_threads())
    return [choose_by_numpy(row) for row in rows]


def choose_by_numpy(row: ChoiceInput) -> Chosen | None:
    """The definition of a choice; None where the scores are not numbers or leave no token."""
    best = row.logits.max()
    if not np.isfinite(best) or (row.num_top is not None and not np.isfinite(row.raw.max())):
        return None
    token_id = int(row.logits.argmax()) if row.temperature == 0 else _draw(row, best)
    if row.num_top is None:
        return Chosen(token_id)
    raw_best = row.raw.max()
    weight = int(weigh(row.raw.astype(np.float64) - np.float64(raw_best)).sum())
    return Chosen(token_id, weight, float(raw_best), _likeliest(row.raw, row.num_top))


def logprobs_of(chosen: Chosen, raw: Row) -> TokenLogprobs:
    """Log probabilities of the chosen token and the likeliest ones, of the raw logits' distribution; within 4e-9."""
    top = [(token_id, float(raw[token_id])) for token_id in chosen.top_ids]
    return logprobs_from(chosen.weight, chosen.raw_best, float(raw[chosen.token_id]), top)


def logprobs_from(weight: int, raw_best: float, own: float, top: Iterable[tuple[int, float]]) -> TokenLogprobs:
    """`logprobs_of` a token with the logit `own`. weight, raw_best: as `Chosen` has them. top: ids and logits of the
    likeliest tokens, best first."""
    log_total = logarithm(weight / (1 << FRACTION_BITS))
    of_top = tuple((token_id, value - raw_best - log_total) for token_id, value in top)
    return TokenLogprobs(own - raw_best - log_total, of_top)


def _draw(row: ChoiceInput, best: np.float32) -> int:
    # relative to the best: no temperature overflows, and a constant doesn't move the argmax, so log p needs no
    # normalizing
    with np.errstate(over="ignore"):
        scaled = (row.logits - best) / np.float32(row.temperature)
    cut = find_cut(scaled, row.top_k, row.top_p, row.least)
    kept = np.arange(len(scaled)) if cut.least == -math.inf else kept_ids(scaled, cut)
    scores = scaled if len(kept) == len(scaled) else scaled[kept]
    return noisy_argmax(scores.astype(np.float64), row.stream, kept)


def _likeliest(raw: Row, count: int) -> list[int]:
    """The ids of the `count` largest, best first, of equals the lower id."""
    count = min(count, len(raw))
    if not count:
        return []
    least = raw[np.argpartition(raw, len(raw) - count)[len(raw) - count]]
    ids = np.flatnonzero(raw >= least)
    return [int(token_id) for token_id in ids[np.argsort(-raw[ids], kind="stable")[:count]]]
