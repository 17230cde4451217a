"""A model in parts computes what the whole one does: every family, 4-bit weights, adapters, drafts, uneven parts. Ranks
are threads here; their processes are those of `test_steps`."""

import random
from collections.abc import Sequence as Items
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from penstock.adapters.store import digest_of
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.lora import LoraAdapter, group_rows_by_adapter, load_lora
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.llama import KvCache, Llama, largest
from penstock.workers.compute.models.model_step import step_of
from penstock.workers.compute.parallel.cut import cut_adapter, take_own
from penstock.workers.compute.parallel.group import Group
from penstock.workers.compute.parallel.shares import make_shares
from penstock.workers.compute.weights import load_weights, place_on_host, read_weights
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.compute.parallel.thread_group import on_all, thread_backends
from tests.unit.workers.compute.parallel.tiny_awq import saved_as_awq
from tests.unit.workers.compute.test_weights import packed_by_compressed_tensors, saved_as_float8
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.tiny_models import KINDS, saved, tiny_model, written_as_gguf

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK_SIZE, NUM_BLOCKS = 4, 64
UNEVEN = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 200}
"""The demo model's heads, and channels that no number of ranks divides evenly into groups."""


class Whole:
    """A model in one process, over a poisoned cache."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
        self.config = read_config(source)
        self.dtype = dtype
        self.model = Llama(self.config, load_weights(source, self.config, dtype), 200, threads=1, exact=False)
        self.cache = KvCache(self.config, NUM_BLOCKS, BLOCK_SIZE, kv_dtype or dtype)
        self.cache.poison(torch.arange(NUM_BLOCKS))

    def run(self, step: Step, rows: Tensor) -> Tensor:
        with torch.inference_mode():
            batch = build_batch(step, BLOCK_SIZE)
            adapters = group_rows_by_adapter(step.chunks)
            return self.model.compute(step_of(batch, adapters, rows), self.cache)


class Parts:
    """The same model on ranks."""

    def __init__(self, source: ModelSource, size: int, whole: Whole) -> None:
        self.size = size
        self.config = whole.config
        self.shares = make_shares(self.config, size)
        self.models: list[Llama] = []
        for rank, backend in enumerate(thread_backends(size)):
            share = self.shares[rank]
            own = read_weights(source, self.config, whole.dtype, take=take_own(share, self.config))
            weights = place_on_host(own, source, whole.dtype)
            group = Group(backend, self.shares, rank)  # type: ignore[arg-type]
            self.models.append(Llama(share.config_of(self.config), weights, 200, 1, exact=False, peers=group))
        self.caches = [
            KvCache(model.config, NUM_BLOCKS, BLOCK_SIZE, whole.cache.layers[0][0].dtype) for model in self.models
        ]
        for cache in self.caches:
            cache.poison(torch.arange(NUM_BLOCKS))

    def cut(self, adapter: LoraAdapter) -> list[LoraAdapter]:
        return [cut_adapter(adapter, self.config, share, torch.device("cpu")) for share in self.shares]

    def run(
        self,
        step: Step,
        rows: Tensor,
        adapters: dict[LoraAdapter, list[LoraAdapter]] | None = None,
        *,
        greedy: bool = False,
    ) -> list[Tensor]:
        """What each rank has computed."""
        batch, found = build_batch(step, BLOCK_SIZE), group_rows_by_adapter(step.chunks)

        def compute(rank: int) -> Tensor:
            own = [item._replace(adapter=(adapters or {})[item.adapter][rank]) for item in found]
            model = self.models[rank]
            function = model.compute_largest if greedy else model.compute
            own_step = step_of(batch, own, rows.clone())._replace(token_ids=batch.token_ids.clone())
            return function(own_step, self.caches[rank])

        return on_all(self.size, compute)


def tokens(count: int, seed: int) -> list[int]:
    return [random.Random(seed + 100 * i).randrange(96) for i in range(count)]


def sequence(token_ids: list[int], first_block: int, adapter: LoraAdapter | None = None) -> Sequence:
    seq = Sequence("r", token_ids, SamplingParams(max_tokens=1), len(token_ids), [], b"", 0.0, lora=adapter)
    seq.block_table = list(range(first_block, first_block + -(-len(token_ids) // BLOCK_SIZE) + 1))
    return seq


def steps(adapters: Items[LoraAdapter | None] = (None, None)) -> list[Step]:
    """Two sequences: a prompt in two pieces beside another one, then tokens one at a time, one of them with a draft."""
    a, b = sequence(tokens(30, 1), 3, adapters[0]), sequence(tokens(21, 2), 20, adapters[1])
    return [
        Step([Chunk(a, 0, 13), Chunk(b, 0, 20)], []),
        Step([Chunk(a, 13, 16)], []),
        Step([Chunk(b, 20, 1, 2, [5, 9]), Chunk(a, 29, 1)], []),
    ]


def num_rows(step: Step) -> int:
    return sum(chunk.num_tokens + len(chunk.draft or ()) for chunk in step.chunks)


def assert_alike(source: ModelSource, size: int, bound: float = 1e-5, kv_dtype: torch.dtype | None = None) -> None:
    whole = Whole(source, torch.float32, kv_dtype)
    parts = Parts(source, size, whole)
    for step in steps():
        rows = torch.arange(num_rows(step))
        wanted = whole.run(step, rows)

        found = parts.run(step, rows)

        scale = wanted.abs().max()
        for of_rank in found:
            assert torch.equal(of_rank, found[0])
            assert (of_rank - wanted).abs().max() <= bound * scale


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_logits_of_one(kind: str, tmp_path: Path) -> None:
    assert_alike(saved(tiny_model(kind), tmp_path), 2)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["llama-tied", "llama-biased", "qwen2"])
def test_heads_and_channels_need_not_be_even(kind: str, size: int, tmp_path: Path) -> None:
    source = saved(tiny_model(kind, **UNEVEN), tmp_path)

    shares = make_shares(read_config(source), size)

    assert len({len(share.queries) for share in shares}) > 1
    assert_alike(source, size)


@pytest.mark.parametrize(("size", "group_size"), [(2, 32), (4, 32), (2, 64), (4, 64)])
def test_four_bit_weights_in_parts_are_the_same_numbers(size: int, group_size: int, tmp_path: Path) -> None:
    """Groups of 64 columns are cut in the middle by heads of 16."""
    model = tiny_model("llama", intermediate_size=320, num_attention_heads=8, num_key_value_heads=4, head_dim=16)

    assert_alike(saved_as_awq(model, tmp_path, group_size), size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["float8", "int8", "int4 with zeros", "gguf"])
def test_weights_of_other_formats_in_parts_are_the_same_numbers(kind: str, size: int, tmp_path: Path) -> None:
    model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=4)
    groups = {"strategy": "group", "group_size": 32}
    source = {
        "float8": lambda: saved_as_float8(model, tmp_path)[0],
        "int8": lambda: packed_by_compressed_tensors(model, tmp_path, num_bits=8, symmetric=True, **groups)[0],
        "int4 with zeros": lambda: packed_by_compressed_tensors(model, tmp_path, num_bits=4, symmetric=False, **groups)[
            0
        ],
        "gguf": lambda: written_as_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1),
    }[kind]()

    assert_alike(source, size)


def test_keys_and_values_in_8_bits_are_the_same_in_parts(tmp_path: Path) -> None:
    """A rounding that falls the other way moves a number by 1/127 of its head's largest."""
    assert_alike(saved(tiny_model("llama"), tmp_path), 2, bound=2e-2, kv_dtype=torch.int8)


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_in_parts_add_what_they_add_to_the_whole(size: int, tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        return tiny_model("llama", **UNEVEN)

    source = saved(model(), tmp_path / "base")  # type: ignore[arg-type]
    whole = Whole(source, torch.float32, None)
    parts = Parts(source, size, whole)
    adapters: list[LoraAdapter] = []
    for seed, targets in ((1, ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")), (2, ("v_proj", "gate_proj"))):
        folder = tmp_path / str(seed)
        adapted(model(), folder, seed, targets=targets, size=0.3)  # type: ignore[arg-type]
        adapters.append(load_lora(digest_of(folder), folder, whole.config, 16, torch.float32))
    cut = {adapter: parts.cut(adapter) for adapter in adapters}

    plain = Whole(source, torch.float32, None).run(steps()[0], torch.arange(33))
    for index, step in enumerate(steps(adapters)):
        rows = torch.arange(num_rows(step))
        wanted = whole.run(step, rows)
        found = parts.run(step, rows, cut)

        assert (found[0] - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert index or (plain - wanted).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.parametrize("size", [2, 4])
def test_the_largest_logits_are_found_without_the_others(size: int, tmp_path: Path) -> None:
    source = saved(tiny_model("llama-tied"), tmp_path)
    whole = Whole(source, torch.float32, None)
    parts = Parts(source, size, whole)
    step = steps()[0]
    rows = torch.arange(num_rows(step))

    found = parts.run(step, rows, greedy=True)

    wanted = largest(whole.run(step, rows))
    assert torch.equal(found[0][0], wanted[0])
    assert torch.allclose(found[0][1], wanted[1], atol=1e-4)
    assert all(torch.equal(of_rank, found[0]) for of_rank in found)


def test_a_step_in_which_nothing_is_chosen_computes_no_logits(tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    parts = Parts(source, 2, Whole(source, torch.float32, None))
    none = torch.zeros(0, dtype=torch.int64)

    assert [logits.shape for logits in parts.run(steps()[0], none)] == [(0, 96)] * 2
    assert [best.shape for best in parts.run(steps()[0], none, greedy=True)] == [(2, 0)] * 2


def test_of_equal_logits_the_lowest_id_is_taken_and_nan_goes_before_all(tmp_path: Path) -> None:
    shares = make_shares(read_config(saved(tiny_model("llama"), tmp_path)), 2)
    groups = [Group(backend, shares, rank) for rank, backend in enumerate(thread_backends(2))]  # type: ignore[arg-type]
    logits = torch.zeros(3, 96)
    logits[0, [40, 70]] = 7.0
    logits[1, 95] = 1.0
    logits[2, [3, 60]] = torch.tensor([9.0, float("nan")])

    def merge(rank: int) -> Tensor:
        ids = shares[rank].token_ids
        return groups[rank].merge(largest(logits[:, ids.start : ids.stop]))

    found = on_all(2, merge)

    assert found[0][0].tolist() == [40, 95, 60]
    assert found[1][1].isnan().tolist() == [False, False, True]
    assert torch.equal(largest(logits)[0], found[1][0])
