"""The performance model in arrays against the one in numbers, which is its oracle."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from penstock.perf.blend import RunningMean, blend_costs
from penstock.perf.many import Request, predict_many, read_paces
from penstock.perf.model import Work, mean_costs, predict_prefill_s, predict_tpot_s, predict_ttft_s
from penstock.perf.work_table import WorkTable, read_work
from penstock.wire.frames import Stairs, StepCosts

BUDGETS = (1, 64, 512, 2048)


def draw_costs(random: Random, pace: float, *, has_stairs: bool) -> StepCosts:
    scale = (1e-2, 1e-3, 1e-4, 1e-8, 1e-7, 1e-4, 1e-4, 2e-2, 1e-3)
    seconds = [value * pace * random.choice((0.0, random.random())) for value in scale]
    if not has_stairs:
        return StepCosts(*seconds)
    cliffs = tuple((place, random.random() * 1e-2) for place in sorted(random.sample(range(1, 600), 4)))
    return StepCosts(*seconds, Stairs(random.choice((8, 32)), random.choice((0, 256)), random.random() * 0.05, cliffs))


def draw_work(random: Random) -> Work:
    if random.random() < 0.2:
        return Work()
    running = random.randrange(40)
    return Work(
        running,
        random.randrange(5),
        random.choice((0, random.randrange(9000))),
        running * 700,
        running and running // 3,
    )


@pytest.mark.parametrize("has_stairs", [False, True])
@pytest.mark.parametrize("scored_tokens", [0, 300])
def test_predictions_for_many_replicas_are_those_for_each(has_stairs: bool, scored_tokens: int) -> None:
    for seed in range(60):
        random = Random(seed)
        works = [draw_work(random) for _ in range(9)]
        costs = [
            draw_costs(random, random.choice((0.5, 1.0, 1.1, 3.0)), has_stairs=has_stairs and random.random() < 0.9)
            for _ in works
        ]
        num_tokens = random.randrange(1, 3000)
        cached = [random.randrange(num_tokens) // 16 * 16 for _ in works]
        budget = random.choice(BUDGETS)

        table = fill_table(works, costs, budget)
        paces = read_paces(table, mean_of(costs))
        found = predict_many(table, paces, Request(num_tokens, 1.0, scored_tokens), np.array(cached, dtype=float))

        factors = 1.0 if paces.factors is None else paces.factors
        blended = blend_costs(costs, works)
        ttft_s, alone_s, tpot_s = [], [], []
        for each, work, held in zip(blended, works, cached, strict=True):
            rest = num_tokens - held
            ttft_s.append(predict_ttft_s(each, work, rest, held, budget, scored_tokens))
            alone = work._replace(prefill_tokens=0)
            alone_s.append(predict_prefill_s(each, alone, rest, held, budget, scored_tokens))
            tpot_s.append(predict_tpot_s(each, work, num_tokens))
        for got, wanted in zip(found, (ttft_s, alone_s, tpot_s), strict=True):
            np.testing.assert_allclose(got * factors, wanted, rtol=1e-9, atol=1e-12)


def fill_table(works: Sequence[Work], costs: Sequence[StepCosts], budget: int) -> WorkTable:
    table = WorkTable(len(works))
    for row, (work, each) in enumerate(zip(works, costs, strict=True)):
        table.write(row, Work(9, 9, 9, 9, 9), 9, each)  # what was there before leaves nothing
        table.write(row, work, budget, each)
        assert read_work(table.numbers, row) == (work, budget)
    return table


def mean_of(costs: Sequence[StepCosts]) -> StepCosts:
    mean = RunningMean(len(costs))
    for row, each in enumerate(costs):
        mean.write(row, each)
    return mean.read()


def flat(costs: StepCosts) -> list[float]:
    *seconds, stairs = (getattr(costs, name) for name in costs.__struct_fields__)
    return seconds + (
        [] if stairs is None else [stairs.eager_knee_s, *(part for cliff in stairs.cliffs for part in cliff)]
    )


def test_the_running_mean_is_the_mean_of_the_costs_that_there_are() -> None:
    random, present = Random(0), dict[int, StepCosts]()
    mean = RunningMean(12)
    for _ in range(400):
        row = random.randrange(12)
        if random.random() < 0.3:
            present.pop(row, None)
        else:
            present[row] = draw_costs(random, 1.0, has_stairs=random.random() < 0.5)
        mean.write(row, present.get(row))
        if not present:
            continue
        wanted = mean_costs(list(present.values()))
        assert flat(mean.read()) == pytest.approx(flat(wanted), rel=1e-9, abs=1e-12)
        if wanted.stairs is not None:
            got = mean.read().stairs
            assert got is not None
            assert (got.recorded_rows, got.recorded_tokens) == (
                wanted.stairs.recorded_rows,
                wanted.stairs.recorded_tokens,
            )
