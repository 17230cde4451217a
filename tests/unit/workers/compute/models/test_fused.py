"""Fused steps against torch's decoder: every feature of the family, mixed steps, scattered blocks, NaN wherever nobody
wrote."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import Batch, Span, build_batch, lay_out
from penstock.workers.compute.choice import choose_by_numpy
from penstock.workers.compute.kernels.cache_layout import can_tile
from penstock.workers.compute.kernels.choice import GREEDY, ChoiceInput, Draw
from penstock.workers.compute.kernels.decoder import Activations, ChosenTokens
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.lora import AdapterRows
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.fused import FusedLlama, load_for, make_model
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep, step_of
from penstock.workers.compute.quant.packed import UnsupportedMatrix, pack_all
from penstock.workers.compute.quant.quantized import QuantizedTensor, quantize, quantize_int8
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.step_model import HostStepModel
from penstock.workers.compute.truncation import MOST_TOKENS
from penstock.workers.compute.weights import layout, parameter_shapes
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence, Step
from tests.unit.workers.built_kernels import built_kernels
from tests.unit.workers.tiny_models import saved, tiny_model, written_as_gguf

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK, NUM_BLOCKS, MAX_LEN = 16, 20, 200
PLAIN = ModelConfig(
    family="llama", vocab_size=211, hidden_size=96, intermediate_size=160, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=32, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=MAX_LEN, sliding_window=None, is_tied=True, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({3}),
)  # fmt: skip
CONFIGS = {
    "tied": PLAIN,
    "untied, with biases": replace(
        PLAIN, is_tied=False, has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True, vocab_size=160
    ),
    "with norms of heads": replace(PLAIN, family="qwen3", has_qk_norm=True, head_dim=128, num_heads=4, num_kv_heads=1),
    "heads that are no panels": replace(PLAIN, head_dim=80, num_heads=2, num_kv_heads=2, hidden_size=80),
    "odd sizes": replace(
        PLAIN, hidden_size=72, intermediate_size=88, num_heads=8, num_kv_heads=8, head_dim=48, has_mlp_bias=True
    ),
    "wide groups": replace(PLAIN, head_dim=64, num_heads=8, num_kv_heads=1, num_layers=3),
}


@pytest.fixture(scope="module")
def kernels() -> Library:
    return built_kernels()


@pytest.fixture
def portable(kernels: Library) -> Iterator[None]:
    """Products in float32."""
    assert kernels.matmul.set_level(Level.PORTABLE)
    yield
    kernels.matmul.set_level(None)


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Float32 numbers that bfloat16 has too."""
    generator = torch.Generator().manual_seed(5)
    shapes = parameter_shapes(layout(config))
    return {
        name: (torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 1.0)).bfloat16().float()
        for name, shape in shapes.items()
    }


def make_pair(config: ModelConfig, kernels: Library, threads: int = 2) -> tuple[Llama, FusedLlama]:
    """The same model twice: in torch with float32, and fused."""
    weights = random_weights(config)
    dense = {name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in weights.items()}
    packed = pack_all(dense.items(), kernels.matmul, torch.float32)
    return Llama(config, weights, MAX_LEN, 1, exact=False), FusedLlama(config, packed, MAX_LEN, threads, kernels)


class Tables:
    """Sequences in blocks drawn at random, in caches that are NaN where nobody wrote."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.tables: dict[int, list[int]] = {}

    def cache(self, dtype: torch.dtype = torch.float32) -> KvCache:
        cache = KvCache(
            self.config, NUM_BLOCKS, BLOCK, dtype, by_block=True, is_tiled=can_tile(BLOCK, self.config.head_dim, dtype)
        )
        cache.poison(torch.arange(NUM_BLOCKS))
        return cache

    def span(self, seq: int, start: int, count: int) -> Span:
        table = self.tables.setdefault(seq, [])
        while len(table) * BLOCK < start + count:
            table.append(self.free.pop())
        return Span(
            [
                random.Random(1000 * seq + place).randrange(self.config.vocab_size)
                for place in range(start, start + count)
            ],
            start,
            list(table),
        )


STEPS = [
    [(0, 0, 37)],
    [(1, 0, 5), (0, 37, 1)],
    [(0, 38, 1), (2, 0, 1), (1, 5, 1)],
    [(1, 6, 40), (0, 39, 4), (3, 0, 19), (2, 1, 1)],
    [(0, 43, 1)],
]
"""(sequence, start, tokens): prompts in chunks, decodes and drafts, alone and mixed."""


def logits_of(
    model: Llama | FusedLlama, cache: KvCache, tables: Tables, parts: list[tuple[int, int, int]], every: int = 1
) -> Tensor:
    with torch.inference_mode():
        token_ids, positions, attention = lay_out([tables.span(*part) for part in parts], BLOCK)
        return model.logits(ModelStep(token_ids, positions, attention, torch.arange(0, len(token_ids), every)), cache)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_torch(name: str, kernels: Library, portable: None) -> None:
    config = CONFIGS[name]
    oracle, fused = make_pair(config, kernels)
    tables = Tables(config)
    caches = tables.cache(), tables.cache()

    for parts in STEPS:
        expected = logits_of(oracle, caches[0], tables, parts)
        torch.testing.assert_close(logits_of(fused, caches[1], tables, parts), expected, atol=1e-4, rtol=1e-4)
        for part in parts:
            tables.span(*part)
    for (keys, values), (fused_keys, fused_values) in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(fused_keys, keys, atol=1e-4, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(fused_values, values, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("level", [None, Level.VNNI, Level.AVX2, Level.PORTABLE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_every_level_and_cache_layoutat_gives_nearly_the_same_logits(
    level: Level | None, dtype: torch.dtype, kernels: Library
) -> None:
    oracle, fused = make_pair(CONFIGS["wide groups"], kernels)
    tables = Tables(oracle.config)
    caches = tables.cache(), tables.cache(dtype)
    if not kernels.matmul.set_level(level):
        pytest.skip("this CPU does not have these instructions")
    try:
        for parts in STEPS:
            expected, found = logits_of(oracle, caches[0], tables, parts), logits_of(fused, caches[1], tables, parts)
            assert (found - expected).square().mean().sqrt() < 0.04 * expected.std()
    finally:
        kernels.matmul.set_level(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_row_has_the_same_bits_alone_and_in_any_step_of_few_rows(dtype: torch.dtype, kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    together, alone = tables.cache(dtype), tables.cache(dtype)
    parts = [(0, 0, 9), (1, 0, 6), (2, 0, 1)]

    whole = logits_of(fused, together, tables, parts)

    assert torch.equal(torch.cat([logits_of(fused, alone, tables, [part]) for part in parts]), whole)
    assert torch.equal(
        logits_of(fused, together, tables, [(2, 1, 1), (0, 9, 2)])[1:], logits_of(fused, alone, tables, [(0, 9, 2)])
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int, kernels: Library) -> None:
    one, several = (make_pair(CONFIGS["untied, with biases"], kernels, count)[1] for count in (1, threads))
    tables = Tables(one.config)
    caches = tables.cache(), tables.cache()

    for parts in STEPS:
        assert torch.equal(logits_of(one, caches[0], tables, parts), logits_of(several, caches[1], tables, parts))


QUANTIZED = {"tied": PLAIN, "odd sizes, untied": replace(CONFIGS["odd sizes"], is_tied=False)}
ROWS = {
    1: [(0, 0, 1)],
    4: [(0, 1, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)],
    5: [(0, 2, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 0, 1)],
    9: [(0, 3, 6), (5, 0, 3)],
    33: [(0, 9, 20), (6, 0, 13)],
}
"""Steps one after the other, by their rows: one token for each of several sequences, then prompts; bfloat16 comes last,
because it stays in the cache."""


def most_error(activations: Activations, rows: int, level: Level) -> float:
    """Root mean square of the deviation by roundings, of the logits' own, with so few layers and columns as here."""
    is_bfloat16 = activations is Activations.BFLOAT16 or (
        activations is Activations.TWO_TERMS and rows >= 16 and level >= Level.AVX512
    )
    if is_bfloat16:
        return 0.02 if level >= Level.AVX512 else 1e-5  # else weights are dequantized to float32
    is_one_term = activations is Activations.ONE_TERM or (activations is Activations.MIXED and rows > 4)
    if activations is Activations.MIXED and rows <= 4 and level >= Level.VNNI:
        return 0.03
    return 0.05 if is_one_term and level >= Level.AVX2 else 5e-4


def quantized_weights(config: ModelConfig) -> dict[str, Tensor | QuantizedTensor]:
    """4 bits, tables 8."""
    return {
        name: weight
        if weight.dim() == 1
        else quantize_int8(weight, 32)
        if name in ("embed", "lm_head")
        else quantize(weight, 32)
        for name, weight in random_weights(config).items()
    }


def logits_by_rows(model: Llama | FusedLlama) -> dict[int, Tensor]:
    """Logits of every row of the steps of ROWS."""
    tables = Tables(model.config)
    cache = tables.cache()
    return {count: logits_of(model, cache, tables, parts) for count, parts in ROWS.items()}


@pytest.fixture(params=[None, Level.VNNI, Level.AVX2], ids=["best", "vnni", "avx2"])
def level(kernels: Library, request: pytest.FixtureRequest) -> Iterator[Level]:
    """Levels that serve models, each in turn."""
    if kernels.matmul.level() is Level.PORTABLE or not kernels.matmul.set_level(request.param):
        pytest.skip("this CPU does not have these instructions")
    yield kernels.matmul.level()
    kernels.matmul.set_level(None)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_matrices_give_what_their_dequantized_ones_give_within_their_rounding(
    name: str, level: Level, kernels: Library
) -> None:
    config = QUANTIZED[name]
    weights = quantized_weights(config)
    dense = {name: weight if isinstance(weight, Tensor) else weight.dequantize() for name, weight in weights.items()}
    packed = pack_all(weights.items(), kernels.matmul, torch.float32)
    expected = logits_by_rows(Llama(config, dense, MAX_LEN, 1, exact=False))

    for activations in Activations:
        by_one, by_three = (
            logits_by_rows(FusedLlama(config, packed, MAX_LEN, threads, kernels, activations)) for threads in (1, 3)
        )
        for rows in ROWS:
            assert torch.equal(by_one[rows], by_three[rows]), (activations, rows)
            error = float((by_one[rows] - expected[rows]).square().mean().sqrt() / expected[rows].std())
            assert error < most_error(activations, rows, level), (activations, rows)


FEW_OR_SHORT = {
    "a short prompt": [(0, 0, 9)],
    "two of them": [(0, 0, 80), (1, 0, 80)],
    "one beside a long one": [(0, 0, 150), (1, 0, 9)],
    "one beside many that decode": [*((seq, 0, 1) for seq in range(6)), (6, 0, 9)],
}
MANY_OR_LONG = {
    "five that decode": [(seq, 0, 1) for seq in range(5)],
    "with drafts": [(0, 0, 4), (1, 0, 4)],
    "a long prompt": [(0, 0, 130)],
}


def logits_of_ends(model: FusedLlama, parts: list[tuple[int, int, int]], *, is_every: bool) -> Tensor:
    """Logits of each sequence's last token, or of every token."""
    tables = Tables(model.config)
    token_ids, positions, attention = lay_out([tables.span(*part) for part in parts], BLOCK)
    rows = torch.arange(len(token_ids)) if is_every else attention.query_start[1:].long() - 1
    return model.logits(ModelStep(token_ids, positions, attention, rows), tables.cache())


def test_short_prompts_take_two_terms_few_rows_outliers_and_others_one_term(level: Level, kernels: Library) -> None:
    packed = pack_all(quantized_weights(PLAIN).items(), kernels.matmul, torch.float32)
    one, two, mixed = (
        FusedLlama(PLAIN, packed, MAX_LEN, 1, kernels, kind)
        for kind in (Activations.ONE_TERM, Activations.TWO_TERMS, Activations.MIXED)
    )

    for count in (1, 2, 4):
        parts = [(seq, 0, 1) for seq in range(count)]
        found, by_one, by_two = (logits_of_ends(model, parts, is_every=False) for model in (mixed, one, two))
        if level < Level.VNNI:
            assert torch.equal(found, by_two)
        else:  # of ordinary activations, which the tiny model has, outliers gain little
            assert 0 < (found - by_two).norm() < 0.8 * (by_one - by_two).norm()
    for cases, same, other, is_every in ((FEW_OR_SHORT, two, one, False), (MANY_OR_LONG, one, two, True)):
        for name, parts in cases.items():
            found = logits_of_ends(mixed, parts, is_every=is_every)
            assert torch.equal(found, logits_of_ends(same, parts, is_every=is_every)), name
            assert level < Level.AVX2 or not torch.equal(found, logits_of_ends(other, parts, is_every=is_every)), name


def test_a_draft_s_tokens_have_the_bits_that_they_have_one_by_one(level: Level, kernels: Library) -> None:
    packed = pack_all(quantized_weights(PLAIN).items(), kernels.matmul, torch.float32)
    model = FusedLlama(PLAIN, packed, MAX_LEN, 1, kernels, Activations.MIXED)
    tables = Tables(PLAIN)
    prompt, *single = (tables.span(0, *part) for part in ((0, 30), (30, 1), (31, 1), (32, 1), (33, 1)))
    caches = [tables.cache(), tables.cache()]

    def logits(cache: KvCache, span: Span) -> Tensor:
        token_ids, positions, attention = lay_out([span], BLOCK)
        return model.logits(ModelStep(token_ids, positions, attention, torch.arange(len(token_ids))), cache)

    for cache in caches:
        logits(cache, prompt)
    one_by_one = torch.cat([logits(caches[0], span) for span in single])

    draft = single[-1]._replace(token_ids=[span.token_ids[0] for span in single], start=30)
    assert torch.equal(logits(caches[1], draft), one_by_one)


def test_a_piece_of_a_prompt_is_none_that_is_short(kernels: Library) -> None:
    packed = pack_all(quantized_weights(PLAIN).items(), kernels.matmul, torch.float32)
    one, mixed = (
        FusedLlama(PLAIN, packed, MAX_LEN, 1, kernels, kind) for kind in (Activations.ONE_TERM, Activations.MIXED)
    )
    tables = Tables(PLAIN)
    token_ids, positions, attention = lay_out([tables.span(0, 0, 130), tables.span(1, 0, 9)], BLOCK)

    found, expected = (
        model.logits(ModelStep(token_ids, positions, attention, torch.arange(130)), tables.cache())
        for model in (mixed, one)
    )

    assert torch.equal(found, expected)


def test_a_quantized_file_is_served_by_fused_steps_with_the_activations_that_are_asked_for(
    level: Level, tmp_path: Path
) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)

    def logits(activations: str, dtype: str = "bfloat16") -> Tensor:
        options = {"dtype": dtype, "threads": 1, "kv_memory_bytes": 2**20, "activations": activations}
        config = EngineConfig(**options)  # type: ignore[arg-type]
        runner = load_runner(source, config, poison=True)
        assert isinstance(runner._steps.model, FusedLlama) is (dtype == "bfloat16")
        seq = Sequence("r", [7], SamplingParams(max_tokens=4), 1, [], b"", 0.0, block_table=[3])
        return runner.forward(Step([Chunk(seq, 0, 1, 3, [91, 30, 7])], []))[1]

    expected, one, two = logits("auto", "float32"), logits("int8"), logits("int16")

    assert torch.equal(logits("auto"), two) is (level < Level.VNNI)
    assert level < Level.AVX2 or not torch.equal(one, two)
    for found in (one, two, logits("auto"), logits("bf16")):
        assert (found - expected).square().mean().sqrt() < 0.03 * expected.std()


def test_where_matrices_have_no_packed_form_torch_serves_and_the_log_says_why(
    level: Level, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    config = read_config(source)
    engine = EngineConfig(threads=1)

    with caplog.at_level("INFO", "penstock.fused"):
        weights = load_for(source, config, engine, torch.float32, torch.device("cpu"))

    assert isinstance(make_model(config, weights, 64, 1, engine), Llama)
    assert "not in the fused kernels: embed is dense in torch.float32" in caplog.text


def test_the_best_are_the_first_of_the_largest_logits(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    token_ids, positions, attention = lay_out([tables.span(0, 0, 30), tables.span(1, 0, 7)], BLOCK)
    rows = torch.tensor([36, 0, 12, 29, 31])
    cache = tables.cache()

    logits = fused.logits(ModelStep(token_ids, positions, attention, rows), cache)
    best = fused.greedy_tokens(ModelStep(token_ids, positions, attention, rows), cache)

    assert torch.equal(best.ids, logits.argmax(-1))
    assert torch.equal(best.scores, logits.amax(-1))


def test_logits_of_some_rows_are_those_of_all_and_the_best_of_all_are_there(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    token_ids, positions, attention = lay_out([tables.span(0, 0, 30), tables.span(1, 0, 7)], BLOCK)
    rows = torch.tensor([36, 0, 12, 29, 31])
    cache = tables.cache()
    wanted = [False, True, False, False, True]
    draws = [None if is_wanted else GREEDY for is_wanted in wanted]

    logits = fused.logits(ModelStep(token_ids, positions, attention, rows), cache)
    best, some = fused.choose_tokens(ModelStep(token_ids, positions, attention, rows), cache, draws)
    none_wanted = fused.choose_tokens(ModelStep(token_ids, positions, attention, rows), cache, [GREEDY] * 5)

    assert torch.equal(some, logits[torch.tensor(wanted)])
    assert torch.equal(best.ids, logits.argmax(-1))
    assert torch.equal(none_wanted[0].ids, best.ids)
    assert none_wanted[1].shape == (0, PLAIN.vocab_size)


def random_draws(number: int) -> list[Draw | None]:
    """How rows' tokens are chosen: from all, from some, greedily, or not in the step."""
    rng = random.Random(number)
    cuts = [(0, 1.0, -math.inf)] * 4 + [(5, 1.0, -math.inf), (0, 0.6, -math.inf), (0, 1.0, -1.5), (40, 0.9, -3.0)]
    return [
        rng.choice((None, GREEDY))
        if rng.random() < 0.25
        else Draw(rng.choice((1e-5, 0.3, 0.8, 2.0)), *rng.choice(cuts), rng.getrandbits(64))
        for _ in range(40)
    ]


def as_numpy_chooses(row: Tensor, draw: Draw | None) -> int:
    logits = row.numpy()
    chosen = choose_by_numpy(ChoiceInput(logits, logits, *(draw or GREEDY), None))
    assert chosen is not None
    return chosen.token_id


@pytest.mark.parametrize("level", [Level.PORTABLE, Level.AVX2, Level.VNNI])
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_are_drawn_in_the_step_as_from_its_logits(kernels: Library, level: Level, threads: int) -> None:
    if not kernels.matmul.set_level(level):
        pytest.skip(f"this CPU does not have {level.name}")
    try:
        _, fused = make_pair(replace(PLAIN, vocab_size=2500, is_tied=False), kernels, threads)
        tables = Tables(PLAIN)
        token_ids, positions, attention = lay_out([tables.span(0, 0, 30), tables.span(1, 0, 10)], BLOCK)
        step, cache = ModelStep(token_ids, positions, attention, torch.arange(40)), tables.cache()
        logits = fused.logits(step, cache)
        for number in range(12):
            draws = random_draws(number)

            chosen, some = fused.choose_tokens(step, cache, draws)

            assert chosen.ids.tolist() == [as_numpy_chooses(*each) for each in zip(logits, draws, strict=True)]
            assert torch.equal(chosen.scores, logits.amax(-1))
            assert torch.equal(some, logits[torch.tensor([draw is None for draw in draws])])
    finally:
        kernels.matmul.set_level(None)


def test_equal_logits_give_the_lowest_id_and_nan_is_seen(kernels: Library, portable: None) -> None:
    weights = {
        name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in random_weights(PLAIN).items()
    }
    weights["embed"][100:103] = weights["embed"][7]
    packed = pack_all(weights.items(), kernels.matmul, torch.float32)
    fused = FusedLlama(PLAIN, packed, MAX_LEN, 2, kernels)
    tables = Tables(PLAIN)
    cache = tables.cache()

    def best_behind(token: int, place: int) -> ChosenTokens:
        token_ids, positions, attention = lay_out([Span([token], place, tables.span(place, 0, 10).block_table)], BLOCK)
        return fused.greedy_tokens(ModelStep(token_ids, positions, attention, torch.tensor([0])), cache)

    found = {int(best_behind(token, 0).ids) for token in range(40)}

    assert not {100, 101, 102} & found
    assert best_behind(7, 9).scores.isnan().all()


def test_a_step_without_rows_only_writes_the_cache(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    cache = tables.cache()

    token_ids, positions, attention = lay_out([tables.span(0, 0, 9)], BLOCK)
    logits = fused.logits(ModelStep(token_ids, positions, attention, torch.zeros(0, dtype=torch.int64)), cache)

    assert logits.shape == (0, PLAIN.vocab_size)
    assert not any(part[tables.tables[0][0], :, :9].isnan().any() for pair in cache.layers for part in pair)


def test_the_runner_chooses_the_same_tokens_with_and_without_logits(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    plain, mixed = (
        TorchRunner(HostStepModel(fused, tables.cache()), Sampler(PLAIN.vocab_size), MAX_LEN) for _ in range(2)
    )
    tokens = list(range(20, 33))

    def chunk(seed: int, **params: float) -> Chunk:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, **params)  # type: ignore[arg-type]
        seq = Sequence("r", [token + seed for token in tokens], sampling, 13, [], b"", 0.0)
        seq.block_table = tables.span(seed, 0, 16).block_table
        return Chunk(seq, 0, 13, 3, [41, 42])

    greedy = plain.launch(Step([chunk(1), chunk(2)], []))()
    with_penalty = mixed.launch(Step([chunk(1), chunk(2, presence_penalty=1e-9)], []))()

    assert [[choice.token_id for choice in choices] for choices in greedy] == [
        [choice.token_id for choice in choices] for choices in with_penalty
    ]


class LogitsAlone(HostStepModel):
    """Steps whose tokens are all chosen from logits."""

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows]) -> None:
        return None

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], draws: Iterable[Draw | None]
    ) -> tuple[ChosenTokens, Tensor] | None:
        return None


class InStep(HostStepModel):
    """Steps that note which rows' logits they keep."""

    num_kept: int | None = None

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], draws: Iterable[Draw | None]
    ) -> tuple[ChosenTokens, Tensor] | None:
        rows = list(draws)
        self.num_kept = rows.count(None)
        return super().choose_and_keep(batch, adapter_rows, rows)


PLAIN_DRAWS: list[dict[str, Any]] = [
    {}, {"top_p": 0.7}, {"temperature": 0.0}, {"top_k": 3, "temperature": 1.5}, {"min_p": 0.2},
    {"logprobs": 1, "logprobs_tokens": 2}, {"min_tokens": 2},
]  # fmt: skip
"""Parameters of tokens that are drawn in the step, behind two tokens of output; the next ones are not."""
OTHERS: list[dict[str, Any]] = [
    {"logprobs": 2}, {"presence_penalty": 1.0}, {"temperature": math.inf}, {"min_tokens": 9, "stop_token_ids": (5, 6)},
    {"logprobs": 1, "logprobs_tokens": 3},
]  # fmt: skip


@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_runner_draws_the_same_tokens_with_and_without_logits(kernels: Library, has_drafts: bool) -> None:
    """Drafts are the tokens that are chosen, so that all of their rows count."""
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    steps = InStep(fused, tables.cache())
    in_step, from_logits = (
        TorchRunner(each, Sampler(PLAIN.vocab_size), MAX_LEN) for each in (steps, LogitsAlone(fused, tables.cache()))
    )
    drafts: dict[int, list[int]] = {}

    def chosen(runner: TorchRunner, params: list[dict[str, Any]]) -> list[list[Sampled]]:
        chunks = []
        for number, own in enumerate(params):
            sampling = SamplingParams(**{"max_tokens": 9, "temperature": 0.8, "seed": number} | own)
            ids = [20 + number + place for place in range(13)]
            seq = Sequence(f"r{number}", ids, sampling, 11, [], b"", 0.0)
            seq.block_table = tables.span(number, 0, 16).block_table
            chunks.append(Chunk(seq, 0, 13, 3, drafts.get(number)))
        return runner.launch(Step(chunks, []))()

    params = PLAIN_DRAWS + OTHERS
    for _ in range(2 if has_drafts else 0):
        for number, found in enumerate(chosen(from_logits, params)):
            drafts[number] = [each.token_id for each in found] if found[0].error is None else [1]
    alone = chosen(in_step, PLAIN_DRAWS)

    assert steps.num_kept == 0
    assert alone == chosen(from_logits, PLAIN_DRAWS)
    assert all(len(found) == (3 if has_drafts else 1) for found in alone)
    assert chosen(in_step, params) == chosen(from_logits, params)
    assert steps.num_kept == sum(1 + len(drafts.get(len(PLAIN_DRAWS) + n, ())) for n in range(len(OTHERS)))
    assert chosen(in_step, params)[: len(PLAIN_DRAWS)] == alone


def test_a_vocabulary_too_large_for_draws_in_a_step_is_chosen_from_by_numpy(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    fused.config = replace(PLAIN, vocab_size=MOST_TOKENS)
    steps = HostStepModel(fused, Tables(PLAIN).cache())

    assert steps.choose_and_keep(None, [], [GREEDY]) is None  # type: ignore[arg-type]


def test_a_row_that_is_not_of_numbers_has_no_draw_and_its_neighbours_have(kernels: Library, portable: None) -> None:
    weights = {
        name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in random_weights(PLAIN).items()
    }
    fused = FusedLlama(PLAIN, pack_all(weights.items(), kernels.matmul, torch.float32), MAX_LEN, 2, kernels)
    tables = Tables(PLAIN)
    parts = [tables.span(0, 0, 10), Span([7], 9, tables.span(9, 0, 10).block_table)]
    token_ids, positions, attention = lay_out(parts, BLOCK)  # the second reads what nobody has written
    step, cache = ModelStep(token_ids, positions, attention, torch.tensor([9, 10])), tables.cache()
    draw = Draw(0.8, 0, 1.0, -math.inf, 3)
    for draws in ([draw, draw], [draw._replace(top_p=0.5)] * 2):
        chosen, _ = fused.choose_tokens(step, cache, draws)

        assert chosen.scores.isnan().tolist() == [False, True]
        assert int(chosen.ids[0]) == as_numpy_chooses(fused.logits(step, cache)[0], draws[0])


def test_dense_float32_matrices_are_left_to_torch(kernels: Library) -> None:
    with pytest.raises(UnsupportedMatrix, match=r"embed is dense in torch\.float32"):
        pack_all(random_weights(PLAIN).items(), kernels.matmul, torch.float32)


def test_build_batch_feeds_fused_steps(kernels: Library) -> None:
    """The runner's own batches, drafts included, against flat ones."""
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    span = tables.span(0, 0, 8)
    seq = Sequence("r", span.token_ids[:6], SamplingParams(max_tokens=4), 6, [], b"", 0.0)
    seq.block_table = span.block_table
    batch = build_batch(Step([Chunk(seq, 0, 6, 2, span.token_ids[6:])], []), BLOCK)

    logits = fused.logits(step_of(batch), tables.cache())

    assert torch.equal(logits, logits_of(fused, tables.cache(), tables, [(0, 0, 8)])[5:])


@pytest.mark.parametrize("token_id", [-1, PLAIN.vocab_size])
def test_an_id_without_a_row_in_the_embedding_is_refused(token_id: int, kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    _, positions, attention = lay_out([tables.span(0, 0, 2)], BLOCK)

    with pytest.raises(IndexError, match=rf"but the embedding has {PLAIN.vocab_size} rows"):
        fused.logits(ModelStep(torch.tensor([0, token_id]), positions, attention, torch.tensor([1])), tables.cache())
