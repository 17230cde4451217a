"""Shared-noise sampling: token = argmax(log p + G(seed, position, token)), p after every mask, penalty and warp.

Greedy is the same without noise; of equal scores the lowest id wins. A row's token depends on its logits, its
sequence's tokens and sampling parameters, and the position, on nothing else: so the seeded output is the same in any
batch, after preemption, after resume on another replica, with any drafter. A drafter chooses with the same noise,
penalties and warps (drafter-invariant speculation, Daliri, Musco and Suresh 2024, arXiv 2408.07978), so that it
proposes what the target picks wherever their distributions are close.

Order, as in transformers and vLLM: logit bias, repetition, frequency and presence penalties, min_tokens, temperature,
top_k, top_p, min_p. Log probabilities are of the model's own distribution, before all of that.
"""

import logging
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.wire.frames import SamplingParams, TokenLogprobs
from penstock.workers.compute.noise import noisy_argmax
from penstock.workers.compute.triton.sampling_inputs import (
    MIN_TEMPERATURE,
    SamplingInputs,
    can_sample,
    make_sampling_inputs,
)
from penstock.workers.engine.sequence import Sampled, Sequence

Row = NDArray[np.float32]
Ids = NDArray[np.int64]


_NO_CHOICE = "The model's scores are not numbers, or leave no token to choose."
_FAILED = "A token could not be chosen with this request's parameters."

_log = logging.getLogger("penstock.sampling")


@dataclass(slots=True)
class _Counts:
    """The tokens that a sequence contains, and how often it produced them; `num_tokens` of its tokens are counted."""

    seen: set[int] = field(default_factory=set)
    produced: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0

    def update(self, seq: Sequence) -> None:
        for index in range(self.num_tokens, seq.num_tokens):
            token_id = seq.token_ids[index]
            self.seen.add(token_id)
            if index >= seq.num_prompt_tokens:
                self.produced[token_id] = self.produced.get(token_id, 0) + 1
        self.num_tokens = seq.num_tokens

    def with_ahead(self, ahead: Seq[int]) -> "_Counts":
        """The counts that there would be if the tokens `ahead` had been produced too."""
        produced = dict(self.produced)
        for token_id in ahead:
            produced[token_id] = produced.get(token_id, 0) + 1
        return _Counts(self.seen.union(ahead), produced, self.num_tokens)


class Sampler:
    """Chooses tokens. Keeps token counts of the sequences with penalties, until `forget`.

    eos_token_ids: masked, with a sequence's stop_token_ids, until its min_tokens are out.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._counts: dict[Sequence, _Counts] = {}

    def sample(self, logits: Tensor, seqs: list[Sequence], positions: list[int]) -> list[Sampled]:
        """logits [R, vocab_size] of the last computed token of each sequence; positions[r] is where the chosen token
        will stand.

        Logits are left as they are. Logits in bfloat16 are taken as float32.
        """
        rows = logits.detach().float().numpy()  # numpy's argmax takes a tenth of the time of torch's
        if self.are_greedy(seqs):
            return [
                _check_finite(row[token_id], token_id)
                for row, token_id in zip(rows, rows.argmax(axis=-1).tolist(), strict=True)
            ]
        return [self._guarded(row, seq, position, ()) for row, seq, position in zip(rows, seqs, positions, strict=True)]

    def verify(self, logits: Tensor, seqs: list[Sequence], drafts: list[list[int]]) -> list[list[Sampled]]:
        """Choices behind each sequence's last token: as many as equal the draft's tokens, and the first that differs or
        that has no draft token left.

        logits [R, vocab_size]: for each sequence those of its last token, then of its draft's tokens.
        """
        rows = logits.detach().float().numpy()
        if self.are_greedy(seqs):
            best = rows.argmax(axis=-1)
            return self.verify_chosen(best.tolist(), rows[np.arange(len(rows)), best].tolist(), drafts)
        found: list[list[Sampled]] = []
        first = 0
        for seq, draft in zip(seqs, drafts, strict=True):
            choices: list[Sampled] = []
            for place in range(len(draft) + 1):
                row = rows[first + place]
                choice = self._guarded(row, seq, seq.num_tokens + place, draft[:place])
                choices.append(choice)
                if choice.error is not None or draft[place : place + 1] != [choice.token_id]:
                    break
            found.append(choices)
            first += len(draft) + 1
        return found

    def are_greedy(self, seqs: list[Sequence]) -> bool:
        """Whether every sequence wants the largest logit as the model gives it, and nothing else."""
        return all(_is_plain_greedy(seq.sampling, seq.num_output_tokens) for seq in seqs)

    def sampling_inputs(self, seqs: list[Sequence], positions: list[int]) -> SamplingInputs | None:
        """What a GPU needs to choose the very tokens that `sample` would. Returns None if the host must choose for one
        of the sequences."""
        if not all(_is_sampled_on_gpu(seq, self.vocab_size) for seq in seqs):
            return None
        return make_sampling_inputs([seq.sampling for seq in seqs], positions, self.vocab_size)

    def verify_chosen(self, best: list[int], scores: list[float], drafts: list[list[int]]) -> list[list[Sampled]]:
        """`verify` of tokens that a device has chosen already: best[r] is the id chosen for row r, scores[r] the row's
        largest logit, which is not finite where there is no token to choose."""
        if len(best) == len(drafts):
            return [[_check_finite(score, token_id)] for score, token_id in zip(scores, best, strict=True)]
        found: list[list[Sampled]] = []
        first = 0
        for draft in drafts:
            choices: list[Sampled] = []
            for place in range(len(draft) + 1):
                choices.append(_check_finite(scores[first + place], best[first + place]))
                if choices[-1].error is not None or draft[place : place + 1] != [best[first + place]]:
                    break
            found.append(choices)
            first += len(draft) + 1
        return found

    def propose(self, logits: Tensor, seqs: list[Sequence], ahead: list[list[int]]) -> list[int | None]:
        """Token that would be chosen from each row of a drafter's logits [R, vocab_size] if the tokens `ahead` stood
        behind its sequence; None for a row from which none can be chosen."""
        rows = logits.detach().float().numpy()
        if self.are_greedy(seqs):
            choices = [
                _check_finite(row[token_id], token_id)
                for row, token_id in zip(rows, rows.argmax(axis=-1).tolist(), strict=True)
            ]
        else:
            choices = [
                self._guarded(row, seq, seq.num_tokens + len(tokens), tokens, is_proposal=True)
                for row, seq, tokens in zip(rows, seqs, ahead, strict=True)
            ]
        return [None if choice.error is not None else choice.token_id for choice in choices]

    def forget(self, seq: Sequence) -> None:
        """Drop the counts of a sequence that has ended."""
        self._counts.pop(seq, None)

    def _guarded(
        self, raw: Row, seq: Sequence, position: int, ahead: Seq[int], *, is_proposal: bool = False
    ) -> Sampled:
        """The row's token, or an error: one request's parameters must not end the step for the others. ahead: tokens
        taken to stand behind the sequence's own."""
        try:
            return self._sample_row(raw, seq, position, ahead, is_proposal)
        except (ArithmeticError, LookupError, RuntimeError, ValueError):
            _log.exception("A row can't be sampled.", extra={"request_id": seq.request_id})
            return Sampled(0, error=_FAILED)

    def _sample_row(self, raw: Row, seq: Sequence, position: int, ahead: Seq[int], is_proposal: bool) -> Sampled:
        params = seq.sampling
        row = self._adjust(raw, seq, ahead)
        if not np.isfinite(row.max()):  # also when any score is NaN
            return Sampled(0, error=_NO_CHOICE)
        token_id = int(row.argmax()) if params.temperature == 0 else _draw(row, params, position)
        logprobs = None if params.logprobs is None or is_proposal else _logprobs(raw, token_id, params.logprobs)
        return Sampled(token_id, logprobs)

    def _adjust(self, raw: Row, seq: Sequence, ahead: Seq[int] = ()) -> Row:
        """Logits after bias, penalties and masks; `raw` itself when there is none of them."""
        params = seq.sampling
        num_output_tokens = seq.num_output_tokens + len(ahead)
        if _is_unadjusted(params, num_output_tokens):
            return raw
        row = raw.copy()
        for token_id, bias in params.logit_bias:
            if token_id < self.vocab_size:
                row[token_id] += np.float32(bias)
        if _has_penalties(params):
            counts = self._counts.setdefault(seq, _Counts())
            counts.update(seq)
            _penalize(row, counts.with_ahead(ahead) if ahead else counts, params)
        if num_output_tokens < params.min_tokens:
            banned = self._eos.union(params.stop_token_ids)
            row[[token_id for token_id in banned if token_id < self.vocab_size]] = -np.inf
        return row


def _check_finite(score: float, token_id: int) -> Sampled:
    """The choice of `token_id`, or an error if the row's largest logit, `score`, is not finite; numpy's argmax finds a
    NaN before any number."""
    return Sampled(token_id) if math.isfinite(score) else Sampled(0, error=_NO_CHOICE)


def _is_plain_greedy(params: SamplingParams, num_output_tokens: int) -> bool:
    return params.temperature == 0 and params.logprobs is None and _is_unadjusted(params, num_output_tokens)


def _is_sampled_on_gpu(seq: Sequence, vocab_size: int) -> bool:
    params = seq.sampling
    return params.logprobs is None and _is_unadjusted(params, seq.num_output_tokens) and can_sample(params, vocab_size)


def _is_unadjusted(params: SamplingParams, num_output_tokens: int) -> bool:
    return not params.logit_bias and not _has_penalties(params) and num_output_tokens >= params.min_tokens


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _penalize(row: Row, counts: _Counts, params: SamplingParams) -> None:
    """Repetition penalty (Keskar et al. 2019, CTRL) over all tokens seen; OpenAI's two over the ones produced."""
    if params.repetition_penalty != 1 and counts.seen:
        seen = np.fromiter(counts.seen, np.int64, len(counts.seen))
        penalty = np.float32(params.repetition_penalty)
        values = row[seen]
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if counts.produced and (params.frequency_penalty or params.presence_penalty):
        size = len(counts.produced)
        produced = np.fromiter(counts.produced.keys(), np.int64, size)
        repeats = np.fromiter(counts.produced.values(), np.float32, size)
        row[produced] -= np.float32(params.frequency_penalty) * repeats + np.float32(params.presence_penalty)


def _draw(row: Row, params: SamplingParams, position: int) -> int:
    # relative to the best: no temperature overflows, and a constant doesn't move the argmax, so log p needs no
    # normalizing
    scaled = (row - row.max()) / np.float32(max(params.temperature, MIN_TEMPERATURE))
    kept = _surviving(scaled, params)
    scores = scaled if len(kept) == len(scaled) else scaled[kept]
    return noisy_argmax(scores.astype(np.float64), params.seed, position, kept)


def _surviving(scaled: Row, params: SamplingParams) -> Ids:
    """Ascending ids of the tokens that top_k (with those that equal the k-th), top_p and min_p leave. The best token
    has 0."""
    kept = np.arange(len(scaled))
    if 0 < params.top_k < len(scaled):
        kept = np.flatnonzero(scaled >= torch.from_numpy(scaled).topk(params.top_k).values[-1].item())
    if params.top_p < 1:
        kept = _nucleus(scaled, kept, params.top_p)
    if params.min_p > 0:
        kept = kept[scaled[kept] >= np.log(params.min_p)]
    return kept


def _nucleus(scaled: Row, kept: Ids, top_p: float) -> Ids:
    """The smallest set of likeliest tokens whose probability reaches top_p (Holtzman et al. 2020); of equals, lower ids
    first."""
    weights = np.exp(scaled[kept].astype(np.float64))
    total = weights.sum()
    # all tokens below this together have less than 1 - top_p, so none of them is in the set: only the others need
    # sorting
    likely = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    order = likely[np.argsort(-weights[likely], kind="stable")]
    size = int(np.searchsorted(np.cumsum(weights[order]), top_p * total)) + 1
    return np.sort(kept[order[:size]])


def _logprobs(raw: Row, token_id: int, num_top: int) -> TokenLogprobs:
    scores = raw.astype(np.float64)
    log_total = float(scores.max() + np.log(np.exp(scores - scores.max()).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, token_ids = torch.from_numpy(raw).topk(min(num_top, len(raw)))
        top = tuple(
            (token, value - log_total) for token, value in zip(token_ids.tolist(), values.tolist(), strict=True)
        )
    return TokenLogprobs(float(scores[token_id]) - log_total, top)
