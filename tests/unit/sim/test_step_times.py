import json
from pathlib import Path

import numpy as np
import pytest

from penstock.sim.step_times import Noise, StepTimes
from penstock.workers.config import TimedConfig
from penstock.workers.engine.sequence import StepShape

TABLE = {
    "decode_rows": [0, 1, 8, 64],
    "prefill_tokens": [0, 64, 512],
    "kv_tokens": [0, 4096, 65536],
    "seconds": [
        [[0.004 + rows * 2e-4 + prefill * 5e-5 + kv * 3e-8 + rows * kv * 1e-10 for kv in (0, 4096, 65536)]
         for prefill in (0, 64, 512)]
        for rows in (0, 1, 8, 64)
    ],
    "noise": 0.1,
    "attention_s": 2e-9,
    "source": "made up for a test",
}  # fmt: skip


@pytest.fixture
def times(tmp_path: Path) -> StepTimes:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(TABLE))
    return StepTimes(TimedConfig(table=str(path)))


@pytest.mark.parametrize("rows", [1, 3, 8, 40, 90])
@pytest.mark.parametrize("kv_tokens", [0, 100, 4095, 4096, 50_000, 200_000])
def test_a_line_of_decode_steps_is_the_tables_own_interpolation(times: StepTimes, rows: int, kv_tokens: int) -> None:
    base_s, kv_token_s, until = times.decode_line(rows, kv_tokens)

    for kv in {kv_tokens, int(min(until, 300_000)) - 1}:
        if kv >= kv_tokens:
            assert base_s + kv_token_s * kv == pytest.approx(times.at(StepShape(rows, rows, 0, 0.0, kv)))


def test_attention_behind_the_grids_prompts_takes_longer(times: StepTimes) -> None:
    first = times.at(StepShape(1, 0, 64, 64 * 65 / 2, 0))
    later = times.at(StepShape(1, 0, 64, 64 * 65 / 2 + 64 * 10_000, 0))

    assert later - first == pytest.approx(64 * 10_000 * 2e-9)
    assert times.costs.attention_s == pytest.approx(2e-9, rel=0.3)
    assert times.source == "made up for a test"


def test_noise_is_drawn_by_seed_with_mean_1_and_the_tables_deviation(times: StepTimes) -> None:
    noises = [Noise(times.noise, seed) for seed in ((1, 2), (1, 2), (1, 3))]
    for noise in noises:
        for _ in range(20):
            noise.extend()

    assert noises[0].factors == noises[1].factors != noises[2].factors
    assert np.mean(noises[0].factors) == pytest.approx(1.0, abs=0.005)
    assert np.std(noises[0].factors) == pytest.approx(0.1, rel=0.05)
