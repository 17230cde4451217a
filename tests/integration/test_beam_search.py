"""Beam search of the demo model in float32 against transformers', prompt by prompt."""

import queue
import time

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from bench.parity import chat_prompts
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.frames import BeamOutput, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Sequence
from tests.integration.sizes import full

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_threads")]

NUM_BEAMS = 4
NEW_TOKENS = 16
TIMEOUT_S = 300.0
NEAR_TIE = 1e-3
"""Scores of whole answers that are closer are the same, but for the order in which numbers are added."""
SUBJECTS = ("rivers", "the moon", "bread", "iron", "whales", "chess", "rain", "glass", "bees", "salt")
TEXTS = [f"{verb} {subject}." for subject in SUBJECTS for verb in ("Describe", "Write a short story about")]


def ours(source: ModelSource, prompts: list[list[int]], eos: frozenset[int]) -> list[list[BeamOutput]]:
    """All searches at once, in one engine."""
    config = EngineConfig(dtype="float32", max_num_seqs=16, max_batched_tokens=128, threads=1)
    hasher = ChainHasher(bytes(32), config.block_size)
    finished: queue.SimpleQueue[tuple[str, list[BeamOutput] | None]] = queue.SimpleQueue()

    def collect(report: StepReport) -> None:
        for output in report.outputs:
            if output.finish is not None:
                finished.put((output.seq.request_id, output.beams))

    runner = load_runner(source, config)
    runner.eos_token_ids = eos
    engine = Engine(runner, config, hasher, collect)
    engine.start()
    try:
        for number, prompt in enumerate(prompts):
            keys = hasher.extend(hasher.root("beams"), prompt)
            params = SamplingParams(NEW_TOKENS, num_beams=NUM_BEAMS, num_returned=NUM_BEAMS)
            root = keys[-1] if keys else hasher.root("beams")
            engine.submit(Sequence(str(number), list(prompt), params, len(prompt), keys, root, time.monotonic()))
        found = dict(finished.get(timeout=TIMEOUT_S) for _ in prompts)
    finally:
        engine.stop()
    return [found[str(number)] or [] for number in range(len(prompts))]


def theirs(model: PreTrainedModel, prompt: list[int], eos: frozenset[int]) -> tuple[list[list[int]], list[float]]:
    ids = torch.tensor([prompt])
    options = transformers.GenerationConfig(
        num_beams=NUM_BEAMS,
        num_return_sequences=NUM_BEAMS,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=sorted(eos),
        pad_token_id=0,
        early_stopping=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return [_until_end(row[len(prompt) :], eos) for row in found.sequences.tolist()], found.sequences_scores.tolist()


def _until_end(token_ids: list[int], eos: frozenset[int]) -> list[int]:
    end = next((place for place, token_id in enumerate(token_ids, 1) if token_id in eos), len(token_ids))
    return token_ids[:end]


@pytest.mark.timeout(900)
def test_searches_find_what_transformers_finds(source: ModelSource, oracle: PreTrainedModel) -> None:
    assert len(TEXTS) == 20
    prompts = chat_prompts(source, TEXTS[: full(20, 8)])
    [comma] = load_tokenizer(source).encode(",", add_special=False)
    ends = frozenset({2, comma})  # some answers end early
    num_exact = 0
    for prompt, beams in zip(prompts, ours(source, prompts, ends), strict=True):
        wanted, scores = theirs(oracle, prompt, ends)
        found = [beam.token_ids for beam in beams]
        num_exact += found == wanted
        for place, answer in enumerate(found):
            assert answer in wanted
            assert abs(scores[wanted.index(answer)] - scores[place]) < NEAR_TIE
    assert num_exact >= len(prompts) - 1
