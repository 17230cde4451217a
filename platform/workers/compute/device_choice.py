"""Choosing the tokens of a step on the device that has its logits, row by row: the very tokens and log probabilities
that `Sampler` would choose on the host.

What a device needs to know of a row is a few numbers, and of changed rows some lists
(`triton.sampling.sampling_inputs`); the tokens that penalties strike stay there from step to step. The last token of a
sequence may be one that only the device knows, chosen by the step before. The places of a draft are chosen side by
side, each as if those before it were right; what stands behind a wrong one is thrown away, as `Sampler.verify` never
chooses it. Rows that the device cannot choose come to the host, these alone.
A step whose masks are still being computed is chosen when it ends; late rows are left out.

Invariant: logits of other rows never leave the device.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.wire.frames import TokenLogprobs
from penstock.workers.compute.choice import logprobs_from
from penstock.workers.compute.device import bring as bring_to_host
from penstock.workers.compute.grammar.masks import MaskThreads
from penstock.workers.compute.models.llama import largest
from penstock.workers.compute.sampling import Sampler, check_finite, without_choice
from penstock.workers.compute.triton.sampling.count_lists import CountLists
from penstock.workers.compute.triton.sampling.sampling_inputs import (
    RowInputs,
    SamplingInputs,
    can_choose,
    make_sampling_inputs,
)
from penstock.workers.compute.triton.staging import Staging
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence

Bring: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""Begins to bring a result to the host; what it returns waits for it."""
Wait: TypeAlias = Callable[[], list[Sampled]]
"""Waits for the device: a choice for each row."""
_UNREAD = Sampled(0)
"""The choice of a row that nobody looks at."""


class Place(NamedTuple):
    """Where the token of a row will stand."""

    seq: Sequence
    ahead: list[int]
    """Tokens taken to stand behind the sequence's own."""
    is_chosen: bool = True
    """Whether anybody looks at the choice."""


class KeptLogits(NamedTuple):
    """Logits of a step's rows, where the model computed them."""

    logits: Tensor
    """float32 [R, vocab_size]; they hold until the next step."""
    bring: Bring = bring_to_host
    """Brings a tensor to the host when all before it is done."""


class DeviceChoice:
    """Chooses from kept logits by what a sampler knows of the sequences."""

    def __init__(self, sampler: Sampler, masks: MaskThreads | None = None) -> None:
        """masks: the sampler's."""
        self._sampler = sampler
        self._masks = masks
        self._staging: Staging | None = None
        """What sends the parameters of rows; made for the device of the first logits."""
        self._lists: CountLists | None = None
        """The tokens of sequences with penalties, on that device."""
        self.chosen: Tensor | None = None
        """Ids on the device, one for each chunk of the last `launch`; None: not all of them are there."""

    def launch(
        self, chunks: Seq[Chunk], kept: KeptLogits, before: Tensor | None = None
    ) -> Callable[[], list[list[Sampled]]]:
        """Begin to choose for the chunks that sample: at once if all masks are there, else when the result is asked
        for. before: int64, the tokens on the device that the step before has chosen; None: all tokens are known.
        Returns what waits for the choices: for each chunk those of its draft that hold and the next one, none where its
        mask is late."""
        seqs = [chunk.seq for chunk in chunks]
        self.chosen = None
        if self._masks is None or all(seq.grammar is None or self._masks.is_ready(seq) for seq in seqs):
            return partial(self._end, chunks, frozenset(), self._begin(chunks, frozenset(), kept, before))
        return partial(self._launch_late, chunks, kept, before)

    def forget(self, seq: Sequence) -> None:
        """Drop what the device has of a sequence that has ended."""
        if self._lists is not None:
            self._lists.forget(seq)

    def choose(
        self, places: Seq[Place], kept: KeptLogits, before: Tensor | None = None, *, is_proposal: bool = False
    ) -> Wait:
        """Begin to choose a token at each of the places, one for each row. before: as of `launch`. is_proposal: as of
        `Sampler.propose`."""
        rows = [self._describe(place, is_proposal) for place in places]
        own = [row if isinstance(row, RowInputs) else RowInputs() for row in rows]
        on_host = [index for index, row in enumerate(rows) if row is None]
        wait, ids = self._launch(kept, own, before) if any(isinstance(row, RowInputs) for row in rows) else (None, None)
        self.chosen = ids if all(isinstance(row, RowInputs) for row in rows) else None
        rest = kept.bring(torch.stack([kept.logits[index] for index in on_host])) if on_host else None

        def end() -> list[Sampled]:
            chosen: list[Sampled] = [_UNREAD] * len(rows) if wait is None else wait()
            found = [row if isinstance(row, Sampled) else choice for row, choice in zip(rows, chosen, strict=True)]
            if rest is not None:
                seqs, ahead = [places[index].seq for index in on_host], [places[index].ahead for index in on_host]
                left = self._sampler.choose_each(rest(), seqs, ahead, is_proposal=is_proposal)
                for index, choice in zip(on_host, left, strict=True):
                    found[index] = choice
            return found

        return end

    def propose(self, kept: KeptLogits, seqs: list[Sequence], ahead: list[list[int]]) -> list[int | None]:
        """`Sampler.propose` from kept logits."""
        if self._sampler.are_greedy(seqs):
            ids, scores = kept.bring(largest(kept.logits))().tolist()
            choices = [check_finite(score, int(token_id)) for score, token_id in zip(scores, ids, strict=True)]
        else:
            choices = self.choose([Place(*place) for place in zip(seqs, ahead, strict=True)], kept, is_proposal=True)()
        return [None if choice.error is not None else choice.token_id for choice in choices]

    def _launch(self, kept: KeptLogits, rows: list[RowInputs], before: Tensor | None) -> tuple[Wait, Tensor]:
        """Have the device choose a token for each row; also their ids there. What it has to know is sent while it
        computes the logits."""
        device = kept.logits.device
        if self._staging is None or self._lists is None or self._staging.device != device:
            self._staging, self._lists = Staging(device, is_beside=True), CountLists(device)
        try:
            inputs = make_sampling_inputs(rows, kept.logits.shape[1], self._lists.locate)
            return _launch(kept, rows, inputs, self._staging, before)
        except BaseException:
            self._lists.clear()  # nobody knows which of their changes were made
            raise

    def _describe(self, place: Place, is_proposal: bool) -> RowInputs | Sampled | None:
        """How the device chooses at a place, or what is chosen already. Returns None if the host must choose."""
        if not place.is_chosen:
            return _UNREAD
        row = self._sampler.row_inputs(place.seq, place.ahead, is_proposal=is_proposal)
        return None if isinstance(row, RowInputs) and not can_choose(row, self._sampler.vocab_size) else row

    def _begin(self, chunks: Seq[Chunk], late: frozenset[Sequence], kept: KeptLogits, before: Tensor | None) -> Wait:
        places = []
        for chunk in chunks:
            draft = chunk.draft or []
            for count in range(len(draft) + 1):
                is_chosen = chunk.seq not in late and (not count or self._sampler.has_mask(chunk.seq, count))
                places.append(Place(chunk.seq, draft[:count], is_chosen))
        return self.choose(places, kept, before)

    def _end(self, chunks: Seq[Chunk], late: frozenset[Sequence], wait: Wait) -> list[list[Sampled]]:
        with torch.inference_mode():
            choices = iter(wait())
        of_chunk = [[next(choices) for _ in range(1 + len(chunk.draft or ()))] for chunk in chunks]
        going = [index for index, chunk in enumerate(chunks) if chunk.seq not in late]
        ended = self._sampler.end_drafts(
            [chunks[index].seq for index in going],
            [chunks[index].draft or [] for index in going],
            [of_chunk[index] for index in going],
        )
        found: list[list[Sampled]] = [[] for _ in chunks]
        for index, own in zip(going, ended, strict=True):
            found[index] = own
        return found

    def _launch_late(self, chunks: Seq[Chunk], kept: KeptLogits, before: Tensor | None) -> list[list[Sampled]]:
        """The choices of a step that waits for masks while the device computes."""
        assert self._masks is not None
        late = self._masks.find_late([chunk.seq for chunk in chunks], len(chunks))
        # what was kept of a sequence that has ended since the launch is forgotten, and is not to be made again
        late |= {chunk.seq for chunk in chunks if chunk.seq.finish is not None}
        with torch.inference_mode():
            wait = self._begin(chunks, late, kept, before)
        return self._end(chunks, late, wait)


def _launch(
    kept: KeptLogits, rows: list[RowInputs], inputs: SamplingInputs, staging: Staging, before: Tensor | None
) -> tuple[Wait, Tensor]:
    from penstock.workers.compute.triton.sampling.sample import read, sample  # noqa: PLC0415 (Triton may be absent)

    result = sample(kept.logits, inputs.sent(staging), before)
    wait = kept.bring(result)

    def end() -> list[Sampled]:
        chosen = read(wait(), inputs)
        logprobs = iter(
            zip(
                chosen.weights.tolist(),
                chosen.own.tolist(),
                chosen.top_ids.tolist(),
                chosen.top.tolist(),
                strict=True,
            )
        )
        each = zip(rows, chosen.token_ids.tolist(), chosen.best.tolist(), chosen.raw_best.tolist(), strict=True)
        return [
            _to_sampled(row, token_id, best, raw_best, None if row.num_top is None else next(logprobs))
            for row, token_id, best, raw_best in each
        ]

    return end, result[: len(rows)]


def _to_sampled(
    row: RowInputs,
    token_id: int,
    best: float,
    raw_best: float,
    scores: tuple[int, float, list[int], list[float]] | None,
) -> Sampled:
    """scores: sum of weights, the token's logit, ids and logits of the likeliest ones; None where nobody wants them."""
    if not math.isfinite(best) or (scores is not None and not math.isfinite(raw_best)):
        return without_choice(raw_best)
    logprobs: TokenLogprobs | None = None
    if scores is not None:
        weight, own, top_ids, top = scores
        likeliest = list(zip(top_ids, top, strict=True))[: row.num_top]
        logprobs = logprobs_from(weight, raw_best, own, likeliest)
    return Sampled(token_id, logprobs)
