import pytest

from penstock.wire.frames import SamplingParams
from penstock.workers.engine.sequence import Chunk, Sequence, Step, StepShape


def sequence(length: int) -> Sequence:
    return Sequence("r", [0] * length, SamplingParams(max_tokens=9, top_p=0.9), length, [], b"", 0.0)


def test_a_chunk_samples_when_it_reaches_the_last_known_token() -> None:
    seq = sequence(10)

    assert not Chunk(seq, 0, 9).is_sampled
    assert Chunk(seq, 4, 6).is_sampled


def test_the_shape_of_a_step_counts_context_for_every_prompt_token_and_every_decoding_row() -> None:
    step = Step([Chunk(sequence(10), 9, 1), Chunk(sequence(5), 4, 1), Chunk(sequence(9), 2, 3)], [])

    assert step.shape == StepShape(
        rows=3, decode_rows=2, prefill_tokens=3, query_context=3 + 4 + 5, kv_tokens=10 + 5, sampled_rows=2
    )
    assert step.num_tokens == 5


def test_the_shape_of_a_step_tells_its_shortest_prompt_that_comes_to_its_end() -> None:
    piece, ending, last = Chunk(sequence(9), 2, 3), Chunk(sequence(8), 2, 6), Chunk(sequence(12), 3, 9)
    scored = Chunk(sequence(4), 0, 4)
    scored.seq.sampling = SamplingParams(max_tokens=9, prompt_logprobs=1)

    assert Step([piece, Chunk(sequence(10), 9, 1)], []).shape.shortest_prompt == 0
    assert Step([piece, last, ending], []).shape.shortest_prompt == 8
    assert Step([scored, last], []).shape.shortest_prompt == 12, "one with many rows of logits is no short one"


def test_places_for_drafts_are_taken_of_the_budget_and_drafts_count_in_the_shape() -> None:
    chunk = Chunk(sequence(10), 9, 1, max_drafts=4)
    step = Step([chunk, Chunk(sequence(9), 2, 3)], [])

    assert (step.num_tokens, step.shape.draft_tokens) == (8, 0)
    chunk.draft = [1, 2]
    assert step.shape == StepShape(
        rows=2,
        decode_rows=1,
        prefill_tokens=3,
        query_context=3 + 4 + 5,
        kv_tokens=10,
        draft_tokens=2,
        draft_rounds=2,
        sampled_rows=3,
    )


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"min_tokens": 5}, 0),
        ({"top_p": 0.5}, 0),
        ({"temperature": 0.1}, 0),
        ({"temperature": 0.1, "top_p": 0.5}, 1),
        ({"temperature": 0.1, "top_k": 5}, 1),
        ({"temperature": 0.1, "min_p": 0.2}, 1),
        ({"logprobs": 0, "logprobs_tokens": 1}, 0),
        ({"logprobs": 0}, 1),
        ({"logit_bias": ((3, 1.0),)}, 1),
        ({"repetition_penalty": 1.1}, 1),
        ({"frequency_penalty": 0.1}, 1),
        ({"presence_penalty": -0.1}, 1),
    ],
)
def test_rows_that_take_more_than_the_largest_logit_are_counted(changes: dict[str, object], count: int) -> None:
    params = SamplingParams(**({"max_tokens": 9, "temperature": 0.0} | changes))  # type: ignore[arg-type]
    seq = Sequence("r", [0] * 5, params, 5, [], b"", 0.0)

    assert Step([Chunk(seq, 4, 1)], []).shape.sampled_rows == count
    assert Step([Chunk(seq, 0, 3)], []).shape.sampled_rows == 0
