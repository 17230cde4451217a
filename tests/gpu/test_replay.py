"""Decode steps from recordings against the same steps as they come. On a GPU the recordings are CUDA graphs."""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import Batch, build_batch
from penstock.workers.compute.models.replay import Replay
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.step_model import GpuStepModel, HostStepModel
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.gpu.cases import DEVICE
from tests.gpu.test_model import BLOCK_SIZE, CONFIG, Harness

RECORDED = (1, 2, 4)
CONTEXTS = (19, 9)
TOLERANCE = 1e-4


class Pair:
    """The same model and sequences twice: one replays its decode steps."""

    def __init__(self, recorded: Seq[int] = RECORDED, *, is_quantized: bool = False) -> None:
        self.eager, self.replaying = (
            Harness(torch.float32, DEVICE, is_planned=True, is_quantized=is_quantized) for _ in range(2)
        )
        for harness in (self.eager, self.replaying):
            harness.step(*CONTEXTS)
        self.replay = Replay(self.replaying.model, self.replaying.cache, recorded, max_context=100)

    def batch(self, *indices: int) -> Batch:
        """One more token of some sequences."""
        seqs = [self.replaying.seqs[index] for index in indices]
        chunks = [Chunk(seq, seq.num_computed_tokens, 1) for seq in seqs]
        batch = build_batch(Step(chunks, []), BLOCK_SIZE)
        for seq in seqs:
            seq.num_computed_tokens += 1
        rows = torch.arange(len(seqs))
        return Batch(batch.token_ids, batch.positions, batch.attention, rows, list(range(len(seqs))))

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        layers = zip(self.eager.cache.layers, self.replaying.cache.layers, strict=True)
        return [
            (ours.nan_to_num(9.0), theirs.nan_to_num(9.0))
            for one, other in layers
            for ours, theirs in zip(one, other, strict=True)
        ]


@pytest.mark.parametrize(("is_quantized", "recorded"), [(False, [4]), (True, [1, 2])])
def test_replayed_steps_have_the_logits_and_write_the_cache_of_steps_as_they_come(
    is_quantized: bool, recorded: list[int]
) -> None:
    """Filled up to four rows, and not at all."""
    pair = Pair(recorded, is_quantized=is_quantized)

    with torch.inference_mode():
        for counts, indices in (((1, 1), (0, 1)), ((0, 1), (1,))):
            expected = pair.eager.step(*counts)
            torch.testing.assert_close(
                pair.replay.logits(pair.batch(*indices)), expected, atol=TOLERANCE, rtol=TOLERANCE
            )

    for ours, theirs in pair.caches():
        torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_best_token_of_each_row_is_all_that_is_fetched() -> None:
    pair = Pair()
    expected = pair.eager.step(1, 1)

    with torch.inference_mode():
        ids, scores = pair.replay.greedy_tokens(pair.batch(0, 1))

    assert ids.tolist() == expected.argmax(dim=1).tolist()
    torch.testing.assert_close(scores.float(), expected.amax(dim=1), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_step_that_is_no_decode_step_is_not_covered() -> None:
    pair = Pair()
    seqs = pair.replaying.seqs

    decode = pair.batch(0, 1)
    prompt = build_batch(Step([Chunk(seqs[0], 0, 20)], []), BLOCK_SIZE)
    draft = build_batch(Step([Chunk(seqs[0], seqs[0].num_tokens - 1, 1, 2, [1, 2])], []), BLOCK_SIZE)

    assert pair.replay.covers(decode)
    assert not pair.replay.covers(prompt)
    assert not pair.replay.covers(draft)


def test_a_runner_replays_what_is_covered_and_computes_the_rest() -> None:
    """A prompt and its first tokens, greedily, then drawn."""
    harness = Harness(torch.float32, DEVICE, is_planned=True)
    recorded = CountedReplay(harness.model, harness.cache, RECORDED, max_context=100)
    chosen = []
    for own in (recorded, None):
        steps = HostStepModel(harness.model, harness.cache) if own is None else GpuStepModel(own)
        runner = TorchRunner(steps, Sampler(CONFIG.vocab_size), 100)
        chosen.append([tokens(runner, sampling) for sampling in (GREEDY, DRAWN)])

    assert chosen[0] == chosen[1]
    assert recorded.num_steps == 2 * 3


class CountedReplay(Replay):
    num_steps = 0

    def _run(self, batch: Batch) -> Any:
        self.num_steps += 1
        return super()._run(batch)


GREEDY, DRAWN = (SamplingParams(max_tokens=4, temperature=temperature, seed=3) for temperature in (0.0, 1.0))


def tokens(runner: TorchRunner, sampling: SamplingParams) -> list[int]:
    seq = Sequence("r", list(range(20)), sampling, 20, [], b"", 0.0, block_table=[5, 9])
    while seq.num_output_tokens < sampling.max_tokens:
        count = seq.num_uncomputed_tokens
        step = Step([Chunk(seq, seq.num_computed_tokens, count)], [])
        ((choice,),) = runner.launch(step)()
        seq.num_computed_tokens += count
        seq.token_ids.append(choice.token_id)
    return seq.token_ids[20:]
