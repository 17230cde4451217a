"""Drafts that are looked up beside a drafter that knows chances: where they are made, and what is learned of them."""

import msgspec
import pytest

from penstock.wire.frames import SamplingParams, StepCosts
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.draft_lengths import FEW, MOST_LOOKED_UP, DraftLengths
from penstock.workers.engine.draft_places import reserve_drafts
from penstock.workers.engine.row_times import RowTimes
from penstock.workers.engine.sequence import Chunk, Sequence, Step

COSTS = StepCosts(base_s=0.0036, row_s=0.0002, draft_token_s=0.0006, draft_round_s=0.0002)
TIMES = RowTimes(COSTS, ((1, 0.0038), (8, 0.0054), (9, 0.0065), (16, 0.0097)), call_s=0.0005, round_s=0.0001)
TEXT = list(range(100, 120))
LOOP, NEW = [*TEXT, 5, 6, 7, *TEXT], list(range(200, 240))
BLOCK = 8


def make_step(*texts: list[int], gain: float | None = None, num_left: int = 50) -> Step:
    chunks = []
    for token_ids in texts:
        sampling = SamplingParams(max_tokens=num_left, temperature=0.0)
        seq = Sequence("r", list(token_ids), sampling, len(token_ids), [], b"", 0.0)
        seq.num_computed_tokens, seq.draft_gain = len(token_ids) - 1, gain
        chunks.append(Chunk(seq, len(token_ids) - 1, 1))
    return Step(chunks, [])


def reserve(
    step: Step,
    drafts: DraftLengths | None = None,
    *,
    budget: int = 100,
    num_blocks: int = 64,
    has_drafter: bool = True,
    costs: StepCosts = COSTS,
) -> list[list[int] | None]:
    pool = BlockPool(num_blocks, BLOCK)
    for chunk in step.chunks:
        chunk.seq.block_table = pool.allocate(-(-chunk.seq.num_tokens // BLOCK))
    reserve_drafts(step, budget, costs, drafts or make_drafts(), pool, 1000, has_drafter=has_drafter)
    for chunk in step.chunks:
        assert len(chunk.seq.block_table) * BLOCK >= chunk.seq.num_tokens + chunk.max_drafts
        assert len(chunk.draft or []) <= chunk.max_drafts
    assert sum(chunk.max_drafts for chunk in step.chunks) <= budget
    return [chunk.draft if chunk.num_matched else None for chunk in step.chunks]


def make_drafts(times: RowTimes | None = TIMES) -> DraftLengths:
    drafts = DraftLengths(3, knows_chances=True)
    drafts.prices.times = times
    return drafts


def test_what_repeats_is_looked_up_and_the_rest_is_left_to_the_drafter() -> None:
    step = make_step(LOOP, NEW)

    assert reserve(step) == [[5, 6, 7], None]
    assert [chunk.max_drafts for chunk in step.chunks] == [3, 3]
    assert step.chunks[0].num_matched == 16
    assert step.chunks[1].draft is None, "the drafter's is still to come"


@pytest.mark.parametrize(("times", "costs"), [(TIMES, COSTS), (None, COSTS), (None, StepCosts())])
def test_it_is_looked_up_whether_or_not_times_are_known(times: RowTimes | None, costs: StepCosts) -> None:
    assert reserve(make_step(LOOP), make_drafts(times), costs=costs) == [[5, 6, 7]]


def test_a_drafter_that_gains_more_is_asked_instead_and_not_where_it_rests() -> None:
    short = [*NEW, 1, 2, 9, *NEW, 3, 1, 2]  # two tokens stood there before: 1.08 tokens are to be expected
    likely, rests = make_drafts(), make_drafts()

    assert reserve(make_step(short, gain=2.0), likely) == [None]
    assert reserve(make_step(short, gain=0.2), likely) != [None]
    assert reserve(make_step(short, gain=2.0), rests, has_drafter=False) != [None]


def test_a_match_that_is_unlikely_to_go_on_costs_no_row() -> None:
    drafts = make_drafts()
    for _ in range(500):
        drafts.record_look_up(2, 1, 1, 0)
    short = [*NEW, 1, 2, 9, *NEW, 3, 1, 2]

    assert reserve(make_step(short, gain=0.0), drafts) == [None]
    assert reserve(make_step(LOOP), drafts) == [[5, 6, 7]], "of longer ones nothing bad is known"
    assert (drafts.num_drafted, drafts.num_accepted) == (500, 0)


def test_beside_many_rows_only_what_is_worth_a_dear_row_is_verified() -> None:
    """The ninth token takes five times what one of eight does: it takes more than one sequence that repeats."""
    few, many = make_step(LOOP, *[NEW] * 7), make_step(*[LOOP] * 4, *[NEW] * 4)

    assert [draft for draft in reserve(few, has_drafter=False) if draft] == []
    assert [draft for draft in reserve(many, has_drafter=False) if draft] == [[5, 6, 7]] * 4


def test_budget_blocks_and_the_end_of_the_answer_bound_it() -> None:
    assert reserve(make_step(LOOP), budget=2) == [[5, 6]]
    assert reserve(make_step(LOOP, num_left=2)) == [[5]]
    assert reserve(make_step(LOOP, num_left=1)) == [None]
    tight = make_step([1, *LOOP[4:]])  # 40 tokens fill five blocks, and there is no other
    assert reserve(tight, num_blocks=5) == [[]]
    assert tight.chunks[0].max_drafts == 0


def test_a_prediction_goes_before_what_is_looked_up() -> None:
    step = make_step(LOOP)
    step.chunks[0].seq.prediction = [1, 2, 3]

    assert reserve(step) == [None]
    assert step.chunks[0].max_drafts == 3


def test_from_four_sequences_on_the_head_is_asked_for_all_or_none_and_predictions_always() -> None:
    drafts = make_drafts()
    drafts.begin(4)
    texts = [list(range(begin, begin + 20)) for begin in range(0, 80, 20)]
    asked = make_step(*texts)
    reserve(asked, drafts)
    for chunk in asked.chunks:
        for _ in range(100):
            drafts.record(chunk.seq, 1, 0, 1)  # computed, verified, and wrong
    left_out, predicted = make_step(*texts), make_step(*texts)
    predicted.chunks[2].seq.prediction = [1, 2, 3]
    reserve(left_out, drafts)
    reserve(predicted, drafts)

    assert all(chunk.max_drafts for chunk in asked.chunks)
    assert [chunk.max_drafts for chunk in left_out.chunks] == [0, 0, 0, 0]
    assert [chunk.max_drafts > 0 for chunk in predicted.chunks] == [False, False, True, False]


def test_others_than_heads_look_nothing_up() -> None:
    for drafts in (DraftLengths(3), DraftLengths(3, knows_chances=True, is_adaptive=False)):
        assert not drafts.looks_up
        assert reserve(make_step(LOOP), drafts) == [None]


def test_its_tokens_count_as_rows_and_not_as_the_drafters() -> None:
    step = make_step(LOOP, NEW)
    reserve(step)
    step.chunks[1].draft, step.chunks[1].num_rounds = [8], 2

    shape = step.shape
    assert (shape.rows, shape.decode_rows, shape.looked_up_rows) == (5, 2, 1)
    assert (shape.draft_tokens, shape.draft_rounds) == (1, 2)


def test_the_trial_of_a_drafter_does_not_count_them() -> None:
    drafts = make_drafts()
    for _ in range(40):
        drafts.begin(1)
        step = make_step(LOOP)
        reserve(step, drafts)
        drafts.record_time(step.shape, COSTS.base_s + 4 * COSTS.row_s, 0.005)
        drafts.record_look_up(16, 3, 3, 3)
    drafts.begin(1)

    assert drafts._size.trial.gain == 1.0
    assert drafts._pending is None


def test_a_sequence_that_was_left_to_a_head_that_is_not_asked_is_looked_up_after_all() -> None:
    drafts = make_drafts()
    drafts.begin(4)
    texts = [LOOP, *(list(range(begin, begin + 20)) for begin in range(200, 260, 20))]
    for chunk in make_step(*texts).chunks * 100:
        drafts.record(chunk.seq, 1, 0, 1)
    step = make_step(*texts, gain=3.0)

    assert [draft for draft in reserve(step, drafts) if draft] == [[5, 6, 7]]


def test_a_head_that_loses_time_beside_look_ups_does_not_look_as_if_it_gained() -> None:
    """Seven of eight rows are looked up, with 21 tokens; the head gains one for the eighth, and a tenth longer a step
    takes."""
    drafts = make_drafts()
    trial = drafts._size_of(8).trial
    gains = []
    for number in range(200):
        drafts.begin(8, COSTS)
        step = make_step(*[LOOP] * 7, NEW)
        is_drafted = number % 4 > 0
        for chunk in step.chunks[:7]:
            chunk.num_matched, chunk.draft = 16, [5, 6, 7]
        if is_drafted:
            step.chunks[7].draft, step.chunks[7].num_rounds = [9], 1
        drafts._plain_s = 0.02
        plain_s = 0.02 - drafts.prices.correction_s(step.shape)
        drafts.record_time(step.shape, plain_s, 0.022 if is_drafted else 0.02)
        for _ in range(7):
            drafts.record_look_up(16, 3, 3, 3)
        if is_drafted:
            drafts.record(step.chunks[7].seq, 1, 1, 1)
        if trial.is_on and trial._num_plain:
            gains.append(trial.gain)

    assert max(gains[5:]) < 1.0
    assert not trial.is_on


def test_what_a_grammar_refuses_counts_as_wrong() -> None:
    drafts = make_drafts()
    before = drafts._chances.list(4, 1)
    for _ in range(50):
        drafts.record_look_up(4, 3, 0, 0)

    assert drafts._chances.list(4, 1) < before
    assert drafts.num_drafted == 0


def test_beside_several_sequences_short_matches_are_not_looked_up() -> None:
    short = [*NEW, 7, 8, 9, 1, 2, *NEW[::-1], 7, 8, 9]  # three tokens stood there before
    for number in (FEW, FEW + 1):
        drafts = make_drafts(RowTimes(COSTS, ((1, 0.0038), (16, 0.0040))))  # rows that cost next to nothing
        found = reserve(make_step(*[short] * number), drafts, num_blocks=400, has_drafter=False)

        assert found == [[1, 2, NEW[-1]] if number == FEW else None] * number
        assert reserve(make_step(*[LOOP] * number), drafts, num_blocks=400) == [[5, 6, 7]] * number


@pytest.mark.parametrize(("prefill_tokens", "expected_s"), [(0, 0.0011), (3, 0.0032 / 7), (100, 0.0003)])
def test_a_row_beside_a_prompt_costs_what_so_many_tokens_do(prefill_tokens: int, expected_s: float) -> None:
    """Measured steps say it; of more tokens than those have, it is what a prompt's token costs."""
    prices = make_drafts().prices
    prices.costs = msgspec.structs.replace(COSTS, prefill_token_s=0.0003)
    shape = make_step(*[NEW] * 8).shape
    if prefill_tokens:
        shape = shape._replace(rows=9, prefill_tokens=prefill_tokens)

    assert prices.verified_s(shape, 1) == pytest.approx(expected_s)


def test_rows_beyond_those_that_were_measured_cost_what_the_last_ones_do() -> None:
    prices = make_drafts().prices
    prices.costs = COSTS

    assert prices.verified_s(make_step(*[NEW] * 30).shape, 4) == pytest.approx(4 * 0.0032 / 7)


def test_large_batches_look_nothing_up() -> None:
    many = make_step(*[LOOP] * (MOST_LOOKED_UP + 1))

    assert reserve(many, num_blocks=400, has_drafter=False) == [None] * (MOST_LOOKED_UP + 1)
