"""Log probabilities of prompts: from rows of logits, and of a real model through scheduler and runner."""

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.perf.model import MAX_SCORED_TOKENS
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.wire.frames import (
    Finish,
    PromptLogprobs,
    SamplingParams,
    join_prompt_logprobs,
    unpack_floats,
    unpack_token_ids,
)
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import NO_SCORES
from penstock.workers.compute.scoring import PIECE, find_scored, give_scores, score_rows
from penstock.workers.config import SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.paged_hash import make_sequence
from tests.unit.workers.tiny_models import BLOCK_SIZE, engine_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB = 96


def prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequence(length: int, num_top: int | None, max_tokens: int = 2, seed: int = 3) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=num_top)
    return make_sequence(ChainHasher(bytes(16), BLOCK_SIZE), prompt(length, seed), sampling)


def run(source: ModelSource, *seqs: Sequence, method: str = "none", blocks: int = 200) -> None:
    """The sequences through scheduler and runner, to their ends."""
    config = msgspec.structs.replace(
        engine_config(blocks), max_batched_tokens=150, speculation=SpeculationConfig(method=method, max_draft_tokens=3)
    )
    runner = load_runner(source, config, poison=True)
    pool = BlockPool(runner.num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(pool, ChainHasher(bytes(16), BLOCK_SIZE), config, runner.max_model_len, frozenset())
    for seq in seqs:
        assert scheduler.add(seq)
    while scheduler.has_work:
        step = scheduler.schedule()
        assert sum(len(chunk.scored) for chunk in step.chunks) <= MAX_SCORED_TOKENS
        scheduler.commit(step, runner.launch(step)())
        pool.check(scheduler.sequences())
    assert {seq.finish for seq in seqs} == {Finish.LENGTH}


def theirs(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """float32 [tokens - 1, vocabulary]: log probabilities before each token but the first."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(dim=1)


def scores_of(seq: Sequence) -> PromptLogprobs:
    joined = join_prompt_logprobs(seq.prompt_logprobs)
    assert joined is not None
    return joined


TIE = 2e-4
"""Log probabilities closer than this may be ordered either way: sums are rounded in another order on another CPU."""


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_prompts_log_probabilities_are_those_of_transformers(
    model: PreTrainedModel, source: ModelSource, method: str
) -> None:
    seqs = [sequence(230, 3), sequence(40, 0, max_tokens=0, seed=4), sequence(20, None, seed=5)]
    run(source, *seqs, method=method)

    for seq in seqs[:2]:
        reference = theirs(model, seq.token_ids[: seq.num_prompt_tokens])
        own = reference.gather(1, torch.tensor(seq.token_ids[1 : seq.num_prompt_tokens])[:, None])[:, 0]
        found = scores_of(seq)
        assert torch.allclose(torch.tensor(unpack_floats(found.logprobs)), own, atol=1e-4)
        ranks = torch.tensor(unpack_token_ids(found.ranks))
        lowest = 1 + (reference > own[:, None] + TIE).sum(dim=1)
        highest = (reference > own[:, None] - TIE).sum(dim=1)  # the token itself among them
        assert bool(((lowest <= ranks) & (ranks <= highest)).all())
        assert (lowest == highest).float().mean() > 0.8, "few are ties"
        best = reference.topk(seq.sampling.prompt_logprobs or 0)
        shape = best.values.shape
        assert torch.allclose(torch.tensor(unpack_floats(found.top_logprobs)).view(shape), best.values, atol=1e-4)
        top_ids = torch.tensor(unpack_token_ids(found.top_ids)).view(shape)
        assert torch.allclose(reference.gather(1, top_ids), best.values, atol=TIE)
    assert seqs[2].prompt_logprobs == []


def test_what_is_scored_changes_no_answer(source: ModelSource) -> None:
    plain, scored = sequence(33, None, max_tokens=8), sequence(33, 2, max_tokens=8)
    run(source, plain)
    run(source, sequence(60, 1, seed=9), scored)

    assert scored.token_ids == plain.token_ids


def test_a_prompt_whose_scores_are_no_numbers_ends_alone(source: ModelSource) -> None:
    runner = load_runner(source, engine_config(), poison=True)
    bad, good = sequence(8, 0), sequence(8, 0, seed=4)
    bad.block_table, good.block_table = [0, 1], [2, 3]
    chunks = [Chunk(bad, 4, 3), Chunk(good, 0, 8)]  # what the first one reads was never written

    failed, fine = runner.launch(Step(chunks, []))()

    assert [choice.error for choice in failed] == [NO_SCORES]
    assert chunks[0].prompt_logprobs is None
    assert fine[0].error is None
    assert chunks[1].prompt_logprobs is not None


def test_the_rows_of_a_step_are_those_before_the_tokens_that_are_scored() -> None:
    first, second, plain = sequence(9, 2), sequence(7, 5, seed=4), sequence(5, None)
    chunks = [Chunk(plain, 0, 5), Chunk(first, 3, 6), Chunk(second, 0, 4)]
    scored = find_scored(chunks, torch.tensor([0, 5, 11, 15]))

    assert scored is not None
    assert scored.rows.tolist() == [5, 6, 7, 8, 9, 11, 12, 13, 14]
    assert scored.token_ids.tolist() == [*first.token_ids[4:9], *second.token_ids[1:5]]
    assert scored.num_top == 5
    assert find_scored(chunks[:1], torch.tensor([0, 5])) is None


def test_scores_are_given_to_their_chunks_with_as_many_alternatives_as_each_wants() -> None:
    first, second = sequence(9, 0), sequence(7, 2, seed=4)
    chunks = [Chunk(first, 0, 3), Chunk(second, 0, 2)]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    scored = find_scored(chunks, torch.tensor([0, 3, 5]))
    assert scored is not None

    assert give_scores(chunks, score_rows(logits, scored.token_ids, scored.num_top)()) == []
    assert chunks[0].prompt_logprobs is not None
    assert chunks[1].prompt_logprobs is not None
    assert [(part.num_top, part.num_tokens) for part in (chunks[0].prompt_logprobs, chunks[1].prompt_logprobs)] == [
        (0, 3),
        (2, 2),
    ]
    assert unpack_token_ids(chunks[1].prompt_logprobs.top_ids) == logits[3:].topk(2).indices.flatten().tolist()


@pytest.mark.parametrize("num_top", [0, 1, 4])
def test_of_equal_scores_the_lower_id_is_the_likelier(num_top: int) -> None:
    logits = torch.zeros(3 * PIECE, 7)
    logits[:, 5] = 2.0
    logits[:, 2] = 2.0
    scores = score_rows(logits, torch.full((3 * PIECE,), 5), num_top)()

    assert set(scores.ranks.tolist()) == {1}
    assert scores.top_ids.shape == (3 * PIECE, num_top)
    assert scores.top_ids[:, :2].tolist() == [[2, 5][:num_top]] * (3 * PIECE)
    assert scores.logprobs[0].item() == pytest.approx(torch.log_softmax(logits[0], 0)[5].item())
