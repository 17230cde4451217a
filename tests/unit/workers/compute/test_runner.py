"""The torch runner: KV planning, batches, choices, and the engine's schedule over a real model."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.loading import compute_dtype, has_bfloat16, load_runner, plan_kv
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.weights import round_table
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.tiny_models import saved, tiny_model

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 16 * 4
"""K and V, layers, key heads, tokens, head size, float32."""


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Threads that wait for each other at every tiny product take a hundred times as long on a busy machine."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def source(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return saved(model, tmp_path_factory.mktemp("tiny"))


def engine_config(blocks: int = 64, max_model_len: int | None = None) -> EngineConfig:
    return EngineConfig(
        dtype="float32",
        threads=1,
        block_size=BLOCK_SIZE,
        kv_memory_bytes=blocks * BLOCK_BYTES + 7,
        max_model_len=max_model_len,
    )


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


def test_a_step_lies_side_by_side_in_its_blocks() -> None:
    decoding, prefilling = sequence(6, [3, 1]), sequence(9, [2, 5, 4])
    decoding.num_computed_tokens = 5
    prefilling.num_computed_tokens = 3

    batch = build_batch(Step([Chunk(decoding, 5, 1), Chunk(prefilling, 3, 4)], []), BLOCK_SIZE)

    assert batch.token_ids.tolist() == [decoding.token_ids[5], *prefilling.token_ids[3:7]]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6]
    assert batch.attention.query_start.tolist() == [0, 1, 5]
    assert batch.attention.context_len.tolist() == [6, 7]
    assert batch.attention.block_tables.tolist() == [[3, 1], [2, 5]]
    assert batch.attention.slot_mapping.tolist() == [1 * 4 + 1, 2 * 4 + 3, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert (batch.rows.tolist(), batch.sampled) == ([0], [0])
    assert [batch.attention.query_start.dtype, batch.attention.slot_mapping.dtype] == [torch.int32, torch.int64]


def test_a_draft_lies_behind_its_chunk_and_every_token_of_it_chooses() -> None:
    decoding, other, prefilling = sequence(6, [3, 1, 6]), sequence(3, [8]), sequence(9, [2, 5, 4])
    drafted = Chunk(decoding, 5, 1, 3, [90, 91, 92])

    batch = build_batch(Step([drafted, Chunk(prefilling, 3, 4), Chunk(other, 2, 1)], []), BLOCK_SIZE)

    assert batch.token_ids.tolist() == [
        decoding.token_ids[5],
        90,
        91,
        92,
        *prefilling.token_ids[3:7],
        other.token_ids[2],
    ]
    assert batch.positions.tolist() == [5, 6, 7, 8, 3, 4, 5, 6, 2]
    assert batch.attention.context_len.tolist() == [9, 7, 3]
    assert batch.attention.slot_mapping.tolist()[:4] == [1 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 6 * 4]
    assert (batch.rows.tolist(), batch.sampled) == ([0, 1, 2, 3, 8], [0, 2])


def test_block_tables_are_padded_with_zero() -> None:
    short, long = sequence(2, [7]), sequence(9, [1, 2, 3])

    tables = build_batch(Step([Chunk(short, 0, 2), Chunk(long, 0, 9)], []), BLOCK_SIZE).attention.block_tables

    assert tables.tolist() == [[7, 0, 0], [1, 2, 3]]


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
        part.weight.data = table.dequantized()
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


def test_a_read_of_unwritten_kv_shows(source: ModelSource) -> None:
    """Guards the tests that rely on poison: a hole in the written KV must turn logits into NaN."""
    runner = load_runner(source, engine_config(), poison=True)
    seq = sequence(8, [0, 1])

    _, logits = runner.forward(Step([Chunk(seq, 4, 4)], []))

    assert logits.isnan().all()


def test_poison_strikes_the_blocks_it_is_given(source: ModelSource) -> None:
    runner = load_runner(source, engine_config())
    seq, other = sequence(8, [0, 1]), sequence(8, [2, 3])
    advance(runner, Chunk(seq, 0, 8), Chunk(other, 0, 8))

    runner.poison([0])
    _, logits = runner.forward(Step([Chunk(seq, 8, 1), Chunk(other, 8, 1)], []))

    assert logits.isnan().any(dim=1).tolist() == [True, False]


def test_the_kv_cache_fills_its_budget(source: ModelSource) -> None:
    runner = load_runner(source, engine_config(blocks=40))

    assert (runner.num_blocks, runner.max_model_len) == (40, 160)


@pytest.mark.parametrize(
    ("blocks", "wanted", "found"),
    [(1000, None, 256), (1000, 100, 100), (1000, 9999, 256), (40, None, 160), (40, 200, 160), (3, 12, 12)],
)
def test_the_context_is_the_least_of_config_checkpoint_and_cache(
    blocks: int, wanted: int | None, found: int, source: ModelSource
) -> None:
    assert plan_kv(read_config(source), engine_config(blocks, wanted), torch.float32) == (blocks, found)


def test_a_context_cut_short_is_told(source: ModelSource, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock.runner"):
        plan_kv(read_config(source), engine_config(40), torch.float32)
        plan_kv(read_config(source), engine_config(1000, 300), torch.float32)

    assert "max_model_len is 160, not 256: the KV cache holds no more" in caplog.text
    assert "max_model_len is 256, not 300: the checkpoint was made for no more" in caplog.text


@pytest.mark.parametrize("blocks", [0, 1, 31])
def test_a_kv_cache_without_room_for_a_useful_context_is_refused(blocks: int, source: ModelSource) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"holds {blocks} KV blocks of {BLOCK_BYTES} bytes.*a context of 128 needs {32 * BLOCK_BYTES} bytes",
    ):
        plan_kv(read_config(source), engine_config(blocks), torch.float32)


def test_bfloat16_takes_half_the_kv_memory(source: ModelSource) -> None:
    assert plan_kv(read_config(source), engine_config(64), torch.bfloat16)[0] == 128


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"method": "draft"},
            "engine.speculation.model names the draft model of method: draft; with method: draft it is None",
        ),
        ({"method": "ngram", "model": "demo"}, "with method: ngram it is demo"),
        ({"draft_layers": 3}, "draft_layers is a number of layers of a draft model, 1 or more, not 3 with none"),
        ({"method": "draft", "model": "demo", "draft_layers": 0}, "1 or more, not 0 with draft"),
        ({"max_draft_tokens": 17}, "engine.speculation.max_draft_tokens must be between 1 and 16, not 17"),
    ],
)
def test_speculation_that_can_not_work_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SpeculationConfig(**changes)


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


def test_a_draft_models_kv_is_taken_of_the_same_memory(source: ModelSource) -> None:
    speculation = SpeculationConfig(method="draft", model=str(source.path))
    config = engine_config(blocks=64)

    assert load_runner(source, config).num_blocks == 64
    assert load_runner(source, msgspec.structs.replace(config, speculation=speculation)).num_blocks == 32


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512vl\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f\nmodel name\t: avx512_bf16\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_known_by_the_flags_of_the_cpu(cpuinfo: str, expected: bool) -> None:
    assert has_bfloat16(cpuinfo) is expected


def test_a_named_dtype_is_taken_as_it_is() -> None:
    assert compute_dtype("float32") is torch.float32
    assert compute_dtype("bfloat16") is torch.bfloat16
    assert compute_dtype("auto") in (torch.float32, torch.bfloat16)
    assert compute_dtype("auto", is_fused=True) is torch.bfloat16
    assert compute_dtype("float32", is_fused=True) is torch.float32


def test_the_checkpoint_says_where_a_sequence_ends(model: PreTrainedModel, source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    for file in source.path.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)

    assert load_runner(ModelSource("safetensors", tmp_path, "x"), engine_config()).eos_token_ids == {3, 9}
