import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import SamplingParams
from penstock.workers.engine.isolation import ROW_FAILED, can_compute, run_apart
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence, Step


def make_step(num_rows: int) -> Step:
    sampling = SamplingParams(max_tokens=1)
    sequences = [Sequence("r", [row], sampling, 1, [], b"", 0.0) for row in range(num_rows)]
    return Step([Chunk(seq, 0, 1, max_drafts=2, draft=[7]) for seq in sequences], [])


class Rows:
    """Computes rows of one token each; a step with one of the `bad` ones fails."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.steps: list[Step] = []

    def run(self, step: Step) -> list[list[Sampled]] | None:
        self.steps.append(step)
        tokens = [chunk.seq.token_ids[0] for chunk in step.chunks]
        return None if self.bad & set(tokens) else [[Sampled(token + 100)] for token in tokens]


@given(num_rows=st.integers(1, 64), bad=st.sets(st.integers(0, 63), max_size=5))
def test_exactly_the_bad_rows_get_an_error_and_the_others_their_own_choice(num_rows: int, bad: set[int]) -> None:
    rows = Rows(bad)
    step = make_step(num_rows)
    chosen = run_apart(step, rows.run)

    assert [choices[0].error for choices in chosen] == [ROW_FAILED if row in bad else None for row in range(num_rows)]
    assert all(choices[0].token_id == row + 100 for row, choices in enumerate(chosen) if row not in bad)
    num_bad = len(bad & set(range(num_rows)))
    assert len(rows.steps) <= max(2, 2 * num_bad * max(1, math.ceil(math.log2(num_rows))))


def test_the_parts_have_no_drafts_and_the_step_forgets_its_own() -> None:
    rows = Rows(set())
    step = make_step(3)
    step.chunks[1].draft, step.chunks[1].num_matched = [7, 8], 5
    run_apart(step, rows.run)

    assert step.chunks[1].num_matched == 0, "else it would count as looked up and wrong"
    assert not any(chunk.is_observed for part in rows.steps for chunk in part.chunks), "the drafter is out of it"
    assert all(chunk.max_drafts == 0 and chunk.draft is None for part in rows.steps for chunk in part.chunks)
    assert all(chunk.max_drafts == 2 and chunk.draft is None for chunk in step.chunks)  # its places are given back


def test_the_check_computes_one_token_in_the_block_that_it_is_given() -> None:
    forgotten: list[Sequence] = []
    rows = Rows(set())

    assert can_compute(5, rows.run, forgotten.append)
    assert not can_compute(5, Rows({0}).run, forgotten.append)
    (check,) = rows.steps[0].chunks
    assert (check.seq.block_table, check.start, check.num_tokens) == ([5], 0, 1)
    assert forgotten[0] is check.seq
