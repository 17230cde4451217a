"""Tokens chosen by the kernel against those that the host's sampler chooses from the same logits with the same
seeds."""

import random

import pytest
import torch

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.triton.sample import sample
from penstock.workers.compute.triton.sampling_inputs import make_sampling_inputs
from penstock.workers.engine.sequence import Sequence
from tests.gpu.cases import DEVICE, NAN

VOCAB = 2500


def params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=draw.choice((0.0, 0.3, 0.7, 1.0, 1.3, 1e-7)),
        top_k=draw.choice((0, 0, 1, 5, 50, VOCAB + 1)),
        top_p=draw.choice((1.0, 1.0, 0.0, 1e-6, 0.3, 0.9, 0.999)),
        min_p=draw.choice((0.0, 0.0, 0.05)),
        seed=draw.choice((draw.randrange(2**63), draw.randrange(100))),
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_same_seed_chooses_the_same_token_as_on_the_host(seed: int) -> None:
    draw = random.Random(seed)
    wanted = [params(draw) for _ in range(12)]
    positions = [draw.randrange(10_000) for _ in wanted]
    logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(seed)) * draw.choice((0.5, 3))
    logits[:, 100:140] = logits[:, 1300:1340] = logits.amax(1, keepdim=True)  # ties
    seqs = [Sequence("r", [1], own, 1, [], b"", 0.0) for own in wanted]

    ids, best = sample(logits.to(DEVICE), make_sampling_inputs(wanted, positions, VOCAB).on(DEVICE)).cpu()

    assert ids.tolist() == [choice.token_id for choice in Sampler(VOCAB).sample(logits, seqs, positions)]
    assert best.tolist() == logits.double().amax(1).tolist()


def test_a_nucleus_ends_in_the_same_token_as_on_the_host_also_among_equals() -> None:
    shares = [0.0, 1e-9, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999999] * 2
    logits = torch.randn(len(shares), VOCAB, generator=torch.Generator().manual_seed(9)).mul(4).round().div(2)
    logits[0, 5:] = -torch.inf
    for seed in range(6):
        wanted = [
            SamplingParams(
                max_tokens=1, top_p=top_p, top_k=(0, 200)[row % 2], min_p=(0.0, 0.0, 0.1)[row % 3], seed=seed
            )
            for row, top_p in enumerate(shares)
        ]
        seqs = [Sequence("r", [1], own, 1, [], b"", 0.0) for own in wanted]

        ids, _ = sample(logits.to(DEVICE), make_sampling_inputs(wanted, [7] * 16, VOCAB).on(DEVICE)).cpu()

        assert ids.tolist() == [choice.token_id for choice in Sampler(VOCAB).sample(logits, seqs, [7] * 16)]


def test_rows_without_a_number_to_choose_are_told_by_their_largest_logit() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 7], logits[1] = NAN, -torch.inf
    wanted = [SamplingParams(max_tokens=1, temperature=1.0, seed=1)] * 2

    _, best = sample(logits.to(DEVICE), make_sampling_inputs(wanted, [0, 0], VOCAB).on(DEVICE)).cpu()

    assert not best.isfinite().any()
