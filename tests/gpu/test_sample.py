"""Tokens and log probabilities chosen by the kernels against those that the host's sampler chooses from the same logits
with the same parameters."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.workers.compute.device import bring
from penstock.workers.compute.device_choice import DeviceChoice, KeptLogits
from penstock.workers.compute.grammar.masks import RowMasks
from penstock.workers.compute.grammar.matcher import Allowed
from penstock.workers.compute.sampling import Sampler, _Place
from penstock.workers.compute.triton.sampling.adjust import change_rows
from penstock.workers.compute.triton.sampling.count_lists import CountLists
from penstock.workers.compute.triton.sampling.cut import Rows, find_cuts
from penstock.workers.compute.triton.sampling.sampling_inputs import (
    MOST_TOP,
    RowInputs,
    make_sampling_inputs,
    pack_words,
)
from penstock.workers.compute.truncation import target_weight, weigh
from penstock.workers.engine.sequence import Chunk, Sequence
from tests.gpu.cases import DEVICE, IS_SHORT, NAN

VOCAB = 2500
EOS = frozenset({3, 4})
NUM_SEEDS = 2 if IS_SHORT else 4
ROWS = 55


class FixedMasks:
    """Masks of sequences whose grammars allow what they are told to, at every place of a draft."""

    def __init__(self) -> None:
        self.of_seq: dict[Sequence, RowMasks] = {}
        self.late: set[Sequence] = set()
        self.settled: list[list[int]] = []

    def add(self, seq: Sequence, *allowed: list[int], must_end: bool = False, error: str | None = None) -> None:
        rows = [np.isin(np.arange(VOCAB), ids) for ids in allowed]
        self.of_seq[seq] = RowMasks(
            [Allowed(pack_words(row), VOCAB) for row in rows], [False] * (len(rows) - 1) + [must_end], error
        )
        seq.grammar = object()  # type: ignore[assignment]

    def is_ready(self, seq: Sequence) -> bool:
        return seq not in self.late

    def find_late(self, seqs: list[Sequence], num_rows: int) -> frozenset[Sequence]:
        assert num_rows == len(seqs)
        return frozenset(self.late)

    def of(self, seq: Sequence) -> RowMasks:
        assert seq not in self.late
        return self.of_seq[seq]

    def is_end(self, seq: Sequence, token_id: int) -> bool:
        return token_id in EOS

    def settle(self, seq: Sequence, token_ids: list[int]) -> bool:
        self.settled.append(token_ids)
        return bool(token_ids[-1] % 2)


class CountedFetch:
    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, result: Tensor) -> Callable[[], Tensor]:
        self.num_bytes += result.numel() * result.element_size()
        return bring(result)


def ids_of(draw: random.Random, most: int) -> list[int]:
    return draw.sample(range(VOCAB), draw.randint(1, most))


def params(draw: random.Random) -> SamplingParams:
    """Most rows have a few of the parameters, many have none."""
    wanted: dict[str, Any] = {
        "temperature": draw.choice((0.0, 0.3, 0.7, 1.0, 1.3, 1e-7)),
        "seed": draw.choice((draw.randrange(2**63), draw.randrange(100))),
    }
    for name, values in {
        "top_k": (1, 5, 50, 700, 2400, VOCAB + 1),
        "top_p": (0.0, 1e-6, 0.3, 0.9, 0.999),
        "min_p": (0.05, 1.0),
        "repetition_penalty": (1.3, 0.7),
        "frequency_penalty": (0.4, -1.1),
        "presence_penalty": (0.9, -0.3),
        "min_tokens": (1, 30),
        "logprobs": (0, 1, 20),
    }.items():
        if draw.random() < 0.3:
            wanted[name] = draw.choice(values)
    if draw.random() < 0.2:
        wanted["logit_bias"] = tuple((token_id, draw.choice((-100.0, 3.3, 7.1))) for token_id in ids_of(draw, 20))
    if draw.random() < 0.15:
        wanted["allowed_token_ids"] = pack_token_ids(ids_of(draw, 300))
    if draw.random() < 0.2:
        wanted["bad_words"] = (*[(token_id,) for token_id in ids_of(draw, 4)], (1, 2), (7, 9))
    return SamplingParams(max_tokens=100, stop_token_ids=(8,), **wanted)


def sequence(draw: random.Random, own: SamplingParams) -> Sequence:
    token_ids = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))]
    token_ids += draw.choices(token_ids, k=draw.randint(0, 20))
    num_prompt_tokens = draw.randint(1, len(token_ids))
    token_ids[-1] = draw.choice((1, 7, token_ids[-1]))
    return Sequence("r", token_ids, own, num_prompt_tokens, [], b"", 0.0)


def random_logits(draw: random.Random, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    logits = torch.randn(num_rows, VOCAB, generator=generator) * draw.choice((0.5, 3, 8))
    logits[::3] = logits[::3].mul(4).round().div(4)  # ties everywhere
    logits[:, 100:120] = logits[:, 1300:1320] = logits.amax(1, keepdim=True)
    logits[1::7, 200:2300] = -torch.inf
    logits[4::11] = logits[4::11].bfloat16().float()
    return logits


def chunk_of(seq: Sequence, draft: list[int] | None = None) -> Chunk:
    return Chunk(seq, seq.num_tokens - 1, 1, draft=draft)


def launched(sampler: Sampler, masks: Any, logits: Tensor, chunks: list[Chunk], fetch: Any = bring) -> Any:
    return DeviceChoice(sampler, masks).launch(chunks, KeptLogits(logits.to(DEVICE), fetch))()


def samplers(masks: Any = None) -> tuple[Sampler, Sampler]:
    return Sampler(VOCAB, EOS, masks=masks), Sampler(VOCAB, EOS, masks=masks)


def mixed(seed: int) -> tuple[list[Sequence], FixedMasks, Tensor]:
    draw, masks = random.Random(seed), FixedMasks()
    seqs = [sequence(draw, params(draw)) for _ in range(ROWS)]
    for seq in seqs[::5]:
        masks.add(seq, ids_of(draw, draw.choice((3, 2000))), must_end=draw.random() < 0.3)
    return seqs, masks, random_logits(draw, ROWS)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_rows_of_all_parameters_have_the_tokens_and_log_probabilities_of_the_host(seed: int) -> None:
    """Alone they have the same as in company; of the logits nothing is fetched."""
    seqs, masks, logits = mixed(seed)
    host, device = samplers(masks)
    fetch = CountedFetch()

    expected = [[choice] for choice in host.sample(logits, seqs, [seq.num_tokens for seq in seqs])]
    got = launched(device, masks, logits, [chunk_of(seq) for seq in seqs], fetch)

    assert got == expected
    assert fetch.num_bytes < ROWS * (5 + 2 * 20) * 8 < VOCAB * 4 * ROWS
    for row in range(seed, ROWS, 14):
        assert launched(device, masks, logits[row : row + 1], [chunk_of(seqs[row])]) == [expected[row]]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_changed_rows_are_those_of_the_host(seed: int) -> None:
    """Every number of them, also of tokens that are never chosen."""
    seqs, masks, logits = mixed(seed)
    host, device = samplers(masks)
    rows = [device.row_inputs(seq, []) for seq in seqs]
    known = [row for row in rows if isinstance(row, RowInputs)]
    lists = CountLists(DEVICE)
    inputs = make_sampling_inputs(known, VOCAB, lists.locate).on(DEVICE).tensors

    changed = change_rows(logits.to(DEVICE), inputs).cpu().numpy()

    assert len(changed) > ROWS // 2
    for row, got in zip(inputs.changed_rows.tolist(), changed, strict=True):
        expected = host._mask(_Place(logits[row].numpy(), seqs[row], seqs[row].num_tokens))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_drafts_hold_as_far_as_on_the_host(seed: int) -> None:
    """Drafts of which most tokens are right, beside rows without one."""
    draw, masks = random.Random(100 + seed), FixedMasks()
    seqs = [sequence(draw, params(draw)) for _ in range(8)]
    for seq in seqs[::3]:
        masks.add(seq, *[ids_of(draw, 300) for _ in range(draw.randint(1, 4))], must_end=draw.random() < 0.3)
    host, device = samplers(masks)
    drafts: list[list[int]] = []
    rows: list[Tensor] = []
    for seq in seqs:
        length, draft, own = draw.randint(0, 3), [], random_logits(draw, 4)
        if seq.grammar is not None:
            length = min(length, len(masks.of(seq).allowed) - 1)
        for place in range(length):
            [choice] = host.choose_each(own[place : place + 1], [seq], [draft])
            draft = [*draft, choice.token_id if draw.random() < 0.8 else draw.randrange(VOCAB)]
        drafts.append(draft)
        rows.append(own[: length + 1])
    logits = torch.cat(rows)

    expected = host.verify(logits, seqs, drafts)
    num_settled = len(masks.settled)
    got = launched(
        device, masks, logits, [chunk_of(seq, draft or None) for seq, draft in zip(seqs, drafts, strict=True)]
    )

    assert got == expected
    assert masks.settled[:num_settled] == masks.settled[num_settled:]
    assert max(map(len, expected)) > 1


def test_a_draft_ends_where_the_grammar_goes_no_further() -> None:
    masks, draw = FixedMasks(), random.Random(5)
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    ending, stuck, broken = (sequence(draw, plain) for _ in range(3))
    masks.add(ending, [11], must_end=True)
    masks.add(stuck, [11], error="no further")
    masks.add(broken, error="no further")
    host, device = samplers(masks)
    logits = random_logits(draw, 5)
    drafts = [[11], [11], []]

    expected = host.verify(logits, [ending, stuck, broken], drafts)
    got = launched(
        device, masks, logits, [chunk_of(seq, own) for seq, own in zip((ending, stuck, broken), drafts, strict=True)]
    )

    assert got == expected
    assert [[choice.token_id for choice in own] for own in got[:2]] == [[11], [11]]
    assert got[2][0].error == "no further"


def test_a_late_row_is_left_out_and_the_others_are_not() -> None:
    seqs, masks, logits = mixed(3)
    host, device = samplers(masks)
    constrained = [index for index, seq in enumerate(seqs) if seq.grammar is not None]
    expected = [[choice] for choice in host.sample(logits, seqs, [seq.num_tokens for seq in seqs])]
    masks.late = {seqs[index] for index in constrained[:2]}

    got = launched(device, masks, logits, [chunk_of(seq) for seq in seqs])

    assert got == [[] if index in constrained[:2] else own for index, own in enumerate(expected)]
    masks.late = {seqs[constrained[0]]}
    assert launched(device, masks, logits[:1], [chunk_of(seqs[constrained[0]])]) == [[]]


def test_a_nucleus_ends_in_the_same_token_as_on_the_host_also_among_equals() -> None:
    shares = [0.0, 1e-9, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999999] * 2
    logits = torch.randn(len(shares), VOCAB, generator=torch.Generator().manual_seed(9)).mul(4).round().div(2)
    logits[0, 5:] = -torch.inf
    for seed in range(2):
        seqs = [
            Sequence(
                "r",
                [1] * 7,
                SamplingParams(
                    max_tokens=1, top_p=top_p, top_k=(0, 200)[row % 2], min_p=(0.0, 0.0, 0.1)[row % 3], seed=seed
                ),
                1,
                [],
                b"",
                0.0,
            )
            for row, top_p in enumerate(shares)
        ]

        got = launched(Sampler(VOCAB), None, logits, [chunk_of(seq) for seq in seqs])

        assert got == [[choice] for choice in Sampler(VOCAB).sample(logits, seqs, [7] * len(seqs))]


def test_a_nucleus_whose_weight_is_just_what_is_wanted_has_no_token_more() -> None:
    """Shares of the weight that end at the last of equal scores, and in the middle of some."""
    rows, shares, expected = [], [], []
    for seed in range(3):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).mul(4).round().div(2)
        scores = (logits - logits.max()).numpy()
        order = np.argsort(-scores, kind="stable")
        reached = np.cumsum(weigh(scores[order].astype(np.float64)))
        last_of_equals = np.flatnonzero(np.diff(scores[order]))
        for place in [*last_of_equals[:3], last_of_equals[2] // 2]:
            share = share_for(int(reached[-1]), int(reached[place]))
            if share is not None:
                rows.append(logits)
                shares.append(share)
                expected.append((float(scores[order[place]]), int(order[place])))
    assert len(expected) > 8
    inputs = make_sampling_inputs(
        [Sampler(VOCAB).row_inputs(drawn(top_p=share), []) for share in shares],
        VOCAB,  # type: ignore[misc]
    ).on(DEVICE)
    logits = torch.stack(rows).to(DEVICE)

    keys, last_ids = find_cuts(
        Rows(logits, logits[:0], inputs.tensors.sources, logits.amax(1), inputs.tensors.temperatures), inputs
    )

    scores = -keys.cpu().view(torch.float32)
    assert list(zip(scores.tolist(), last_ids.tolist(), strict=True)) == expected


def drawn(**parameters: Any) -> Sequence:
    return Sequence("r", [1] * 7, SamplingParams(max_tokens=1, temperature=1.0, **parameters), 1, [], b"", 0.0)


def share_for(total: int, weight: int) -> float | None:
    """A top_p of which the target is this weight; None where rounding knows none."""
    share = weight / total
    around = (share, math.nextafter(share, 0), math.nextafter(share, 1))
    return next((each for each in around if target_weight(total, each) == weight), None)


def test_rows_without_a_token_to_choose_have_the_errors_of_the_host() -> None:
    bad, nothing = {"bad_words": ((21,),)}, {"allowed_token_ids": pack_token_ids([21])}
    wanted: list[dict[str, Any]] = [
        {"temperature": temperature, **more}
        for temperature in (0.0, 1.0)
        for more in ({}, {"logprobs": 2}, bad, bad | nothing, {"logit_bias": ((-1, 2.0),)}, {"top_p": 0.5, "top_k": 9})
    ] + [{"temperature": math.inf}]
    logits = torch.zeros(4, VOCAB)
    logits[0, 21], logits[1], logits[2, 7] = NAN, -torch.inf, torch.inf
    for row in logits:
        seqs = [Sequence("r", [1], SamplingParams(max_tokens=1, **own), 1, [], b"", 0.0) for own in wanted]
        rows = row.repeat(len(seqs), 1)

        got = launched(Sampler(VOCAB), None, rows, [chunk_of(seq) for seq in seqs])

        assert got == [[choice] for choice in Sampler(VOCAB).sample(rows, seqs, [1] * len(seqs))]
        assert any(choice.is_at_fault for [choice] in got) == bool(row.amax().isfinite())


def test_of_rows_that_the_device_cannot_choose_only_these_are_fetched() -> None:
    draw, fetch = random.Random(1), CountedFetch()
    seqs = [sequence(draw, params(draw)) for _ in range(8)]
    for index in (2, 5):
        own = SamplingParams(max_tokens=9, logprobs=MOST_TOP + 1, seed=index, presence_penalty=0.5)
        seqs[index] = sequence(draw, own)
    logits = random_logits(draw, 8)

    got = launched(Sampler(VOCAB, EOS), None, logits, [chunk_of(seq) for seq in seqs], fetch)

    assert got == [[each] for each in Sampler(VOCAB, EOS).sample(logits, seqs, [seq.num_tokens for seq in seqs])]
    assert 2 * VOCAB * 4 < fetch.num_bytes < 3 * VOCAB * 4


def test_a_drafter_gets_the_tokens_that_the_host_would_propose() -> None:
    seqs, masks, logits = mixed(4)
    ahead = [[index, index + 1][: index % 3] for index in range(ROWS)]
    host, device = samplers(masks)
    chooser, kept = DeviceChoice(device), KeptLogits(logits.to(DEVICE))
    plain = [Sequence("r", [1], SamplingParams(max_tokens=9, temperature=0.0), 1, [], b"", 0.0)] * 2

    assert chooser.propose(kept, seqs, ahead) == host.propose(logits, seqs, ahead)
    assert chooser.propose(KeptLogits(logits[:2].to(DEVICE)), plain, [[], []]) == logits[:2].argmax(1).tolist()
