"""Predicted answers through the scheduler: fewer steps, the same tokens, and no drafts for others."""

import pytest

from penstock.wire.frames import StepCosts
from penstock.workers.compute.speculation.prediction import PredictionDrafter
from penstock.workers.engine.sequence import Chunk, Sequence
from tests.unit.workers.engine.scheduler_bench import Bench, expected, make_output, prompt_of


def bench_of(**options: int) -> Bench:
    """A pool without a drafter of its own."""
    bench = Bench(**options)  # type: ignore[arg-type]
    drafter = PredictionDrafter()

    def propose(seq: Sequence, count: int) -> list[int]:
        [draft] = drafter.propose([Chunk(seq, seq.num_tokens - 1, 1, max_drafts=count)])
        return draft

    bench.runner.drafter = propose
    return bench


@pytest.mark.parametrize(("num_wrong", "most_steps"), [(0, 9), (3, 14)])
def test_a_predicted_answer_takes_fewer_steps(num_wrong: int, most_steps: int) -> None:
    bench = bench_of()
    seq = bench.sequence(prompt_of(9), max_tokens=40)
    answer = expected(seq)
    seq.prediction = [*answer[:10], *[41] * num_wrong, *answer[10:]]
    bench.add(seq)
    num_steps = bench.drain()

    assert make_output(seq) == answer
    assert num_steps <= most_steps


def test_a_wrong_prediction_changes_no_token() -> None:
    bench = bench_of()
    seq = bench.sequence(prompt_of(9), max_tokens=20)
    seq.prediction = [7] * 30
    bench.add(seq)
    bench.drain()

    assert make_output(seq) == expected(seq)


def test_sequences_without_a_prediction_get_no_places_for_drafts() -> None:
    bench = bench_of()
    predicted, plain = bench.sequence(prompt_of(9), max_tokens=20), bench.sequence(prompt_of(9, first=2), max_tokens=20)
    predicted.prediction = expected(predicted)
    bench.add(predicted, plain)
    bench.step()
    places = [(chunk.seq, chunk.max_drafts > 0) for chunk in bench.step().chunks]

    assert places == [(predicted, True), (plain, False)]
    bench.drain()
    assert bench.scheduler.drafts.num_accepted > 0


def test_a_draft_costs_what_a_prompts_token_does_where_nothing_else_is_known() -> None:
    bench = bench_of()
    seq = bench.sequence(prompt_of(9), max_tokens=20)
    seq.prediction = expected(seq)
    bench.add(seq)
    bench.step()
    dear = bench.scheduler.schedule(StepCosts(base_s=0.001, prefill_token_s=1.0))

    assert [chunk.max_drafts for chunk in dear.chunks] == [0]
