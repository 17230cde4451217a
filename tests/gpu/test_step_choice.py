"""Steps of a model on a GPU, through the runner: tokens are chosen where the logits are, whatever the rows ask for."""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.device_choice import DeviceChoice, KeptLogits
from penstock.workers.compute.lora import AdapterRows
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.models.replay import Recorded, Replay
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.scoring import ScoredRows, WaitScores
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.step_model import GpuStepModel
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence, Step
from tests.gpu.cases import DEVICE
from tests.gpu.test_model import BLOCK_SIZE, CONFIG, NUM_BLOCKS, Harness
from tests.gpu.test_sample import CountedFetch

LENGTHS = (9, 21, 14, 33)
MIXTURE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.95, "seed": 5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 6, "logprobs": 3, "logit_bias": ((7, 4.0), (8, -4.0))},
    {"temperature": 0.0, "allowed_token_ids": pack_token_ids([*range(5, 90, 3)]), "min_tokens": 3, "logprobs": 0},
)
VOCAB = CONFIG.vocab_size


class KeepingModel(GpuStepModel):
    """Remembers the logits of its last step."""

    last: Tensor

    def keep(self, batch: Batch, adapter_rows: list[AdapterRows]) -> KeptLogits:
        return self._remember(super().keep(batch, adapter_rows))

    def score(self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows) -> tuple[KeptLogits, WaitScores]:
        kept, scores = super().score(batch, adapter_rows, scored)
        return self._remember(kept), scores

    def _remember(self, kept: KeptLogits) -> KeptLogits:
        self.last = kept.logits.cpu().clone()
        return kept


class Rig:
    def __init__(self, *mixture: dict[str, Any]) -> None:
        harness = Harness(torch.float32, DEVICE, is_planned=True)
        self.fetch = CountedFetch()
        self.steps = KeepingModel(
            Replay(harness.model, harness.cache, Recorded((1, 2, 4)), max_context=100), self.fetch
        )
        self.harness = harness
        self.runner = TorchRunner(self.steps, Sampler(VOCAB, CONFIG.eos_token_ids), 100)
        self.host = Sampler(VOCAB, CONFIG.eos_token_ids)
        self.seqs = [self._sequence(index, own) for index, own in enumerate(mixture)]

    def _sequence(self, index: int, own: dict[str, Any]) -> Sequence:
        length = LENGTHS[index]
        token_ids = [(7 * place + index) % 90 for place in range(length)]
        seq = Sequence("r", token_ids, SamplingParams(max_tokens=9, **own), length, [], b"", 0.0)
        seq.block_table = list(range(1 + 6 * index, 7 + 6 * index))
        return seq

    def step(self, drafts: Seq[list[int] | None] = ()) -> list[list[Sampled]]:
        chunks = [
            Chunk(seq, seq.num_computed_tokens, seq.num_uncomputed_tokens, draft=draft)
            for seq, draft in zip(self.seqs, drafts or [None] * len(self.seqs), strict=True)
        ]
        return self.runner.launch(Step(chunks, []))()

    def commit(self, chosen: list[list[Sampled]]) -> None:
        for seq, own in zip(self.seqs, chosen, strict=True):
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids += [each.token_id for each in own[:1]]

    def expected(self) -> list[list[Sampled]]:
        positions = [seq.num_tokens for seq in self.seqs]
        return [[choice] for choice in self.host.sample(self.steps.last, self.seqs, positions)]


def test_steps_of_all_kinds_of_rows_are_chosen_as_on_the_host_and_no_logits_are_fetched() -> None:
    """A prompt each, then decode steps, which are replayed."""
    rig = Rig(*MIXTURE)
    for _ in range(3):
        rig.fetch.num_bytes = 0
        chosen = rig.step()

        assert chosen == rig.expected()
        assert chosen[2][0].logprobs is not None
        assert rig.fetch.num_bytes == (3 * len(MIXTURE) + 2 * (2 + 2 * 3)) * 8
        rig.commit(chosen)


def test_drafts_of_drawn_rows_are_verified_where_the_logits_are() -> None:
    rig = Rig(*MIXTURE)
    rig.commit(rig.step())
    chosen = rig.step()  # nothing is committed: the next step computes the same again
    drafts = [[own[0].token_id, 5] for own in chosen]
    drafts[3] = [1, 2]
    rig.fetch.num_bytes = 0

    got = rig.step(drafts)

    assert got == rig.host.verify(rig.steps.last, rig.seqs, drafts)
    assert [len(own) > 1 for own in got] == [True, True, True, False]
    assert rig.fetch.num_bytes == (3 * 12 + 2 * 3 * (2 + 2 * 3)) * 8


@pytest.mark.parametrize(("index", "num_of_logprobs"), [(0, 2 * (2 + 2 * 3)), (2, 2)])
def test_a_step_that_scores_a_prompt_fetches_no_logits(index: int, num_of_logprobs: int) -> None:
    """A scored token brings two numbers, and two for its likeliest one."""
    mixture = [*MIXTURE]
    mixture[index] = {"temperature": 1.0, "seed": 4, "prompt_logprobs": 1}
    rig = Rig(*mixture)

    assert rig.step() == rig.expected()
    assert rig.fetch.num_bytes == (3 * len(MIXTURE) + num_of_logprobs + 4 * (LENGTHS[index] - 1)) * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_proposes_what_it_would_with_its_logits_on_the_host(temperature: float) -> None:
    proposals = []
    for is_on_device in (True, False):
        harness = Harness(torch.float32, DEVICE, is_planned=True)
        sampler = Sampler(VOCAB, CONFIG.eos_token_ids)
        cache = KvCache(CONFIG, NUM_BLOCKS, BLOCK_SIZE, torch.float32, DEVICE)
        chooser, tables = (DeviceChoice(sampler), BlockTables(2, 6, DEVICE)) if is_on_device else (None, None)
        drafter = DraftModel(harness.model, cache, sampler, 100, on_device=chooser, tables=tables)
        rig = Rig(*[{"temperature": temperature, "seed": 8, "presence_penalty": temperature}] * 2)
        for _ in range(2):
            chunks = [Chunk(seq, seq.num_tokens - 1, 1, max_drafts=3) for seq in rig.seqs]
            proposals.append(drafter.propose(chunks))
            for seq in rig.seqs:
                seq.token_ids += [7] * 8  # nothing of it was accepted; a block more is read

    assert proposals[:2] == proposals[2:]
    assert {len(tokens) for own in proposals for tokens in own} == {3}
