"""Adapters in fused steps against torch's: every feature of the family, ranks even and odd, several adapters and the
base in one step, drafts, pieces of prompts, 8-bit KV."""

import math
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from penstock.adapters.store import digest_of
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import lay_out
from penstock.workers.compute.kernels.choice import GREEDY
from penstock.workers.compute.kernels.decoder import Activations
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.lora import FUSED, AdapterRows, LoraAdapter, LowRank, Part, make_adapter, pack_adapter
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.fused import FusedLlama
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.quant.packed import pack_all
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.step_model import HostStepModel
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.fused_models import (
    CONFIGS,
    MAX_LEN,
    PLAIN,
    QUANTIZED,
    STEPS,
    Tables,
    make_pair,
    most_error,
    quantized_weights,
    random_weights,
)
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.tiny_models import tiny_model, written_as_gguf

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Parts = list[tuple[int, int, int]]
MODULES = tuple(module for modules in FUSED.values() for module in modules)
RANKS = (1, 2, 3, 8, 17, 64)


def matrices(
    config: ModelConfig, seed: int, modules: tuple[str, ...], size: float, biases: Mapping[str, Tensor] | None
) -> list[dict[str, LowRank]]:
    """An adapter's, of numbers that bfloat16 and 8 bits have too, each module with a rank of its own. size: of a number
    of A, about. biases: the base model's, by the names of its weights; with them it is DoRA."""
    draw, ranks = torch.Generator().manual_seed(seed), random.Random(seed)

    def drawn(rows: int, columns: int, size: float) -> Tensor:
        steps = torch.randint(-127, 128, (rows, columns), generator=draw).float()
        steps[:, 0] = 127
        return steps * 2.0 ** round(math.log2(size / 73))

    layers: list[dict[str, LowRank]] = []
    for index in range(config.num_layers):
        layer: dict[str, LowRank] = {}
        for name, of_matrix in FUSED.items():
            a: list[Tensor] = []
            parts: list[Part] = []
            start = 0
            for module in of_matrix:
                outputs, inputs = config.linear_shapes[module]
                if module in modules:
                    rank = ranks.choice(RANKS)
                    a.append(drawn(rank, inputs, size))
                    part = Part(start, start + outputs, drawn(outputs, rank, size / rank**0.5))
                    if biases is not None:
                        bias = biases.get(f"layers.{index}.{name}_bias")
                        factor = 1 + 0.3 * torch.randn(outputs, generator=draw)
                        part = part._replace(factor=factor, bias=None if bias is None else bias[start : part.end])
                    parts.append(part)
                start += outputs
            if parts:
                layer[name] = LowRank(torch.cat(a), parts)
        layers.append(layer)
    return layers


class Pair:
    """Adapters of sequences, once as torch's layers take them and once packed."""

    def __init__(
        self,
        config: ModelConfig,
        of_sequences: Mapping[int, int],
        size: float = 0.1,
        biases: Mapping[str, Tensor] | None = None,
        bits: int = 16,
    ) -> None:
        """Adapters of these seeds, by sequence. Odd ones adapt some modules only. biases: as of `matrices`."""
        seeds = set(of_sequences.values())
        layers = {
            seed: matrices(config, seed, MODULES[seed % len(MODULES) :: 2] if seed % 2 else MODULES, size, biases)
            for seed in seeds
        }
        plain = {seed: make_adapter("digest", layers[seed], 0) for seed in seeds}
        packed = {seed: pack_adapter("digest", layers[seed], bits) for seed in seeds}
        self.plain = {seq: plain[seed] for seq, seed in of_sequences.items()}
        self.packed = {seq: packed[seed] for seq, seed in of_sequences.items()}


ADAPTERS = {0: 2, 1: 3, 3: 2}
"""Sequence 2 is the base's."""


def rows_of(parts: Parts, adapters: Mapping[int, LoraAdapter]) -> list[AdapterRows]:
    found: dict[int, tuple[LoraAdapter, list[int]]] = {}
    start = 0
    for seq, _, count in parts:
        if seq in adapters:
            adapter = adapters[seq]
            found.setdefault(id(adapter), (adapter, []))[1].extend(range(start, start + count))
        start += count
    return [AdapterRows(adapter, torch.tensor(rows)) for adapter, rows in found.values()]


def step_of_parts(tables: Tables, parts: Parts, adapters: Mapping[int, LoraAdapter], every: int = 1) -> ModelStep:
    token_ids, positions, attention = lay_out([tables.span(*part) for part in parts], 16)
    rows = torch.arange(0, len(token_ids), every)
    return ModelStep(token_ids, positions, attention, rows, rows_of(parts, adapters))


def logits_of(
    model: Llama | FusedLlama,
    cache: KvCache,
    tables: Tables,
    parts: Parts,
    adapters: Mapping[int, LoraAdapter],
    every: int = 1,
) -> Tensor:
    with torch.inference_mode():
        return model.logits(step_of_parts(tables, parts, adapters, every), cache)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("is_dora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_torch_with_several_adapters_and_the_base(
    name: str, is_dora: bool, bits: int, kernels: Library
) -> None:
    config = CONFIGS[name]
    adapters = Pair(config, ADAPTERS, biases=random_weights(config) if is_dora else None, bits=bits)
    tables = Tables(config)
    assert kernels.matmul.set_level(Level.PORTABLE)  # products in float32
    try:
        oracle, fused = make_pair(config, kernels)
        caches = tables.cache(), tables.cache()
        for parts in STEPS:
            expected = logits_of(oracle, caches[0], tables, parts, adapters.plain)
            found = logits_of(fused, caches[1], tables, parts, adapters.packed)
            torch.testing.assert_close(found, expected, atol=3e-4, rtol=3e-4)
        base = logits_of(fused, tables.cache(), tables, [(0, 0, 37)], {})
        moved = logits_of(fused, tables.cache(), tables, [(0, 0, 37)], adapters.packed)
    finally:
        kernels.matmul.set_level(None)

    assert (moved - base).square().mean().sqrt() > 0.1 * base.std(), "the adapter moves nothing: nothing was compared"


def test_of_the_last_layer_only_rows_with_logits_go_on_and_keep_their_adapters(kernels: Library) -> None:
    adapters = Pair(PLAIN, ADAPTERS)
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    parts: Parts = [(0, 0, 9), (2, 0, 7), (1, 0, 12), (3, 0, 5)]

    whole = logits_of(fused, tables.cache(), tables, parts, adapters.packed)
    some = logits_of(fused, tables.cache(), tables, parts, adapters.packed, every=5)

    # products with as many rows as here may take another path than with few
    torch.testing.assert_close(some, whole[::5], atol=2e-2, rtol=2e-2)
    assert torch.equal(some.argmax(-1), whole[::5].argmax(-1))


@pytest.mark.parametrize("level", [None, Level.VNNI, Level.AVX2, Level.PORTABLE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bits", [16, 8])
def test_every_level_and_cache_type_gives_nearly_the_same_logits(
    level: Level | None, dtype: torch.dtype, bits: int, kernels: Library
) -> None:
    config = CONFIGS["wide groups"]
    adapters = Pair(config, ADAPTERS, bits=bits)
    oracle, fused = make_pair(config, kernels)
    tables = Tables(config)
    caches = tables.cache(), tables.cache(dtype)
    if not kernels.matmul.set_level(level):
        pytest.skip("this CPU does not have these instructions")
    try:
        for parts in STEPS:
            expected = logits_of(oracle, caches[0], tables, parts, adapters.plain)
            found = logits_of(fused, caches[1], tables, parts, adapters.packed)
            assert (found - expected).square().mean().sqrt() < 0.04 * expected.std()
    finally:
        kernels.matmul.set_level(None)


@pytest.mark.parametrize("name", QUANTIZED)
def test_beside_quantized_matrices_logits_are_torchs_within_their_rounding(name: str, kernels: Library) -> None:
    config = QUANTIZED[name]
    weights = quantized_weights(config)
    dense = {name: weight if isinstance(weight, Tensor) else weight.dequantize() for name, weight in weights.items()}
    packed = pack_all(weights.items(), kernels.matmul, torch.float32)
    oracle = Llama(config, dense, MAX_LEN, 1, exact=False)
    adapters = Pair(config, ADAPTERS, bits=8)

    for activations in Activations:
        fused = FusedLlama(config, packed, MAX_LEN, 2, kernels, activations)
        tables = Tables(config)
        caches = tables.cache(), tables.cache()
        for parts in STEPS:
            expected = logits_of(oracle, caches[0], tables, parts, adapters.plain)
            found = logits_of(fused, caches[1], tables, parts, adapters.packed)
            error = float((found - expected).square().mean().sqrt() / expected.std())
            assert error < most_error(activations, 37, kernels.matmul.level()), (activations, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_row_has_the_same_bits_alone_and_beside_other_adapters(
    dtype: torch.dtype, bits: int, kernels: Library
) -> None:
    adapters = Pair(PLAIN, {0: 2, 1: 3, 3: 2, 4: 4}, bits=bits).packed
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    together, alone = tables.cache(dtype), tables.cache(dtype)
    parts: Parts = [(0, 0, 3), (1, 0, 4), (2, 0, 1), (3, 0, 2), (4, 0, 3)]

    whole = logits_of(fused, together, tables, parts, adapters)
    beside = logits_of(fused, together, tables, [(2, 1, 1), (1, 4, 2), (0, 3, 2)], adapters)

    assert torch.equal(torch.cat([logits_of(fused, alone, tables, [part], adapters) for part in parts]), whole)
    assert torch.equal(logits_of(fused, alone, tables, [(0, 3, 2)], adapters), beside[3:])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("bits", [16, 8])
def test_any_number_of_threads_gives_the_same_bits(threads: int, bits: int, kernels: Library) -> None:
    config = CONFIGS["untied, with biases"]
    adapters = Pair(config, ADAPTERS, bits=bits).packed
    one, several = (make_pair(config, kernels, count)[1] for count in (1, threads))
    tables = Tables(config)
    caches = tables.cache(), tables.cache()

    for parts in STEPS:
        assert torch.equal(
            logits_of(one, caches[0], tables, parts, adapters), logits_of(several, caches[1], tables, parts, adapters)
        )


@pytest.mark.parametrize("bits", [16, 8])
def test_numbers_that_overflow_in_an_adapter_spoil_no_row_but_its_own(bits: int, kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    huge = Pair(PLAIN, {0: 2}, size=1e25, bits=bits).packed
    tables = Tables(PLAIN)
    parts: Parts = [(0, 0, 9), (1, 0, 6)]

    found = logits_of(fused, tables.cache(), tables, parts, huge)

    assert not found[:9].isfinite().any(), "the adapter does not overflow, so nothing was tried"
    assert torch.equal(found[9:], logits_of(fused, tables.cache(), tables, parts, {})[9:])


def test_a_fresh_adapter_whose_b_is_zeros_leaves_the_base_as_it_is(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    fresh = matrices(PLAIN, 2, MODULES, 0.1, None)
    fresh = [
        {name: LowRank(each.a, [part._replace(b=0 * part.b) for part in each.parts]) for name, each in layer.items()}
        for layer in fresh
    ]
    tables = Tables(PLAIN)

    for bits in (16, 8):
        found = logits_of(fused, tables.cache(), tables, [(0, 0, 9)], {0: pack_adapter("digest", fresh, bits)})
        assert torch.equal(found, logits_of(fused, tables.cache(), tables, [(0, 0, 9)], {}))


def test_greedy_tokens_are_those_of_the_logits(kernels: Library) -> None:
    adapters = Pair(PLAIN, ADAPTERS).packed
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    step = step_of_parts(tables, [(0, 0, 30), (1, 0, 7), (2, 0, 3)], adapters)
    wanted = [place % 3 == 0 for place in range(40)]
    draws = [None if is_wanted else GREEDY for is_wanted in wanted]

    logits = fused.logits(step, tables.cache())
    best = fused.greedy_tokens(step, tables.cache())
    again, some = fused.choose_tokens(step, tables.cache(), draws)

    assert torch.equal(best.ids, logits.argmax(-1))
    assert torch.equal(again.ids, best.ids)
    assert torch.equal(some, logits[torch.tensor(wanted)])


def test_the_runner_chooses_the_same_tokens_with_and_without_logits_beside_an_adapter(kernels: Library) -> None:
    """Drafts of three places; the tokens differ from the base's."""
    _, fused = make_pair(PLAIN, kernels)
    adapter = Pair(PLAIN, {0: 2}, size=0.3).packed[0]
    tables = Tables(PLAIN)

    def tokens(lora: LoraAdapter | None, **params: float) -> list[list[int]]:
        runner = TorchRunner(HostStepModel(fused, tables.cache()), Sampler(PLAIN.vocab_size), MAX_LEN)
        chunks = []
        for seed in (1, 2):
            sampling = SamplingParams(max_tokens=4, temperature=0.0, **params)  # type: ignore[arg-type]
            seq = Sequence("r", [token + seed for token in range(20, 33)], sampling, 13, [], b"", 0.0, lora=lora)
            seq.block_table = tables.span(seed, 0, 16).block_table
            chunks.append(Chunk(seq, 0, 13, 3, [41, 42, 43]))
        found = runner.launch(Step(chunks, []))()
        return [[choice.token_id for choice in choices] for choices in found]

    assert tokens(adapter) == tokens(adapter, presence_penalty=1e-9)
    assert tokens(adapter) != tokens(None)


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_beside_a_quantized_file_has_the_logits_that_it_has_in_float32(
    use_dora: bool, tmp_path: Path
) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)
    adapted(tiny_model("llama"), tmp_path / "a", seed=1, rank=8, use_dora=use_dora, rank_pattern={"v_proj": 3})

    def logits(dtype: str, has_adapter: bool = True) -> Tensor:
        config = EngineConfig(dtype=dtype, threads=1, kv_memory_bytes=2**20)  # type: ignore[arg-type]
        runner = load_runner(source, config, poison=True)
        lora = runner.load_adapter(digest_of(tmp_path / "a"), tmp_path / "a", 8) if has_adapter else None
        seq = Sequence("r", [7], SamplingParams(max_tokens=4), 1, [], b"", 0.0, lora=lora, block_table=[3])
        return runner.forward(Step([Chunk(seq, 0, 1, 3, [91, 30, 7])], []))[1]

    expected, found = logits("float32"), logits("bfloat16")

    assert (found - expected).square().mean().sqrt() < 0.03 * expected.std()
    assert (logits("float32", has_adapter=False) - expected).square().mean().sqrt() > 0.2 * expected.std()
