"""Log probabilities of prompts, reduced where the logits are, and blocks that are copied there, against the host."""

import pytest
import torch

from penstock.wire.frames import PromptLogprobs, SamplingParams, unpack_floats, unpack_token_ids
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.models.replay import Recorded, Replay
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.step_model import GpuStepModel, HostStepModel, StepModel
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.gpu.cases import DEVICE
from tests.gpu.test_model import BLOCK_SIZE, CONFIG, CPU, Harness

TOLERANCE = 1e-3


def scored(steps: StepModel) -> tuple[list[PromptLogprobs], list[int]]:
    """A prompt in two chunks beside a sequence that decodes: its scores, and the tokens that were chosen."""
    prompt = [(7 * place) % 90 for place in range(40)]
    wanted = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)
    seq = Sequence("r", prompt, wanted, 40, [], b"", 0.0, block_table=[5, 9, 3])
    other = Sequence("o", [*range(20)], SamplingParams(2, temperature=0.0), 20, [], b"", 0.0, block_table=[7, 2])
    runner = TorchRunner(steps, Sampler(CONFIG.vocab_size), 100)
    found, chosen = [], []
    for chunks in (
        [Chunk(other, 0, 20), Chunk(seq, 0, 25)],
        [Chunk(seq, 25, 15)],
    ):
        for choices in runner.launch(Step(chunks, []))():
            chosen += [choice.token_id for choice in choices]
        for chunk in chunks:
            if chunk.prompt_logprobs is not None:
                seq.prompt_logprobs.append(chunk.prompt_logprobs)
                found.append(chunk.prompt_logprobs)
    return found, chosen


def test_a_prompt_is_scored_as_on_the_host() -> None:
    ours, theirs = Harness(torch.float32, DEVICE, is_planned=True), Harness(torch.float32, CPU, is_planned=False)
    got, chosen = scored(GpuStepModel(Replay(ours.model, ours.cache, Recorded((1, 2)), max_context=100)))
    expected, wanted = scored(HostStepModel(theirs.model, theirs.cache))

    assert chosen == wanted
    assert [part.num_tokens for part in got] == [part.num_tokens for part in expected] == [25, 14]
    for part, other in zip(got, expected, strict=True):
        assert unpack_token_ids(part.ranks) == unpack_token_ids(other.ranks)
        assert unpack_token_ids(part.top_ids) == unpack_token_ids(other.top_ids)
        for mine, yours in ((part.logprobs, other.logprobs), (part.top_logprobs, other.top_logprobs)):
            torch.testing.assert_close(
                torch.tensor(unpack_floats(mine)), torch.tensor(unpack_floats(yours)), atol=TOLERANCE, rtol=TOLERANCE
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_copied_block_has_keys_values_and_scales(dtype: torch.dtype) -> None:
    cache = KvCache(CONFIG, 6, BLOCK_SIZE, dtype, DEVICE)
    parts = [
        part
        for pair, layout in zip(cache.layers, cache.layouts, strict=True)
        for part in (*pair, *(layout.scales or ()))
    ]
    for number, part in enumerate(parts):
        part[2], part[5] = float(1 + number), 16.0

    cache.copy([(2, 4), (5, 0)])

    for number, part in enumerate(parts):
        assert part[4].float().unique().tolist() == [1 + number]
        assert part[0].float().unique().tolist() == [16]
        assert not part[1].float().any()
