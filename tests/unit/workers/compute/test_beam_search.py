"""Beam searches of a real model through scheduler and runner against transformers' own."""

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.wire.frames import BeamOutput, Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from tests.unit.workers.paged_hash import make_sequence
from tests.unit.workers.tiny_models import BLOCK_SIZE, engine_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB = 96
PROMPTS = [
    torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (5, 8, 13)
]


def ours(source: ModelSource, eos: frozenset[int], params: list[SamplingParams]) -> list[list[BeamOutput]]:
    """A search of each prompt, all at once."""
    config = engine_config(200)
    runner = load_runner(source, config, poison=True)
    pool = BlockPool(runner.num_blocks, BLOCK_SIZE)
    hasher = ChainHasher(bytes(16), BLOCK_SIZE)
    scheduler = Scheduler(pool, hasher, config, runner.max_model_len, eos)
    seqs = [make_sequence(hasher, prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    found = {}
    for seq in seqs:
        assert scheduler.add(seq), seq.error
    while scheduler.has_work:
        step = scheduler.schedule()
        for output in scheduler.commit(step, runner.launch(step)()):
            found[output.seq] = output.beams
        pool.check(scheduler.sequences())
    beams = [found[seq] for seq in seqs]
    assert all(each is not None for each in beams)
    return [each or [] for each in beams]


def theirs(model: PreTrainedModel, prompt: list[int], eos: frozenset[int], params: SamplingParams) -> list[list[int]]:
    ids = torch.tensor([prompt])
    options = transformers.GenerationConfig(
        num_beams=params.num_beams,
        num_return_sequences=params.num_returned,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        do_sample=False,
        eos_token_id=sorted(eos),
        pad_token_id=0,
        early_stopping=False,
    )
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return [_until_end(row[len(prompt) :], eos) for row in found.tolist()]


def _until_end(token_ids: list[int], eos: frozenset[int]) -> list[int]:
    end = next((place for place, token_id in enumerate(token_ids, 1) if token_id in eos), len(token_ids))
    return token_ids[:end]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize(("num_beams", "eos"), [(1, (7,)), (2, (7,)), (4, (7, 11, 30)), (5, (50,))])
def test_answers_are_those_of_transformers(
    model: PreTrainedModel, source: ModelSource, num_beams: int, eos: tuple[int, ...], length_penalty: float
) -> None:
    ends = frozenset(eos)
    params = [
        SamplingParams(12, num_beams=num_beams, num_returned=num_beams, length_penalty=length_penalty) for _ in PROMPTS
    ]
    found = ours(source, ends, params)

    for prompt, beams in zip(PROMPTS, found, strict=True):
        assert [beam.token_ids for beam in beams] == theirs(model, prompt, ends, params[0])
        for beam in beams:
            assert (beam.finish is Finish.STOP) == (beam.token_ids[-1] in ends)


def test_log_probabilities_of_an_answer_are_the_models(model: PreTrainedModel, source: ModelSource) -> None:
    params = SamplingParams(6, num_beams=3, num_returned=2, logprobs=2)
    for prompt, beams in zip(PROMPTS, ours(source, frozenset(), [params] * 3), strict=True):
        assert len(beams) == 2
        for beam in beams:
            with torch.inference_mode():
                rows = model(torch.tensor([[*prompt, *beam.token_ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(1)
            assert beam.logprobs is not None
            own = rows.gather(1, torch.tensor(beam.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor([item.logprob for item in beam.logprobs]), own, atol=1e-4)
            assert [[token_id for token_id, _ in item.top] for item in beam.logprobs] == rows.topk(2).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("by_block", [False, True])
def test_a_copied_block_has_keys_values_and_scales(source: ModelSource, dtype: torch.dtype, by_block: bool) -> None:
    cache = KvCache(read_config(source), 6, BLOCK_SIZE, dtype, by_block=by_block)
    for number, (pair, layout) in enumerate(zip(cache.layers, cache.layouts, strict=True)):
        for part in (*pair, *(layout.scales or ())):
            part[2], part[5] = 3 + number, 7

    cache.copy([(2, 4), (5, 0)])

    for number, (pair, layout) in enumerate(zip(cache.layers, cache.layouts, strict=True)):
        for part in (*pair, *(layout.scales or ())):
            assert part[4].float().unique().tolist() == [3 + number]
            assert part[0].float().unique().tolist() == [7]
            assert not part[1].any()
