from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.model import MAX_SCORED_TOKENS
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.triton.products.tiling import bucket_of
from penstock.workers.compute.triton.segments import FEW_ROWS
from penstock.workers.compute.warm_up import SCORED, WarmChunk, load_zeros, plan_steps, warm_up
from penstock.workers.config import AdapterSlots, EngineConfig, SpeculationConfig
from penstock.workers.engine.sequence import Chunk, Resident, Sequence, Step
from tests.unit.workers.tiny_models import engine_config

NO_ADAPTERS = AdapterSlots(slots=0)


@st.composite
def configs(draw: st.DrawFn) -> tuple[EngineConfig, int]:
    """A configuration and the longest sequence."""
    rows = draw(st.integers(1, 300))
    config = EngineConfig(
        max_num_seqs=rows,
        max_batched_tokens=draw(st.integers(rows, 4096)),
        adapters=AdapterSlots(slots=draw(st.sampled_from((0, 8)))),
        speculation=SpeculationConfig(
            method=draw(st.sampled_from(("none", "ngram"))), max_draft_tokens=draw(st.integers(1, 16))
        ),
    )
    return config, draw(st.integers(2, 8192))


def tokens(step: list[WarmChunk]) -> int:
    return sum(chunk.num_tokens + chunk.max_drafts for chunk in step)


@given(configs())
def test_every_step_of_the_warm_up_is_one_that_the_scheduler_could_make(drawn: tuple[EngineConfig, int]) -> None:
    config, max_model_len = drawn

    for step in plan_steps(config, max_model_len):
        assert 1 <= len(step) <= config.max_num_seqs
        assert tokens(step) <= config.max_batched_tokens
        assert all(chunk.context + chunk.num_tokens + chunk.max_drafts <= max_model_len for chunk in step)
        assert sum(chunk.num_tokens for chunk in step if chunk.sampling is SCORED) <= MAX_SCORED_TOKENS


@given(configs())
def test_products_of_as_many_rows_as_a_step_may_have_are_warmed(drawn: tuple[EngineConfig, int]) -> None:
    config, max_model_len = drawn
    steps = plan_steps(config, max_model_len)
    most = min(config.max_batched_tokens, config.max_num_seqs * (max_model_len - 1))

    assert {bucket_of(tokens(step)) for step in steps} >= {bucket_of(count) for count in range(1, most + 1)}
    assert max(map(tokens, steps)) == most or config.speculation.method != "none"
    logits = {len(step) for step in steps} | {
        sum(chunk.num_tokens for chunk in step) for step in steps if step[0].sampling is SCORED
    }
    assert {bucket_of(count) for count in logits} >= {
        bucket_of(count) for count in range(1, min(most, MAX_SCORED_TOKENS) + 1)
    }


@given(configs())
def test_a_sequence_with_one_new_token_one_with_a_few_and_one_with_many_are_warmed(
    drawn: tuple[EngineConfig, int],
) -> None:
    config, max_model_len = drawn
    lengths = {chunk.num_tokens for step in plan_steps(config, max_model_len) for chunk in step}
    most = min(config.max_batched_tokens, max_model_len - 1)

    assert 1 in lengths
    assert most < 2 or any(2 <= length <= 16 for length in lengths)
    assert most < 17 or any(length > 16 for length in lengths)


@given(configs())
def test_adapters_have_both_kinds_of_tiles(drawn: tuple[EngineConfig, int]) -> None:
    config, max_model_len = drawn
    steps = [step for step in plan_steps(config, max_model_len) if step[0].has_adapter]
    most = min(config.max_batched_tokens, config.max_num_seqs * (max_model_len - 1))

    assert bool(steps) == bool(config.adapters.slots)
    assert not steps or any(tokens(step) <= FEW_ROWS for step in steps)
    assert not steps or most <= FEW_ROWS or any(tokens(step) > FEW_ROWS for step in steps)


@dataclass
class CountingRunner:
    num_blocks: int = 7
    max_model_len: int = 100
    steps: list[Step] = field(default_factory=list)
    forgotten: list[Sequence] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def launch(self, step: Step) -> Callable[[], object]:
        self.steps.append(step)
        return lambda: None

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> Resident:
        assert folder.is_dir()
        assert max_rank == 1
        self.digests.append(digest)
        return Loaded(digest)

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)


@dataclass(frozen=True)
class Loaded:
    digest: str


def test_sequences_of_the_warm_up_are_forgotten_and_blocks_are_those_of_the_cache(source: ModelSource) -> None:
    runner = CountingRunner()
    config = EngineConfig(max_num_seqs=4, max_batched_tokens=40)

    warm_up(runner, config, read_config(source))

    chunks = [chunk for step in runner.steps for chunk in step.chunks]
    assert {chunk.seq for chunk in chunks} == set(runner.forgotten)
    assert all(0 <= block < runner.num_blocks for chunk in chunks for block in chunk.seq.block_table)
    assert len(runner.digests) == 1
    assert any(chunk.seq.lora == Loaded(runner.digests[0]) for chunk in chunks)
    assert [step.copies for step in runner.steps if step.copies] == [[(0, 1)]]


def test_without_slots_no_adapter_is_loaded(source: ModelSource) -> None:
    runner = CountingRunner()
    warm_up(runner, EngineConfig(max_num_seqs=4, max_batched_tokens=40, adapters=NO_ADAPTERS), read_config(source))

    assert runner.digests == []


def answer(runner: TorchRunner, lora: Resident | None = None) -> list[int]:
    seq = Sequence("r", list(range(20)), SamplingParams(max_tokens=5, temperature=0.0), 20, [], b"", 0.0, lora=lora)
    seq.block_table = list(range(3, 10))
    while seq.num_output_tokens < 5:
        count = seq.num_uncomputed_tokens
        ((choice,),) = runner.launch(Step([Chunk(seq, seq.num_computed_tokens, count)], []))()
        assert choice.error is None
        seq.num_computed_tokens += count
        seq.token_ids.append(choice.token_id)
    return seq.token_ids[20:]


@pytest.mark.usefixtures("one_torch_thread")
def test_a_runner_answers_after_the_warm_up_as_before_and_its_adapter_adds_nothing(source: ModelSource) -> None:
    config = engine_config()
    fresh, warmed = load_runner(source, config), load_runner(source, config)
    expected = answer(fresh)

    warm_up(warmed, config, read_config(source))
    zeros = load_zeros(warmed, read_config(source))

    assert answer(warmed) == expected
    assert answer(warmed, zeros) == expected
