import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.model import step_time_s
from penstock.wire.frames import SamplingParams, Stairs, StepCosts
from penstock.workers.engine.draft_lengths import RETRY_EVERY, DraftLengths
from penstock.workers.engine.draft_proposals import Proposal, choose_proposals
from penstock.workers.engine.sequence import Chunk, Sequence, StepShape

COSTS = StepCosts(base_s=0.010, row_s=0.001, draft_token_s=0.001)


def chunks(*acceptances: float | None) -> list[Chunk]:
    found = []
    for acceptance in acceptances:
        seq = Sequence("r", [1, 2], SamplingParams(max_tokens=100), 2, [], b"", 0.0, num_computed_tokens=1)
        seq.acceptance = acceptance
        found.append(Chunk(seq, 1, 1))
    return found


def shape(rows: int) -> StepShape:
    return StepShape(rows, rows, 0, 0.0, 10 * rows)


def choose(
    lengths: DraftLengths, rows: list[Chunk], cap: int = 4, costs: StepCosts = COSTS, budget: int = 100
) -> list[int]:
    return lengths.choose(rows, [cap] * len(rows), shape(len(rows)), costs, budget)


def test_a_likely_draft_is_long_and_an_unlikely_one_is_not_made() -> None:
    assert choose(DraftLengths(4), chunks(0.95, 0.6, 0.02)) == [4, 1, 0]


def test_unknown_costs_draft_everything_that_is_allowed() -> None:
    lengths = DraftLengths(4)
    assert lengths.choose(chunks(0.9, 0.1, 0.5), [4, 3, 0], shape(3), StepCosts(), 100) == [4, 3, 0]


def test_the_budget_goes_to_the_likeliest_tokens() -> None:
    assert choose(DraftLengths(4), chunks(0.9, 0.5), costs=StepCosts(), budget=3) == [3, 0]
    assert choose(DraftLengths(4), chunks(0.9, 0.5), costs=StepCosts(), budget=0) == [0, 0]


def test_below_the_knee_a_draft_is_free() -> None:
    costs = StepCosts(base_s=0.001, draft_token_s=0.01, knee_s=0.05)
    assert choose(DraftLengths(4), chunks(0.1), costs=costs) == [4]


def test_drafts_that_cost_as_much_as_steps_are_not_made() -> None:
    assert choose(DraftLengths(4), chunks(0.7), costs=StepCosts(base_s=0.01, draft_token_s=0.01)) == [0]


def test_a_draft_that_pays_for_few_sequences_is_not_made_for_many() -> None:
    """Where the step's fixed part is shared by many, another token costs as much as a sequence's own."""
    costs = StepCosts(base_s=0.010, row_s=0.0005, draft_token_s=0.001)
    found = [
        sum(choose(DraftLengths(4), chunks(*[0.6] * rows), costs=costs, budget=1000)) / rows for rows in (1, 4, 16, 64)
    ]

    assert found[0] >= 2
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0


def test_acceptance_is_learned_from_verified_tokens_only() -> None:
    lengths, (chunk, other) = DraftLengths(4), chunks(None, None)
    for _ in range(100):
        lengths.record(chunk.seq, 4, 0)

    assert chunk.seq.acceptance is not None
    assert chunk.seq.acceptance < 0.01
    assert (lengths.num_drafted, lengths.num_accepted) == (400, 0)
    assert choose(lengths, [other], costs=StepCosts(base_s=0.01, draft_token_s=0.003)) == [
        0
    ]  # a new sequence starts from what is known of all
    for _ in range(100):
        lengths.record(chunk.seq, 4, 4)
    assert chunk.seq.acceptance > 0.99
    before = chunk.seq.acceptance
    lengths.record(chunk.seq, 0, 0)
    assert chunk.seq.acceptance == before


def test_where_nothing_pays_one_token_is_drafted_now_and_then() -> None:
    lengths, rows = DraftLengths(4), chunks(0.01, 0.02)
    for _ in range(500):
        lengths.record(rows[0].seq, 4, 0)
    counts = [choose(lengths, rows) for _ in range(3 * RETRY_EVERY + 3)]

    assert [place for place, count in enumerate(counts) if sum(count)] == [
        RETRY_EVERY,
        2 * RETRY_EVERY + 1,
        3 * RETRY_EVERY + 2,
    ]
    assert max(map(sum, counts)) == 1


def test_a_sequence_that_drafted_badly_is_tried_again_where_others_draft_well() -> None:
    lengths, rows = DraftLengths(4), chunks(0.95, 0.05)
    for _ in range(20):
        lengths.record(rows[0].seq, 4, 4)
    counts = [choose(lengths, rows) for _ in range(100)]

    assert counts[0][1] == 0
    assert counts[-1][1] > 0


def test_a_draft_for_which_a_recorded_step_is_given_up_pays_where_that_costs_less() -> None:
    def costs(eager_knee_s: float, recorded_tokens: int = 0) -> StepCosts:
        return StepCosts(base_s=0.003, stairs=Stairs(8, recorded_tokens, eager_knee_s))

    assert choose(DraftLengths(4), chunks(0.9), costs=costs(0.009)) == [4], "4.1 tokens in three times the time"
    assert choose(DraftLengths(4), chunks(0.7), costs=costs(0.009)) == [0], "2.8 tokens"
    assert choose(DraftLengths(4), chunks(0.7), costs=costs(0.009, recorded_tokens=8)) == [4]


def test_lengths_that_do_not_adapt_are_as_long_as_allowed() -> None:
    lengths = DraftLengths(4, is_adaptive=False)

    assert lengths.choose(chunks(0.01, 0.0, None), [4, 1, 3], shape(3), COSTS, 100) == [4, 1, 3]
    assert sum(lengths.choose(chunks(0.01, 0.0), [4, 4], shape(2), COSTS, 5)) == 5


@given(
    acceptances=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    base_s=st.floats(0.001, 0.1),
    draft_token_s=st.floats(0, 0.05),
    draft_round_s=st.sampled_from([0.0, 0.001, 0.01, 0.05]),
    knee_s=st.floats(0, 0.1),
    stairs=st.none()
    | st.builds(
        Stairs,
        st.integers(0, 5),
        st.integers(0, 8),
        st.floats(0, 0.1),
        st.lists(st.tuples(st.integers(1, 10), st.floats(0, 0.05)), max_size=3).map(tuple),
    ),
)
def test_no_other_lengths_give_a_better_goodput(
    acceptances: list[float],
    base_s: float,
    draft_token_s: float,
    draft_round_s: float,
    knee_s: float,
    stairs: Stairs | None,
) -> None:
    costs = StepCosts(
        base_s=base_s, draft_token_s=draft_token_s, draft_round_s=draft_round_s, knee_s=knee_s, stairs=stairs
    )
    rows = chunks(*acceptances)

    def goodput(counts: Iterable[int]) -> float:
        counts = list(counts)
        tokens = sum(
            sum(min(0.98, a) ** place for place in range(count + 1))
            for a, count in zip(acceptances, counts, strict=True)
        )
        seconds = step_time_s(
            costs,
            rows=len(rows),
            prefill_tokens=0,
            query_context=0,
            kv_tokens=0,
            draft_tokens=sum(counts),
            draft_rounds=max(counts, default=0),
        )
        return tokens / seconds

    chosen = goodput(DraftLengths(3).choose(rows, [3] * len(rows), shape(len(rows)), costs, 100))
    assert chosen >= max(map(goodput, itertools.product(range(4), repeat=len(rows)))) * (1 - 1e-9)


def test_a_drafter_whose_passes_cost_as_much_as_steps_is_for_many_sequences_or_none() -> None:
    """A draft model reads its weights once a pass, for one sequence as for twenty."""
    costs = StepCosts(base_s=0.010, row_s=0.001, draft_token_s=0.0005, draft_round_s=0.009)

    assert choose(DraftLengths(4), chunks(0.8), costs=costs) == [0]
    assert choose(DraftLengths(4), chunks(*[0.8] * 20), costs=costs, budget=1000) == [1] * 20


def test_drafts_of_a_row_that_costs_much_to_choose_from_do_not_pay() -> None:
    costs = StepCosts(base_s=0.010, row_s=0.001, draft_token_s=0.0005, sampled_row_s=0.020)
    greedy, sampled = Proposal(-0.7, 0, 1), Proposal(-0.7, 1, 1, needs_sampling=True)

    assert choose_proposals([greedy, sampled], 8, shape(2), costs) == [greedy]


def test_the_best_guesses_are_more_of_equals() -> None:
    guesses = [Proposal(-0.5, 0, 1), Proposal(-0.5, 1, 1)]

    assert choose_proposals(guesses, 8, shape(1), StepCosts()) == guesses
    assert choose_proposals([], 8, shape(1), COSTS) == []
