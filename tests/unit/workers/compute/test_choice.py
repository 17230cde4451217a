"""The choice by numpy, which is the definition, against enumeration in float64; and what the kernels' choice costs."""

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.choice import choose_by_numpy, choose_rows, logprobs_of
from penstock.workers.compute.kernels.choice import ChoiceInput
from penstock.workers.compute.noise import gumbel, stream_start
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.truncation import find_cut, kept_ids, least_of_min_p
from penstock.workers.engine.sequence import Sequence
from tests.real_time import real_time
from tests.unit.workers.built_kernels import built_kernels

VOCAB = 131_072
MOST_PASSES = 18
"""Passes of numpy's exponential over a row in float64 that choosing from it may take. The costliest takes ten of them;
a choice that sorted the row's values would take twenty, one that sorted their places forty."""
COSTLY: dict[str, dict[str, object]] = {
    "all features": {
        "top_p": 0.95, "top_k": 2000, "min_p": 0.001, "logprobs": 20, "repetition_penalty": 1.1,
        "frequency_penalty": 0.5, "logit_bias": tuple((token_id * 97, 1.0) for token_id in range(1024)),
    },
    "noise alone": {},
    "a nucleus of nearly all": {"top_p": 0.999},
    "a tiny nucleus": {"top_p": 1e-9, "logprobs": 20},
    "most of top_k": {"top_k": 100_000},
}  # fmt: skip


def make_input(logits: np.ndarray, **changes: object) -> ChoiceInput:
    plain = ChoiceInput(logits, logits, 1.0, 0, 1.0, -math.inf, stream_start(5, 9), None)
    return plain._replace(**changes)  # type: ignore[arg-type]


def random_row(size: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


@pytest.mark.parametrize("seed", range(30))
def test_the_token_is_the_best_of_score_and_noise_among_what_is_left(seed: int) -> None:
    logits = random_row(700, seed)
    row = make_input(
        logits, stream=stream_start(seed, 3), temperature=0.75, top_k=300, top_p=0.8, least=least_of_min_p(0.001)
    )
    scaled = (logits - logits.max()) / np.float32(0.75)
    kept = kept_ids(scaled, find_cut(scaled, 300, 0.8, row.least))

    chosen = choose_by_numpy(row)

    assert chosen is not None
    assert chosen.token_id == kept[np.argmax(scaled[kept].astype(np.float64) + gumbel(seed, 3, kept))]


def test_log_probabilities_are_those_of_the_softmax_best_first_and_of_equals_the_lower_id() -> None:
    logits = random_row(5000)
    logits[[4000, 70]] = 20.0
    chosen = choose_by_numpy(make_input(logits, num_top=5))
    assert chosen is not None
    found = logprobs_of(chosen, logits)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)

    assert [token_id for token_id, _ in found.top][:2] == [70, 4000]
    assert [value for _, value in found.top] == pytest.approx(expected.topk(5).values.tolist(), abs=4e-9)
    assert found.logprob == pytest.approx(expected[chosen.token_id].item(), abs=4e-9)


def lowest_s(*acts: Callable[[], object]) -> list[float]:
    """Lowest CPU seconds of each. They take turns, so that what else the machine does falls on all alike."""
    turns = []
    for _ in range(7):
        times = []
        for act in acts:
            begin = time.thread_time()
            act()
            times.append(time.thread_time() - begin)
        turns.append(times)
    return [min(times) for times in zip(*turns, strict=True)]


@real_time
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("name", COSTLY)
def test_a_row_costs_a_few_passes_over_it_whatever_the_parameters_and_the_distribution(
    name: str, spread: float, one_torch_thread: None
) -> None:
    raw = random_row(VOCAB, spread=spread)
    sampler = Sampler(VOCAB, {2}, built_kernels().chooser())
    seq = Sequence(
        "r", list(range(0, 6000, 3)), SamplingParams(max_tokens=9, **COSTLY[name]), 1500, [], b"", 0.0  # type: ignore[arg-type]
    )  # fmt: skip
    logits = torch.from_numpy(raw)[None]
    sampler.sample(logits, [seq], [2000])

    chosen_s, passed_s = lowest_s(
        lambda: sampler.sample(logits, [seq], [2000]), lambda: np.exp(raw.astype(np.float64)).sum()
    )

    assert chosen_s < MOST_PASSES * passed_s


def test_a_vocabulary_whose_sums_would_not_fit_is_left_to_numpy() -> None:
    row = make_input(np.zeros(1 << 19, dtype=np.float32), temperature=0.0)
    [chosen] = choose_rows([row], built_kernels().chooser())

    assert chosen is not None
    assert chosen.token_id == 0
