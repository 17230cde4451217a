"""The probe on a device that replays recorded steps: a staircase whose times are known, predicted with what the device
tells of its recordings and without."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from penstock.perf.fit import MAX_CLIFFS, StepSample, predict_sample_s
from penstock.wire.frames import Stairs, StepCosts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.probe import BUDGET_S, measure
from penstock.workers.engine.sequence import Sequence, Step

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the recordings."""
TILES = ((16, 0.0003), (64, 0.0008), (256, 0.002), (1024, 0.004))
"""Tokens beyond which products are cut otherwise, and seconds that they then take longer."""
CONFIG = EngineConfig(device="cuda", block_size=16, max_num_seqs=256, max_batched_tokens=2048)
NOISE = 0.02


@dataclass
class Staircase:
    """A GPU as `penstock.workers.engine.probe.Probed`, with a clock of its own."""

    launches_s: float
    """Shortest time of a step that is not recorded."""
    recorded_tokens: int = 0
    tells: bool = True
    """Whether the probe is told of the recordings."""
    num_blocks: int = 20_000
    max_model_len: int = 8192
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(3))

    @property
    def stairs(self) -> Stairs | None:
        mixed = [size for size in (384, 512) if size <= self.recorded_tokens]
        places = tuple((size, 0.0) for size in (*SIZES, *mixed))
        return Stairs(SIZES[-1], self.recorded_tokens, 0.0, places) if self.tells else None

    def launch(self, step: Step) -> Callable[[], object]:
        shape = step.shape
        sample = StepSample(shape.rows, shape.prefill_tokens, shape.query_context, shape.kv_tokens, 0, 1.0)
        self.now += self.seconds(sample) * self.random.lognormvariate(0, NOISE)
        self.steps.append(step)
        return lambda: None

    def forget(self, seq: Sequence) -> None:
        pass

    def clock(self) -> float:
        return self.now

    def seconds(self, step: StepSample) -> float:
        """The true time of a step."""
        num_tokens = step.rows + max(0, step.prefill_tokens - 1)
        is_recorded = not step.prefill_tokens or num_tokens <= self.recorded_tokens
        if is_recorded:
            num_tokens = next(size for size in (*SIZES, 384, 512) if size >= num_tokens)
        tiles_s = sum(seconds for place, seconds in TILES if num_tokens > place)
        busy_s = 0.0022 + 0.00002 * num_tokens + tiles_s + 4e-8 * step.kv_tokens + 1e-10 * step.query_context
        return busy_s if is_recorded else max(self.launches_s, busy_s)


def draw_steps(count: int) -> list[StepSample]:
    """Steps as serving has them: three of five only decode."""
    random = Random(11)
    found = []
    for index in range(count):
        rows = round(256 ** random.random())
        kv_tokens = sum(random.randrange(16, 4000) for _ in range(rows))
        prefill = 0 if index % 5 < 3 else 1 + round(1700 ** random.random())
        query_context = prefill * random.randrange(1, 3000)
        found.append(StepSample(rows + (prefill > 0) - (rows == 256), prefill, query_context, kv_tokens, 0, 1.0))
    return found


def find_errors(runner: Staircase, costs: StepCosts) -> list[float]:
    """Relative errors of predictions, over the steps of `draw_steps`."""
    return [abs(predict_sample_s(costs, step) / runner.seconds(step) - 1) for step in draw_steps(2000)]


@pytest.mark.parametrize(("launches_s", "recorded_tokens"), [(0.008, 0), (0.016, 0), (0.016, 512), (0.03, 512)])
def test_recorded_steps_are_predicted_closer(
    launches_s: float, recorded_tokens: int, record_property: Callable[[str, object], None]
) -> None:
    told, untold = (Staircase(launches_s, recorded_tokens, tells) for tells in (True, False))
    errors = find_errors(told, measure(told, CONFIG, told.clock))
    before = find_errors(untold, measure(untold, CONFIG, untold.clock))

    (p50, p90), (old_p50, old_p90) = (np.quantile(found, (0.5, 0.9)) for found in (errors, before))
    words = f"p50 {p50:.3f} instead of {old_p50:.3f}, p90 {p90:.3f} instead of {old_p90:.3f}"
    record_property("errors", words)
    assert p90 < 0.7 * old_p90, words
    assert p50 < old_p50 + NOISE, words


def test_the_knee_of_steps_that_are_not_recorded_is_found_and_few_cliffs_are_kept() -> None:
    runner = Staircase(0.008)
    stairs = measure(runner, CONFIG, runner.clock).stairs

    assert stairs is not None
    assert stairs.eager_knee_s == pytest.approx(0.008, rel=3 * NOISE)
    assert (stairs.recorded_rows, stairs.recorded_tokens) == (256, 0)
    assert 1 <= len(stairs.cliffs) <= MAX_CLIFFS
    assert dict(stairs.cliffs)[64] == pytest.approx(0.0008, rel=0.5), "where products are cut otherwise"
    assert all(seconds > 0 and place in SIZES[:-1] for place, seconds in stairs.cliffs)


def test_every_recording_of_decode_steps_is_measured_in_the_probes_time() -> None:
    runner = Staircase(0.008)
    measure(runner, CONFIG, runner.clock)

    decodes = {len(step.chunks) for step in runner.steps if not step.shape.prefill_tokens}
    assert decodes == set(SIZES)
    assert runner.now < BUDGET_S / 4


def test_a_slow_device_is_probed_for_a_bounded_time_and_no_cliff_is_made_up() -> None:
    runner = Staircase(2.0)
    costs = measure(runner, CONFIG, runner.clock)

    assert runner.now < BUDGET_S + 2 * 2.1
    assert costs.stairs is not None
    assert not [place for place, _ in costs.stairs.cliffs if place >= 8], "no recorded step had more rows"


def test_a_device_that_records_nothing_is_probed_and_fitted_as_ever() -> None:
    runner = Staircase(0.008, tells=False)
    costs = measure(runner, CONFIG, runner.clock)

    assert costs.stairs is None
    assert {len(step.chunks) for step in runner.steps} == {1, 8, 9, 256}
