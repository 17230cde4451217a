import math

import torch

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.noise import stream_start
from penstock.workers.compute.triton.sampling_inputs import MIN_TEMPERATURE, MOST_KEPT, can_sample, make_sampling_inputs
from penstock.workers.compute.truncation import MOST_TOKENS, least_of_min_p

VOCAB = 1000


def params(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def test_all_but_a_large_top_k_is_drawn_on_the_gpu() -> None:
    assert can_sample(params(), VOCAB)
    assert can_sample(params(top_k=MOST_KEPT, min_p=0.1), VOCAB)
    assert can_sample(params(top_k=VOCAB), VOCAB)
    assert can_sample(params(temperature=0.0, top_p=0.5), VOCAB)
    assert not can_sample(params(top_k=MOST_KEPT + 1), VOCAB)
    assert can_sample(params(top_p=0.9), VOCAB)
    assert not can_sample(params(top_p=0.9), MOST_TOKENS)


def test_each_row_has_its_noise_temperature_and_bounds() -> None:
    inputs = make_sampling_inputs(
        [
            params(seed=2**63 + 5, top_k=7, min_p=0.5, top_p=0.25),
            params(temperature=1e-9),
            params(temperature=0.0, top_k=9, min_p=0.5, top_p=0.5),
        ],
        [3, 4, 5],
        VOCAB,
    )

    assert inputs.streams[0].item() % 2**64 == stream_start(2**63 + 5, 3)
    assert inputs.temperatures.tolist() == torch.tensor([1.0, MIN_TEMPERATURE, 0.0]).tolist()
    assert inputs.least_scaled.tolist() == [least_of_min_p(0.5), -math.inf, -math.inf]
    assert inputs.top_k.tolist() == [7, 0, 0]
    assert inputs.most_kept == 7
    assert (inputs.nucleus_rows.tolist(), inputs.top_p.tolist()) == ([0], [0.25])
