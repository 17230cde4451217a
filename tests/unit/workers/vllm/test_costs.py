from collections.abc import Iterator

import pytest

from penstock.perf.model import step_time_s
from penstock.wire.frames import SamplingParams, StepCosts, unpack_token_ids
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Sequence
from penstock.workers.vllm.bridge import Add, Output, Stepped
from penstock.workers.vllm.costs import EVERYTHING, NUM_DECODES, Progress, make_sample, measure, plan_points
from penstock.workers.vllm.request import make_sampling

TRUE = StepCosts(base_s=0.02, row_s=0.0005, prefill_token_s=0.0003)


def play(adds: list[Add]) -> Iterator[Stepped]:
    """A prefill of all prompts in one step, then decode steps; each takes as long as TRUE predicts."""
    contexts = {add.rid: len(unpack_token_ids(add.packed_token_ids)) for add in adds}
    prefill = sum(contexts.values())
    for step in range(NUM_DECODES + 1):
        seconds = step_time_s(
            TRUE, rows=len(adds), prefill_tokens=0 if step else prefill, query_context=0.0, kv_tokens=0
        )
        yield Stepped(seconds, [Output(rid, [1], "length" if step == NUM_DECODES else None) for rid in contexts])


def config(**changes: int) -> EngineConfig:
    return EngineConfig(runner="vllm", **changes)  # type: ignore[arg-type]


def test_the_probe_finds_what_steps_cost() -> None:
    costs = measure(play, config(max_num_seqs=16), 2048, clock=lambda: 0.0)

    for rows, prefill in ((1, 0), (8, 0), (16, 0), (1, 500), (4, 200)):
        context = {"query_context": prefill * prefill / 2, "kv_tokens": 0 if prefill else rows * 64}
        found = step_time_s(costs, rows=rows, prefill_tokens=prefill, **context)
        assert found == pytest.approx(step_time_s(TRUE, rows=rows, prefill_tokens=prefill, **context), rel=0.05)


def test_the_probe_stops_when_its_time_is_up() -> None:
    times = iter([0.0, 5.0])
    counts = []

    def compute(adds: list[Add]) -> Iterator[Stepped]:
        counts.append(len(adds))
        return play(adds)

    measure(compute, config(), 2048, clock=lambda: next(times))

    assert counts == [1, 1, 2, 2, 1], "the warm-up, and the first point"


def test_the_warm_up_samples_in_every_way_that_requests_can() -> None:
    args = make_sampling(
        Sequence("q", [1], SamplingParams(max_tokens=4, logit_bias=((1, 1.0),)), 1, [], b"", 0.0), frozenset()
    )

    assert set(EVERYTHING) == set(args)


@pytest.mark.parametrize(
    ("budget", "seqs", "context"), [(512, 64, 2048), (64, 64, 4096), (16, 1, 32), (2, 2, 8), (4096, 256, 1024)]
)
def test_every_point_fits_a_step_and_the_context(budget: int, seqs: int, context: int) -> None:
    points = list(plan_points(config(max_batched_tokens=budget, max_num_seqs=seqs), context))

    assert all(
        point.rows <= seqs and point.rows * point.prompt <= budget and point.prompt + NUM_DECODES < context
        for point in points
    )
    assert all(point.prompt >= 1 for point in points)


def test_a_step_holds_the_uncached_prompts_of_first_tokens_and_the_context_of_the_others() -> None:
    stepped = Stepped(0.5, [Output(1, [5], num_cached_tokens=32), Output(2, [6]), Output(3, [7])])
    before = {1: Progress(48, False), 2: Progress(10, True), 3: Progress(20, True), 4: Progress(99, True)}

    sample = make_sample(stepped, before)

    assert (sample.rows, sample.prefill_tokens, sample.kv_tokens, sample.seconds) == (3, 16, 30, 0.5)
    assert sample.query_context == sum(range(33, 49))
