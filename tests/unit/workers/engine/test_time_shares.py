"""How a step's time is divided among its sequences, and what the accounts say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.model import step_time_s
from penstock.wire.frames import Finish, SamplingParams, Stairs, StepCosts, TimeAccounts
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from penstock.workers.engine.time_shares import Rest, TimeShares, divide

COSTS = StepCosts(
    base_s=0.008,
    row_s=1e-4,
    prefill_token_s=5e-5,
    attention_s=1e-8,
    kv_token_s=1e-7,
    draft_token_s=2e-4,
    draft_round_s=1e-3,
    sampled_row_s=3e-5,
)


def make_sequence(num_tokens: int = 100, top_p: float = 1.0, prompt_logprobs: int | None = None) -> Sequence:
    sampling = SamplingParams(max_tokens=10, top_p=top_p, prompt_logprobs=prompt_logprobs)
    return Sequence("r", [1] * num_tokens, sampling, num_tokens, [], b"", 0.0)


def decode(context: int = 100, draft: int = 0, top_p: float = 1.0) -> Chunk:
    return Chunk(make_sequence(context, top_p), context - 1, 1, draft=[1] * draft or None)


def prefill(start: int, count: int) -> Chunk:
    return Chunk(make_sequence(start + count), start, count)


def test_a_draft_that_was_looked_up_pays_its_rows_and_no_drafter() -> None:
    plain, looked_up = decode(100), decode(100, draft=3)
    looked_up.num_matched = 5

    assert divide(Step([plain, looked_up], []), COSTS, 0.0085)

    assert looked_up.seq.step_s - plain.seq.step_s == pytest.approx(3 * COSTS.row_s, rel=0.05)


def test_equal_rows_pay_the_same_and_a_longer_context_more() -> None:
    same, other, longer = decode(100), decode(100), decode(5000)

    assert divide(Step([same, other, longer], []), COSTS, 0.01)

    assert same.seq.step_s == other.seq.step_s < longer.seq.step_s
    assert longer.seq.step_s - same.seq.step_s == pytest.approx(4900 * COSTS.kv_token_s * 0.01 / 0.00882, rel=0.01)


def test_where_a_step_takes_what_the_model_says_each_row_pays_its_coefficients_and_an_equal_part_of_the_base() -> None:
    prompt, row = prefill(0, 64), decode(100)
    step = Step([prompt, row], [])
    shape = step.shape
    seconds = step_time_s(
        COSTS,
        rows=2,
        prefill_tokens=shape.prefill_tokens,
        query_context=shape.query_context,
        kv_tokens=shape.kv_tokens,
    )

    assert divide(step, COSTS, seconds)

    assert row.seq.step_s == pytest.approx(COSTS.base_s / 2 + COSTS.row_s + 100 * COSTS.kv_token_s)
    assert prompt.seq.step_s == pytest.approx(
        COSTS.base_s / 2 + COSTS.row_s + 64 * COSTS.prefill_token_s + 64 * 32.5 * COSTS.attention_s
    )


def test_a_floor_is_shared_evenly_like_the_base() -> None:
    costs = StepCosts(base_s=0.001, row_s=0.001, prefill_token_s=0.001, knee_s=0.1)
    prompt, row = prefill(0, 10), decode()

    assert divide(Step([prompt, row], []), costs, 0.1)

    assert prompt.seq.step_s - row.seq.step_s == pytest.approx(0.01)
    assert prompt.seq.step_s + row.seq.step_s == pytest.approx(0.1)


def test_drafts_are_paid_by_those_that_draft() -> None:
    plain, short, long = decode(), decode(draft=1), decode(draft=3)
    step = Step([plain, short, long], [])
    seconds = step_time_s(
        COSTS, rows=3, prefill_tokens=0, query_context=0, kv_tokens=300, draft_tokens=4, draft_rounds=3
    )

    assert divide(step, COSTS, seconds)

    assert short.seq.step_s - plain.seq.step_s == pytest.approx(COSTS.draft_token_s + 3 * COSTS.draft_round_s / 4)
    assert long.seq.step_s - plain.seq.step_s == pytest.approx(3 * (COSTS.draft_token_s + 3 * COSTS.draft_round_s / 4))


def test_a_prompt_whose_log_probabilities_are_wanted_pays_their_rows() -> None:
    scored = Chunk(make_sequence(50, prompt_logprobs=0), 0, 50)
    plain = prefill(0, 50)
    step = Step([scored, plain], [])
    shape = step.shape
    seconds = step_time_s(
        COSTS,
        rows=shape.rows,
        prefill_tokens=100,
        query_context=shape.query_context,
        kv_tokens=0,
        sampled_rows=shape.sampled_rows,
    )

    assert divide(step, COSTS, seconds)

    assert scored.seq.step_s - plain.seq.step_s == pytest.approx(49 * (COSTS.row_s + COSTS.sampled_row_s))


def test_a_search_pays_for_all_its_beams() -> None:
    leader, other = make_sequence(), decode()
    beams = [leader.make_beam([1] * 100, 99, []) for _ in range(3)]
    step = Step([*[Chunk(beam, 99, 1) for beam in beams], other], [])

    assert divide(step, StepCosts(base_s=0.01), 0.04)

    assert leader.step_s == pytest.approx(0.03)
    assert other.seq.step_s == pytest.approx(0.01)
    assert not any(beam.step_s for beam in beams)


def test_a_row_for_nothing_is_paid_by_the_others_of_its_step() -> None:
    ended, going = decode(), decode()
    ended.seq.finish = Finish.STOP

    assert divide(Step([ended, going], []), COSTS, 0.01)

    assert (ended.seq.step_s, going.seq.step_s) == (0.0, pytest.approx(0.01))


def test_a_step_of_nothing_but_such_rows_has_failed() -> None:
    ended = decode()
    ended.seq.finish = Finish.ABORT
    time = TimeShares(10.0)

    time.end_step(Step([ended], []), COSTS, 10.5)

    assert time.accounts(11.0) == TimeAccounts(failed_s=0.5)


def test_a_model_that_knows_nothing_divides_evenly() -> None:
    one, other = decode(10), prefill(0, 90)

    assert divide(Step([one, other], []), StepCosts(), 0.5)

    assert one.seq.step_s == other.seq.step_s == 0.25


recorded = st.none() | st.builds(
    Stairs, st.integers(1, 8), st.integers(0, 64), st.floats(0, 0.02), st.just(((4, 1e-3),))
)
coefficients = st.builds(
    StepCosts,
    *[st.floats(0, 0.01, allow_subnormal=False) for _ in range(9)],
    stairs=recorded,
)
chunks = st.one_of(
    st.builds(decode, st.integers(1, 500), st.integers(0, 4), st.sampled_from([0.0, 1.0])),
    st.builds(prefill, st.integers(0, 200), st.integers(2, 100)),
)


@given(coefficients, st.lists(chunks, min_size=1, max_size=8), st.floats(1e-4, 10.0))
def test_shares_are_never_negative_and_make_up_the_step(costs: StepCosts, parts: list[Chunk], seconds: float) -> None:
    assert divide(Step(parts, []), costs, seconds)

    shares = [chunk.seq.step_s for chunk in parts]
    assert sum(shares) == pytest.approx(seconds)
    assert min(shares) >= 0


def test_each_second_is_in_one_account() -> None:
    row = decode()
    step = Step([row], [])
    time = TimeShares(100.0)
    time.start(103.0)
    time.rest()

    assert time.accounts(104.0) == TimeAccounts(start_s=3.0, idle_s=1.0)

    time.wake(105.0)
    time.end_step(step, COSTS, 105.5)
    assert time.accounts(106.0) == TimeAccounts(start_s=3.0, steps_s=0.5, idle_s=2.0), "a step may be under way"
    time.fail(107.0)
    time.rest_as(Rest.DRAIN)
    time.rest()

    assert time.accounts(110.0) == TimeAccounts(3.0, 0.5, 2.0, 3.0, 1.5)
    assert row.seq.step_s == 0.5


def test_time_after_the_engine_is_broken_has_failed_also_while_it_drains() -> None:
    time = TimeShares(0.0)
    time.rest_as(Rest.FAILED)
    time.rest_as(Rest.DRAIN)
    time.rest()

    assert time.accounts(5.0) == TimeAccounts(failed_s=5.0)
