"""Shared-noise sampling: token = argmax(log p + G(seed, position, token)), p after every mask, penalty and warp.

Greedy is the same without noise; of equal scores the lowest id wins. A row's token depends on its logits, its
sequence's tokens and sampling parameters, and the position, on nothing else: so the seeded output is the same in any
batch, after preemption, after resume on another replica, with any drafter. A drafter chooses with the same noise,
penalties and warps (drafter-invariant speculation, Daliri, Musco and Suresh 2024, arXiv 2408.07978), so that it
proposes what the target picks wherever their distributions are close.

Order, as in transformers and vLLM: logit bias, repetition, frequency and presence penalties, min_tokens, temperature,
top_k, top_p, min_p; the mask of a grammar comes before temperature. Log probabilities are of the model's own
distribution, before all of that. What the parameters change is `adjustments`, what they leave `truncation`, what a
grammar leaves `grammar`, and the choice itself `choice`; a device that has the logits chooses the same by
`device_choice`.
"""

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.adjustments import Adjustments, is_unadjusted
from penstock.workers.compute.choice import choose_rows, logprobs_of
from penstock.workers.compute.grammar.masks import MaskThreads, RowMasks
from penstock.workers.compute.grammar.matcher import Allowed, GrammarFault
from penstock.workers.compute.kernels.choice import GREEDY, ChoiceInput, ChoiceKernels, Chosen, Draw
from penstock.workers.compute.noise import Ids, mix_seed, noisy_argmax, stream_behind, stream_start
from penstock.workers.compute.triton.sampling.sampling_inputs import Changes, RowInputs
from penstock.workers.compute.truncation import Row, find_cut, kept_ids, least_of_min_p
from penstock.workers.engine.sequence import Sampled, Sequence

MIN_TEMPERATURE = 1e-5
"""Dividing by less leaves the range of float32, and would choose the same token."""
_NO_CHOICE = "The model's scores are not numbers, or leave no token to choose."
_NO_TOKEN = "The parameters of this request leave no token to choose."
_FAILED = "A token could not be chosen with this request's parameters."

_log = logging.getLogger("penstock.sampling")
T = TypeVar("T")
SHARPNESS = 1.5
"""What a draft head's scores are multiplied with before a token is drawn among them, for all that their shares are
right on average: a token that it gives a small share has as a rule far less by the target, and now and then much more,
so drawn as they are the unlikely ones win too often. The demo's head has another two or three tokens of a hundred right
with it, at 0.8 and 1.0; from 1.25 to 2 it hardly matters (docs/decisions/speculation.md). What min_p leaves stays the
same, what top_p leaves is what it leaves of the sharper shares."""
UNLIKELY = -16.0
"""Scaled score of a token, relative to the best, that is never proposed: noise lifts one in ten million that far."""


class _Place(NamedTuple):
    """A row of logits, and where the token chosen from it will stand."""

    raw: Row
    seq: Sequence
    position: int
    ahead: Seq[int] = ()
    """Tokens taken to stand behind the sequence's own."""
    is_proposal: bool = False
    """Whether a drafter proposes the token: nobody wants its log probabilities."""


class _Draws(NamedTuple):
    """How a sequence's tokens are drawn, but for the streams of their places."""

    own: Draw
    sharp: Draw
    """How proposals of a draft head are drawn."""
    mixed_seed: int


class Sampler:
    """Chooses tokens. Keeps what it knows of sequences until `forget`."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int] = frozenset(),
        kernels: ChoiceKernels | None = None,
        masks: MaskThreads | None = None,
    ) -> None:
        """eos_token_ids: masked, with a sequence's stop_token_ids, until its min_tokens are out. kernels: None is
        numpy, which chooses the same. masks: of sequences with a grammar; None: there are none."""
        self.vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._kernels = kernels
        self._masks = masks
        self._adjustments: dict[Sequence, Adjustments] = {}
        self._draws: dict[Sequence, _Draws] = {}
        """How sequences whose logits nothing changes are drawn from."""

    def sample(self, logits: Tensor, seqs: list[Sequence], positions: list[int]) -> list[Sampled]:
        """logits [R, vocab_size] of the last computed token of each sequence; positions[r] is where the chosen token
        will stand.

        Logits are left as they are. Logits in bfloat16 are taken as float32.
        """
        rows = _rows_of(logits)
        if self.are_greedy(seqs):
            return _largest(rows)
        choices = self._choose([_Place(*place) for place in zip(rows, seqs, positions, strict=True)])
        return [self._settle(seq, [choice])[0] for seq, choice in zip(seqs, choices, strict=True)]

    def verify(self, logits: Tensor, seqs: list[Sequence], drafts: list[list[int]]) -> list[list[Sampled]]:
        """Choices behind each sequence's last token: as many as equal the draft's tokens, and the first that differs or
        that has no draft token left.

        logits [R, vocab_size]: for each sequence those of its last token, then of its draft's tokens.
        """
        rows = _rows_of(logits)
        if self.are_greedy(seqs):
            best = rows.argmax(axis=-1)
            return self.verify_chosen(best.tolist(), rows[np.arange(len(rows)), best].tolist(), drafts)
        first = [index + sum(map(len, drafts[:index])) for index in range(len(drafts))]
        found: list[list[Sampled]] = [[] for _ in seqs]
        going = list(range(len(seqs)))
        # all sequences side by side, a place of their drafts after the other: what stands behind a wrong guess is not
        # chosen
        while going:
            place = len(found[going[0]])
            choices = self._choose(
                [
                    _Place(
                        rows[first[index] + place], seqs[index], seqs[index].num_tokens + place, drafts[index][:place]
                    )
                    for index in going
                ]
            )
            for index, choice in zip(going, choices, strict=True):
                found[index].append(choice)
            going = [
                index
                for index, choice in zip(going, choices, strict=True)
                if choice.error is None
                and drafts[index][place : place + 1] == [choice.token_id]
                and self.has_mask(seqs[index], place + 1)
            ]
        return [self._settle(seq, choices) for seq, choices in zip(seqs, found, strict=True)]

    def are_greedy(self, seqs: list[Sequence]) -> bool:
        """Whether every sequence wants the largest logit as the model gives it, and nothing else."""
        return all(seq.grammar is None and _is_plain_greedy(seq.sampling, seq.num_output_tokens) for seq in seqs)

    def accept(self, seq: Sequence, token_id: int, score: float) -> Sampled | None:
        """The choice of a sequence with a grammar, of whose logits that of token_id is the largest, `score`. None where
        `sample` must look at all of them: its mask is not there yet or does not allow that token, or its parameters
        want another choice."""
        if self._masks is None or not self._masks.is_ready(seq) or not math.isfinite(score):
            return None
        allowed = self._masks.of(seq).allowed
        if not _is_plain_greedy(seq.sampling, seq.num_output_tokens) or not allowed or token_id not in allowed[0]:
            return None
        return self._settle(seq, [Sampled(token_id)])[0]

    def row_inputs(self, seq: Sequence, ahead: Seq[int], *, is_proposal: bool = False) -> RowInputs | Sampled:
        """How the token of a row is chosen, for a device that has the row; or an error, as `sample` gives it. ahead:
        tokens taken to stand behind the sequence's own. is_proposal: as of `propose`. Its mask must not be late."""
        return _guarded(seq, partial(self._row_inputs, seq, ahead, is_proposal))

    def choose_each(
        self, logits: Tensor, seqs: Seq[Sequence], ahead: Seq[Seq[int]], *, is_proposal: bool = False
    ) -> list[Sampled]:
        """Choices from logits [R, vocab_size], row by row, each as if the tokens ahead[r] stood behind its sequence;
        grammars stay where they are until `end_drafts`."""
        places = zip(_rows_of(logits), seqs, ahead, strict=True)
        return self._choose(
            [_Place(row, seq, seq.num_tokens + len(tokens), tokens, is_proposal) for row, seq, tokens in places]
        )

    def end_drafts(
        self, seqs: list[Sequence], drafts: list[list[int]], choices: list[list[Sampled]]
    ) -> list[list[Sampled]]:
        """`verify` of rows whose tokens are chosen already, a choice for each place of a draft and the one behind it:
        what stands behind a wrong guess is left out, and the grammars go behind the rest."""
        found: list[list[Sampled]] = []
        for seq, draft, own in zip(seqs, drafts, choices, strict=True):
            count = 1
            while (
                count < len(own)
                and own[count - 1].error is None
                and own[count - 1].token_id == draft[count - 1]
                and self.has_mask(seq, count)
            ):
                count += 1
            found.append(self._settle(seq, own[:count]))
        return found

    def verify_chosen(self, best: list[int], scores: list[float], drafts: list[list[int]]) -> list[list[Sampled]]:
        """`verify` of tokens that the model has chosen already: best[r] is the id chosen for row r, scores[r] the row's
        largest logit, which is not finite where there is no token to choose."""
        if len(best) == len(drafts):
            return [[check_finite(score, token_id)] for score, token_id in zip(scores, best, strict=True)]
        found: list[list[Sampled]] = []
        first = 0
        for draft in drafts:
            choices: list[Sampled] = []
            for place in range(len(draft) + 1):
                choices.append(check_finite(scores[first + place], best[first + place]))
                if choices[-1].error is not None or draft[place : place + 1] != [best[first + place]]:
                    break
            found.append(choices)
            first += len(draft) + 1
        return found

    def propose(self, logits: Tensor, seqs: list[Sequence], ahead: list[list[int]]) -> list[int | None]:
        """Token that would be chosen from each row of a drafter's logits [R, vocab_size] if the tokens `ahead` stood
        behind its sequence; None for a row from which none can be chosen."""
        rows = _rows_of(logits)
        choices = _largest(rows) if self.are_greedy(seqs) else self.choose_each(logits, seqs, ahead, is_proposal=True)
        return [None if choice.error is not None else choice.token_id for choice in choices]

    def propose_among(
        self, logits: Tensor, vocabulary: Ids, seqs: list[Sequence], ahead: list[list[int]]
    ) -> list[int | None]:
        """`propose` of a drafter that scores some tokens only. logits: [R, V] of the token ids `vocabulary`, ascending.
        What has hardly a chance is left out: a proposal may be any token. Drawn are scores times SHARPNESS, where
        nothing else changes them."""
        rows = _rows_of(logits)
        found: list[int | None] = []
        for row, seq, tokens in zip(rows, seqs, ahead, strict=True):
            best = row.max()
            params = seq.sampling
            if not math.isfinite(best):
                found.append(None)
            elif not is_unadjusted(params, seq.num_output_tokens + len(tokens)):
                scattered = np.full((1, self.vocab_size), -np.inf, dtype=np.float32)
                scattered[0, vocabulary] = row
                found += self.propose(torch.from_numpy(scattered), [seq], [tokens])
            elif params.temperature == 0:
                found.append(int(vocabulary[row.argmax()]))
            else:
                how = self._describe(params, seq.num_tokens + len(tokens))
                scaled = (row - best) / (np.float32(how.temperature) / np.float32(SHARPNESS))
                near = np.flatnonzero(scaled > UNLIKELY)
                least = how.least * SHARPNESS
                left = near[kept_ids(scaled[near], find_cut(scaled[near], how.top_k, how.top_p, least))]
                found.append(noisy_argmax(scaled[left].astype(np.float64), how.stream, vocabulary[left]))
        return found

    def own_draws(self, seq: Sequence, count: int) -> list[Draw] | None:
        """How so many tokens behind a sequence's are chosen where their logits are; None where these are to be looked
        at here: something changes them first, or their log probabilities are wanted."""
        if seq.grammar is not None or _num_top(seq.sampling, seq.num_output_tokens) is not None:
            return None
        try:
            known = self._find_draws(seq)
        except ValueError:
            return None  # the choice tells it
        return None if known is None else _draws_behind(seq, count, known.own, known.mixed_seed)

    def proposal_draws(self, seq: Sequence, count: int) -> list[Draw] | None:
        """How so many proposals of a draft head behind a sequence's tokens are chosen: drawn at scores times SHARPNESS.
        None where something changes their scores first."""
        known = self._find_draws(seq)
        return None if known is None else _draws_behind(seq, count, known.sharp, known.mixed_seed)

    def _find_draws(self, seq: Sequence) -> "_Draws | None":
        """None where something changes a sequence's logits. Raises ValueError as `_describe`."""
        known = self._draws.get(seq)
        if known is None and is_unadjusted(seq.sampling, seq.num_output_tokens):
            # so it stays as the sequence grows
            how = self._describe(seq.sampling, 0)
            own = Draw(how.temperature, how.top_k, how.top_p, how.least, 0)
            temperature = float(np.float32(how.temperature) / np.float32(SHARPNESS))
            sharp = own._replace(temperature=temperature, least=how.least * SHARPNESS)
            known = self._draws[seq] = _Draws(own, sharp, mix_seed(seq.sampling.seed))
        return known

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._adjustments.pop(seq, None)
        self._draws.pop(seq, None)
        if self._masks is not None:
            self._masks.forget(seq)

    def _choose(self, places: list[_Place]) -> list[Sampled]:
        # rows that want the largest logit cost no more beside one that wants anything else
        inputs = [
            _largest_of(place.raw) if _is_largest(place) else _guarded(place.seq, partial(self._find_input, place))
            for place in places
        ]
        choices = iter(choose_rows([row for row in inputs if not isinstance(row, Sampled)], self._kernels))
        return [row if isinstance(row, Sampled) else _to_sampled(row, next(choices)) for row in inputs]

    def _find_input(self, place: _Place) -> ChoiceInput | Sampled:
        """The row as it is chosen from, or its choice where that is quick."""
        return self._largest_allowed(place) or self._make_input(place)

    def _make_input(self, place: _Place) -> ChoiceInput:
        how = self._describe(place.seq.sampling, place.position)
        num_output_tokens = place.seq.num_output_tokens + len(place.ahead)
        num_top = None if place.is_proposal else _num_top(place.seq.sampling, num_output_tokens)
        return ChoiceInput(
            self._mask(place), place.raw, how.temperature, how.top_k, how.top_p, how.least, how.stream, num_top
        )

    def _row_inputs(self, seq: Sequence, ahead: Seq[int], is_proposal: bool) -> RowInputs:
        how = self._describe(seq.sampling, seq.num_tokens + len(ahead))
        changes = self._changes(seq, ahead, is_proposal)
        num_top = None if is_proposal else _num_top(seq.sampling, seq.num_output_tokens + len(ahead))
        return how._replace(changes=changes, num_top=num_top)

    def _describe(self, params: SamplingParams, position: int) -> RowInputs:
        """How a token is chosen by these parameters, but for what they change of a row, and what is told of it. Raises
        ValueError for a temperature beyond float32."""
        temperature = float(np.float32(max(params.temperature, MIN_TEMPERATURE))) if params.temperature else 0.0
        if not math.isfinite(temperature):
            raise ValueError(f"a temperature of {params.temperature}")
        return RowInputs(
            temperature,
            params.top_k if 0 < params.top_k < self.vocab_size else 0,
            params.top_p,
            least_of_min_p(params.min_p),
            stream_start(params.seed, position) if temperature else 0,
            None,
        )

    def _changes(self, seq: Sequence, ahead: Seq[int], is_proposal: bool) -> Changes | None:
        """What `_mask` does to a row."""
        own = self._adjustments_of(seq, ahead)
        changes = None if own is None else own.changes(seq, ahead)
        if seq.grammar is None or is_proposal:
            return changes
        allowed = self._allowed(seq, ahead).words
        if changes is None or self._masks_of(seq).must_end[len(ahead)]:
            return Changes(allowed=allowed)
        if changes.allowed is not None:
            allowed = allowed[: len(changes.allowed)] & changes.allowed
        return changes._replace(allowed=allowed)

    def _largest_allowed(self, place: _Place) -> Sampled | None:
        """The largest logit of a greedy row where its grammar allows that one: most often it does, and nothing else has
        to be looked at."""
        if place.seq.grammar is None or place.is_proposal or not _is_plain(place):
            return None
        token_id = int(place.raw.argmax())
        is_taken = token_id in self._allowed(place.seq, place.ahead) and math.isfinite(place.raw[token_id])
        return Sampled(token_id) if is_taken else None

    def _mask(self, place: _Place) -> Row:
        """Logits after bias, penalties and masks, the grammar's last. What a drafter proposes is cut to the grammar
        later."""
        seq = place.seq
        adjusted = self._adjust(place.raw, seq, place.ahead)
        if seq.grammar is None or place.is_proposal:
            return adjusted
        allowed = self._allowed(seq, place.ahead).row()
        # where nothing can follow, min_tokens must not keep the answer from its end
        row = place.raw if self._masks_of(seq).must_end[len(place.ahead)] else adjusted
        return np.where(allowed, row, np.float32(-np.inf))

    def _allowed(self, seq: Sequence, ahead: Seq[int]) -> Allowed:
        """What a sequence's grammar allows behind the tokens `ahead`. Raises GrammarFault where it goes no further."""
        masks, index = self._masks_of(seq), len(ahead)
        if index >= len(masks.allowed):
            raise GrammarFault(masks.error)
        return masks.allowed[index]

    def _masks_of(self, seq: Sequence) -> RowMasks:
        assert self._masks is not None
        return self._masks.of(seq)

    def has_mask(self, seq: Sequence, place: int) -> bool:
        """Whether a token is chosen at a further place of a draft: not behind an end of the answer, nor where nothing
        can follow, for there the answer ends without a draft too."""
        if seq.grammar is None or self._masks is None:
            return True
        masks = self._masks.of(seq)
        return place < len(masks.allowed) and not masks.must_end[place]

    def _settle(self, seq: Sequence, choices: list[Sampled]) -> list[Sampled]:
        """The choices of a sequence, whose grammar goes behind them; the last one is marked where nothing can
        follow."""
        if seq.grammar is None or self._masks is None or choices[-1].error is not None:
            return choices
        token_ids = [choice.token_id for choice in choices]
        if self._masks.of(seq).must_end[len(choices) - 1]:
            return [*choices[:-1], replace(choices[-1], is_last=True)]
        if self._masks.is_end(seq, token_ids[-1]):
            return choices
        try:
            is_last = self._masks.settle(seq, token_ids)
        except GrammarFault as fault:
            return [*choices[:-1], Sampled(0, error=str(fault), is_at_fault=True)]
        return [*choices[:-1], replace(choices[-1], is_last=True)] if is_last else choices

    def _adjust(self, raw: Row, seq: Sequence, ahead: Seq[int] = ()) -> Row:
        """Logits after bias, penalties and masks; `raw` itself when there is none of them."""
        own = self._adjustments_of(seq, ahead)
        return raw if own is None else own.apply(raw, seq, ahead)

    def _adjustments_of(self, seq: Sequence, ahead: Seq[int]) -> Adjustments | None:
        """What the parameters change of the row behind the tokens `ahead`; None: nothing."""
        if is_unadjusted(seq.sampling, seq.num_output_tokens + len(ahead)):
            return None
        own = self._adjustments.get(seq)
        if own is None:
            own = self._adjustments[seq] = Adjustments(seq.sampling, self.vocab_size, self._eos)
        return own


def _draws_behind(seq: Sequence, count: int, draw: Draw, mixed_seed: int) -> list[Draw]:
    temperature, top_k, top_p, least, _ = draw
    if not temperature:
        return [GREEDY] * count
    places = range(seq.num_tokens, seq.num_tokens + count)
    return [Draw(temperature, top_k, top_p, least, stream_behind(mixed_seed, place)) for place in places]


def _rows_of(logits: Tensor) -> NDArray[np.float32]:
    """float32 [R, vocab_size]; numpy's argmax takes a tenth of the time of torch's."""
    logits = logits.detach().float()
    return (logits if logits.stride(1) == 1 else logits.contiguous()).numpy()


def _largest(rows: NDArray[np.float32]) -> list[Sampled]:
    return [
        check_finite(row[token_id], token_id) for row, token_id in zip(rows, rows.argmax(axis=-1).tolist(), strict=True)
    ]


def _largest_of(row: Row) -> Sampled:
    token_id = int(row.argmax())
    return check_finite(row[token_id], token_id)


def _is_largest(place: _Place) -> bool:
    """Whether the place wants the largest logit as the model gives it."""
    return place.seq.grammar is None and _is_plain(place)


def _is_plain(place: _Place) -> bool:
    """Whether the place wants the largest logit among those that a grammar may leave."""
    return _is_plain_greedy(place.seq.sampling, place.seq.num_output_tokens + len(place.ahead))


def _to_sampled(row: ChoiceInput, chosen: Chosen | None) -> Sampled:
    if chosen is None:
        return without_choice(float(row.raw.max()))
    return Sampled(chosen.token_id, None if row.num_top is None else logprobs_of(chosen, row.raw))


def without_choice(raw_best: float) -> Sampled:
    """The error of a row that leaves no token to choose. raw_best: its largest logit as the model gave it, which is a
    number unless the model is to blame."""
    if math.isfinite(raw_best):
        return Sampled(0, error=_NO_TOKEN, is_at_fault=True)
    return Sampled(0, error=_NO_CHOICE)


def _guarded(seq: Sequence, make: Callable[[], T]) -> T | Sampled:
    """What is made of a row, or an error where its parameters or its grammar allow no choice: one request's parameters
    must not end the step for the others."""
    try:
        return make()
    except GrammarFault as fault:
        return Sampled(0, error=str(fault), is_at_fault=True)
    except (ArithmeticError, LookupError, RuntimeError, ValueError):
        _log.exception("A row can't be sampled.", extra={"request_id": seq.request_id})
        return Sampled(0, error=_FAILED)


def check_finite(score: float, token_id: int) -> Sampled:
    """The choice of `token_id`, or an error if the row's largest logit, `score`, is not finite; numpy's argmax finds a
    NaN before any number."""
    return Sampled(token_id) if math.isfinite(score) else Sampled(0, error=_NO_CHOICE)


def _is_plain_greedy(params: SamplingParams, num_output_tokens: int) -> bool:
    return (
        params.temperature == 0
        and _num_top(params, num_output_tokens) is None
        and is_unadjusted(params, num_output_tokens)
    )


def _num_top(params: SamplingParams, num_output_tokens: int) -> int | None:
    """Likeliest tokens whose log probabilities are wanted beside the chosen one's, behind so many tokens of output;
    None: not even that one's is."""
    if params.logprobs is None or 0 < params.logprobs_tokens <= num_output_tokens:
        return None
    return max(0, params.logprobs)
