"""The torch runner: steps, choices and drafts over a real model, and the engine's schedule."""

import random

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.weights import round_table
from penstock.workers.config import SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.paged_hash import make_sequence
from tests.unit.workers.tiny_models import BLOCK_SIZE, engine_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def sequence(num_tokens: int, blocks: list[int], **sampling: float) -> Sequence:
    token_ids = [random.Random(i).randrange(96) for i in range(num_tokens)]
    seq = Sequence(
        "r", token_ids, SamplingParams(max_tokens=50, **{"temperature": 0.0} | sampling), num_tokens, [], b"", 0.0
    )  # type: ignore[arg-type]
    seq.block_table = blocks
    return seq


def advance(runner: TorchRunner, *chunks: Chunk) -> list[int | None]:
    choices = runner.launch(Step(list(chunks), []))()
    for chunk, choice in zip(chunks, choices, strict=True):
        chunk.seq.num_computed_tokens = chunk.end
        chunk.seq.token_ids += [sampled.token_id for sampled in choice]
    return [choice[0].token_id if choice else None for choice in choices]


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def test_greedy_tokens_are_those_of_transformers(model: PreTrainedModel, source: ModelSource) -> None:
    runner = load_runner(source, engine_config(), poison=True)
    a, b = sequence(11, [9, 3, 7, 1, 12, 13]), sequence(17, [2, 8, 4, 5, 6, 10])
    prompts = list(a.token_ids), list(b.token_ids)

    advance(runner, Chunk(a, 0, 11), Chunk(b, 0, 6))
    advance(runner, Chunk(b, 6, 11), Chunk(a, 11, 1))
    for _ in range(5):
        advance(runner, Chunk(a, a.num_computed_tokens, 1), Chunk(b, b.num_computed_tokens, 1))

    assert a.token_ids[11:] == greedy(model, prompts[0], 7)
    assert b.token_ids[17:] == greedy(model, prompts[1], 6)


def test_head_and_embedding_are_held_as_the_settings_say(source: ModelSource) -> None:
    rounded = tiny_model("llama")
    for part in (rounded.lm_head, rounded.model.embed_tokens):
        table = round_table(part.weight.detach(), 4)
        assert isinstance(table, QuantizedTensor)
        part.weight.data = table.dequantize()
    chunk = Chunk(sequence(21, [9, 3, 7, 1, 5, 2]), 0, 21)

    _, logits = load_runner(source, msgspec.structs.replace(engine_config(), lm_head="int4")).forward(Step([chunk], []))
    _, plain = load_runner(source, engine_config()).forward(Step([chunk], []))

    with torch.inference_mode():
        wanted = rounded(torch.tensor([chunk.seq.token_ids])).logits[0, -1]
    assert torch.allclose(logits[0], wanted, atol=1e-4)
    assert not torch.allclose(plain[0], wanted, atol=1e-2)


def test_only_a_chunk_that_reaches_the_last_token_chooses(source: ModelSource) -> None:
    runner = load_runner(source, engine_config())
    a, b = sequence(8, [0, 1]), sequence(8, [2, 3])

    choices = advance(runner, Chunk(a, 0, 7), Chunk(b, 0, 8))

    assert choices[0] is None
    assert choices[1] is not None
    assert advance(runner, Chunk(sequence(8, [4, 5]), 0, 7)) == [None]


def test_a_seeded_choice_knows_its_position(source: ModelSource) -> None:
    """The same tokens in one prefill, or prefilled and decoded: the same next choice."""
    runner = load_runner(source, engine_config())
    decoded, prefilled = (
        sequence(9, [0, 1, 2], temperature=1.5, seed=11),
        sequence(9, [3, 4, 5], temperature=1.5, seed=11),
    )
    advance(runner, Chunk(decoded, 0, 9))
    advance(runner, Chunk(decoded, 9, 1))
    prefilled.token_ids.append(decoded.token_ids[9])

    advance(runner, Chunk(prefilled, 0, 10))

    assert prefilled.token_ids == decoded.token_ids


class Choices:
    """The choices of one prompt in a real engine, each with its own seed."""

    def __init__(self, source: ModelSource, prompt: list[int]) -> None:
        config = engine_config(100)
        self.runner = load_runner(source, config, poison=True)
        self.pool = BlockPool(self.runner.num_blocks, BLOCK_SIZE)
        self._prompt = prompt
        self._hasher = ChainHasher(bytes(16), BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, self._hasher, config, self.runner.max_model_len, frozenset())

    @property
    def num_held(self) -> int:
        return self.pool.num_blocks - self.pool.num_free

    def add(self, *seeds: int) -> list[Sequence]:
        seqs = [
            make_sequence(self._hasher, self._prompt, SamplingParams(12, temperature=1.0, seed=seed)) for seed in seeds
        ]
        for seq in seqs:
            assert self.scheduler.add(seq)
        return seqs

    def step(self) -> int:
        """Take a step; returns the tokens that it computed."""
        step = self.scheduler.schedule()
        self.runner.poison(self.pool.garbage())
        self.scheduler.commit(step, self.runner.launch(step)())
        self.pool.check(self.scheduler.sequences())
        return sum(chunk.num_tokens for chunk in step.chunks)


def test_eight_choices_of_a_prompt_hold_and_compute_its_blocks_once(source: ModelSource) -> None:
    prompt = [random.Random(i).randrange(96) for i in range(46)]
    num_full = len(prompt) // BLOCK_SIZE
    choices = Choices(source, prompt)
    [first] = choices.add(0)
    while not first.num_output_tokens:
        choices.step()
    seqs = [first, *choices.add(*range(1, 8))]  # as a gateway starts them
    num_computed = choices.step()

    assert num_computed == 1 + 7 * (len(prompt) - num_full * BLOCK_SIZE)
    while not first.finish:
        assert choices.scheduler.running == seqs
        assert {tuple(seq.block_table[:num_full]) for seq in seqs} == {tuple(first.block_table[:num_full])}
        num_own = [-(-seq.num_computed_tokens // BLOCK_SIZE) - num_full for seq in seqs]
        assert choices.num_held == num_full + sum(num_own)
        choices.step()
    while choices.scheduler.has_work:
        choices.step()
    assert choices.num_held == 0
    for seed, seq in enumerate(seqs):
        alone = Choices(source, prompt)
        [only] = alone.add(seed)
        while alone.scheduler.has_work:
            alone.step()
        assert seq.token_ids == only.token_ids
    assert len({tuple(seq.token_ids) for seq in seqs}) == 8


def test_a_read_of_unwritten_kv_shows(source: ModelSource) -> None:
    """Guards the tests that rely on poison: a hole in the written KV must turn logits into NaN."""
    runner = load_runner(source, engine_config(), poison=True)
    seq = sequence(8, [0, 1])

    _, logits = runner.forward(Step([Chunk(seq, 4, 4)], []))

    assert logits.isnan().all()


def test_poison_strikes_the_blocks_it_is_given(source: ModelSource) -> None:
    runner = load_runner(source, engine_config())
    seq, other = sequence(8, [0, 1, 4]), sequence(8, [2, 3, 5])
    advance(runner, Chunk(seq, 0, 8), Chunk(other, 0, 8))

    runner.poison([0])
    _, logits = runner.forward(Step([Chunk(seq, 8, 1), Chunk(other, 8, 1)], []))

    assert logits.isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationConfig(method="ngram"),
        SpeculationConfig(method="draft", model="TINY", max_draft_tokens=3),
        SpeculationConfig(method="draft", model="TINY", draft_layers=1),
    ],
)
def test_a_runner_drafts_as_its_settings_say(
    model: PreTrainedModel, source: ModelSource, speculation: SpeculationConfig
) -> None:
    if speculation.model:
        speculation = msgspec.structs.replace(speculation, model=str(source.path))
    runner = load_runner(source, msgspec.structs.replace(engine_config(), speculation=speculation), poison=True)
    seq = sequence(12, [9, 3, 7, 1])
    seq.token_ids[4:] = seq.token_ids[:4] * 2  # something for a look-up
    prompt = list(seq.token_ids)
    advance(runner, Chunk(seq, 0, 11))
    chunk = Chunk(seq, 11, 1, 3)
    advance(runner, chunk)

    assert chunk.draft is not None
    assert len(chunk.draft) == 3
    assert seq.token_ids[12:] == greedy(model, prompt, seq.num_output_tokens)
    if speculation.model and not speculation.draft_layers:
        assert seq.num_output_tokens == 4, "the target itself is always right"


def test_a_draft_that_the_embedding_has_not_fails_before_anything_is_computed(source: ModelSource) -> None:
    runner = load_runner(source, engine_config(), poison=True)
    vocab_size = runner._steps.model.config.vocab_size
    seq = sequence(5, [3, 4])
    (chosen,) = advance(runner, Chunk(seq, 0, 5))
    assert chosen is not None

    seq.prediction = [chosen, 1, vocab_size]
    with pytest.raises(IndexError, match=f"token id {vocab_size}, but the embedding has {vocab_size} rows"):
        runner.launch(Step([Chunk(seq, 5, 1, max_drafts=2)], []))
    runner.launch(Step([Chunk(seq, 5, 1, max_drafts=1)], []))()


class FailingDrafter:
    def __init__(self) -> None:
        self.asked: list[Sequence] = []
        self.forgotten: list[Sequence] = []

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        self.asked += [chunk.seq for chunk in chunks]
        raise MemoryError

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)


def test_a_drafter_that_fails_leaves_its_sequences_without_drafts_and_the_step_whole(
    model: PreTrainedModel, source: ModelSource
) -> None:
    runner = load_runner(source, engine_config())
    runner._drafter = drafter = FailingDrafter()
    seq, later = sequence(8, [9, 3, 7, 1]), sequence(8, [4, 5, 6])
    prompt = list(seq.token_ids)
    for _ in range(3):
        advance(runner, Chunk(seq, seq.num_computed_tokens, seq.num_tokens - seq.num_computed_tokens, 2))
    advance(runner, Chunk(later, 0, 8, 2))
    runner.forget(seq)

    assert seq.token_ids[8:] == greedy(model, prompt, 3)
    assert drafter.asked == [seq, later]
    assert drafter.forgotten == [seq, later, seq]
    assert runner._undrafted == {later}
