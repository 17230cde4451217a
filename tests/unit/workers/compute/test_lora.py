"""Adapters against peft: several and the base in one step, any chunking, drafts, int4 base weights, the exact mode's
bits."""

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from penstock.adapters.store import digest_of
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute import lora
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.lora import FUSED, LoraAdapter, group_rows_by_adapter, load_lora
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import step_of
from penstock.workers.compute.quant.quantized import TorchQuantizedMatrix, quantize
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.step_model import HostStepModel
from penstock.workers.compute.weights import load_weights
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.tiny_models import saved, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK_SIZE, NUM_BLOCKS = 4, 96


class Harness:
    """A model over a poisoned cache; sequences with and without an adapter."""

    def __init__(self, source: ModelSource, *, exact: bool = False, quantized: str | None = None) -> None:
        self.config = read_config(source)
        weights: dict[str, Any] = dict(load_weights(source, self.config, torch.float32))
        for name, weight in weights.items():
            if quantized is not None and name.rsplit(".")[-1] in FUSED:
                groups = quantize(weight, 32)
                weights[name] = (
                    TorchQuantizedMatrix(groups, torch.float32) if quantized == "int4" else groups.dequantize()
                )
        self.model = Llama(self.config, weights, max_model_len=200, threads=1, exact=exact)
        self.cache = KvCache(self.config, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
        self.cache.poison(torch.arange(NUM_BLOCKS))
        self.free = list(range(NUM_BLOCKS))

    def load(self, folder: Path, max_rank: int = 16) -> LoraAdapter:
        return load_lora(digest_of(folder), folder, self.config, max_rank, torch.float32, base=self.model.weights)

    def sequence(self, token_ids: list[int], adapter: LoraAdapter | None = None) -> Sequence:
        seq = Sequence("r", token_ids, SamplingParams(max_tokens=1), len(token_ids), [], b"", 0.0, lora=adapter)
        seq.block_table = [self.free.pop() for _ in range(-(-len(token_ids) // BLOCK_SIZE))]
        return seq

    def run(self, *parts: tuple[Sequence, int]) -> list[Tensor]:
        """Compute so many more tokens of each sequence in one step; logits [count, vocab] of all of them."""
        step = Step([Chunk(seq, seq.num_computed_tokens, count) for seq, count in parts], [])
        with torch.inference_mode():
            batch = build_batch(step, BLOCK_SIZE)
            rows = torch.arange(sum(count for _, count in parts))
            logits = self.model.logits(step_of(batch, group_rows_by_adapter(step.chunks), rows), self.cache)
        for chunk in step.chunks:
            chunk.seq.num_computed_tokens = chunk.end
        return list(torch.split(logits, [count for _, count in parts]))


def expected(model: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def tokens(count: int, seed: int = 1) -> list[int]:
    return [random.Random(seed + 100 * i).randrange(96) for i in range(count)]


@pytest.mark.parametrize("kind", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_two_adapters_and_the_base_in_one_step_have_the_logits_of_peft(kind: str, tmp_path: Path) -> None:
    harness = Harness(saved(tiny_model(kind), tmp_path / "base"))
    first = adapted(tiny_model(kind), tmp_path / "first", seed=1, rank=4)
    second = adapted(
        tiny_model(kind),
        tmp_path / "second",
        seed=2,
        rank=8,
        targets=("q_proj", "v_proj", "down_proj"),
        use_rslora=True,
    )
    prompts = [tokens(30), tokens(21, seed=2), tokens(25, seed=3)]
    a, b = (
        harness.sequence(prompts[0], harness.load(tmp_path / "first")),
        harness.sequence(prompts[1], harness.load(tmp_path / "second")),
    )
    c = harness.sequence(prompts[2])

    steps = [harness.run((a, 10), (c, 25), (b, 20)), harness.run((b, 1), (a, 19)), harness.run((a, 1))]

    of_a, of_b = torch.cat([steps[0][0], steps[1][1], steps[2][0]]), torch.cat([steps[0][2], steps[1][0]])
    base = tiny_model(kind)
    torch.testing.assert_close(of_a, expected(first, prompts[0]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_b, expected(second, prompts[1]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(steps[0][1], expected(base, prompts[2]), atol=2e-5, rtol=1e-4)
    for model, prompt in ((first, prompts[0]), (second, prompts[1])):
        assert (expected(model, prompt) - expected(base, prompt)).abs().max() > 0.1, (
            "the adapter moves nothing, so nothing was compared"
        )


@pytest.mark.parametrize("kind", ["llama", "llama-biased", "qwen2"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_dora_and_ranks_and_alphas_per_module_have_the_logits_of_peft(
    kind: str, use_rslora: bool, tmp_path: Path
) -> None:
    """One beside a plain one and the base, one alone in its steps."""
    harness = Harness(saved(tiny_model(kind), tmp_path / "base"))
    oracle = adapted(
        tiny_model(kind),
        tmp_path / "dora",
        seed=1,
        use_dora=True,
        use_rslora=use_rslora,
        rank_pattern={"v_proj": 128, "layers.1.mlp.up_proj": 7, "k_proj": 1},
        alpha_pattern={"^model.layers.0.self_attn.q_proj": 3, "down_proj": 5},
    )
    adapted(tiny_model(kind), tmp_path / "plain", seed=2)
    adapter, plain = harness.load(tmp_path / "dora", 128), harness.load(tmp_path / "plain")
    a, b, c = (
        harness.sequence(tokens(30), adapter),
        harness.sequence(tokens(9, seed=2), plain),
        harness.sequence([3, 4]),
    )

    found = torch.cat([harness.run((c, 2), (a, 11), (b, 9))[1], harness.run((a, 18))[0], harness.run((a, 1))[0]])

    torch.testing.assert_close(found, expected(oracle, tokens(30)), atol=3e-4, rtol=3e-4)
    assert adapter.max_rank > 128


def test_where_the_base_can_not_be_read_dora_is_refused(tmp_path: Path) -> None:
    harness = Harness(saved(tiny_model("llama"), tmp_path / "base"))
    adapted(tiny_model("llama"), tmp_path / "dora", seed=1, use_dora=True)

    with pytest.raises(InvalidRequest, match=r"DoRA \(use_dora\) is served on CPUs"):
        load_lora(digest_of(tmp_path / "dora"), tmp_path / "dora", harness.config, 16, torch.float32)


def test_two_sequences_of_one_adapter_share_its_products(tmp_path: Path) -> None:
    harness = Harness(saved(tiny_model("llama"), tmp_path / "base"))
    oracle = adapted(tiny_model("llama"), tmp_path / "a", seed=1)
    adapter = harness.load(tmp_path / "a")
    a, b = harness.sequence(tokens(12), adapter), harness.sequence(tokens(9, seed=2), adapter)

    adapter_rows = group_rows_by_adapter([Chunk(a, 0, 12), Chunk(b, 0, 9)])
    of_a, of_b = harness.run((a, 12), (b, 9))

    assert [(share.adapter, share.rows) for share in adapter_rows] == [(adapter, None)]
    torch.testing.assert_close(of_a, expected(oracle, tokens(12)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_b, expected(oracle, tokens(9, seed=2)), atol=1e-4, rtol=1e-4)


def test_the_rows_of_a_draft_belong_to_its_sequences_adapter(tmp_path: Path) -> None:
    harness = Harness(saved(tiny_model("llama"), tmp_path / "base"))
    adapted(tiny_model("llama"), tmp_path / "a", seed=1)
    adapter = harness.load(tmp_path / "a")
    plain, own = harness.sequence(tokens(5)), harness.sequence(tokens(6), adapter)

    adapter_rows = group_rows_by_adapter(
        [Chunk(plain, 4, 1, 2, [7, 8]), Chunk(own, 5, 1, 3, [1]), Chunk(plain, 0, 2), Chunk(own, 0, 2)]
    )

    assert len(adapter_rows) == 1
    assert adapter_rows[0].rows is not None
    assert adapter_rows[0].rows.tolist() == [3, 4, 7, 8]


def test_a_step_without_adapters_has_no_shares(tmp_path: Path) -> None:
    harness = Harness(saved(tiny_model("llama"), tmp_path))

    assert group_rows_by_adapter([Chunk(harness.sequence(tokens(5)), 0, 5)]) == []


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_on_int4_weights_adds_what_it_adds_to_the_same_weights_dense(use_dora: bool, tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path / "base")
    adapted(tiny_model("llama"), tmp_path / "a", seed=1, use_dora=use_dora)
    logits = []
    for is_packed in (True, False):
        harness = Harness(source, quantized="int4" if is_packed else "dense")
        seq, other = harness.sequence(tokens(20), harness.load(tmp_path / "a")), harness.sequence(tokens(8, seed=2))
        logits.append(torch.cat(harness.run((other, 8), (seq, 20))))

    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rank", "use_dora"), [(1, False), (4, False), (4, True), (16, False)])
def test_exact_logits_are_the_same_bits_whatever_adapters_run_beside(rank: int, use_dora: bool, tmp_path: Path) -> None:
    source = saved(tiny_model("qwen3"), tmp_path / "base")
    for name, seed in (("first", 1), ("second", 2)):
        adapted(tiny_model("qwen3"), tmp_path / name, seed=seed, rank=rank, use_dora=use_dora)
    alone, crowded = Harness(source, exact=True), Harness(source, exact=True)
    whole = alone.run((alone.sequence(tokens(37), alone.load(tmp_path / "first")), 37))[0]
    first, second = crowded.load(tmp_path / "first"), crowded.load(tmp_path / "second")
    a, b, c, d = (
        crowded.sequence(tokens(37, seed), adapter)
        for seed, adapter in ((1, first), (2, second), (3, None), (4, first))
    )

    steps = [
        crowded.run((d, 30), (b, 30), (a, 18)),
        crowded.run((b, 1), (a, 1), (c, 3)),
        crowded.run((a, 17), (b, 6)),
        crowded.run((a, 1), (d, 7)),
    ]

    assert torch.equal(whole, torch.cat([steps[0][2], steps[1][1], steps[2][0], steps[3][0]]))


def test_numbers_that_overflow_in_an_adapter_spoil_no_row_but_its_own(tmp_path: Path) -> None:
    harness = Harness(saved(tiny_model("llama"), tmp_path / "base"))
    adapted(tiny_model("llama"), tmp_path / "huge", seed=1, size=1e20)
    huge, plain = harness.sequence(tokens(12), harness.load(tmp_path / "huge")), harness.sequence(tokens(30))

    steps = [harness.run((huge, 11), (plain, 29)), harness.run((plain, 1), (huge, 1))]

    assert not steps[1][1].isfinite().any(), "the adapter does not overflow, so nothing was tried"
    torch.testing.assert_close(
        torch.cat([steps[0][1], steps[1][0]]), expected(tiny_model("llama"), tokens(30)), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_adapter_whose_numbers_overflow_ends_its_own_sequence_alone(temperature: float, tmp_path: Path) -> None:
    source = saved(tiny_model("llama"), tmp_path / "base")
    adapted(tiny_model("llama"), tmp_path / "huge", seed=1, size=1e20)
    adapted(tiny_model("llama"), tmp_path / "good", seed=2)

    def run(folders: list[Path | None]) -> list[Sequence]:
        harness, pool = Harness(source, exact=True), BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        runner = TorchRunner(HostStepModel(harness.model, harness.cache), Sampler(96), 200)
        hasher = ChainHasher(b"a secret for adapters", BLOCK_SIZE)
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=8, max_batched_tokens=8)
        scheduler = Scheduler(pool, hasher, config, 200, frozenset())
        seqs: list[Sequence] = []
        for folder in folders:
            adapter = None if folder is None else harness.load(folder)
            digest = None if adapter is None else adapter.digest
            sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=5)
            root = hasher.root("tiny", digest)
            seqs.append(Sequence("r", tokens(13), sampling, 13, [], root, 0.0, adapter=digest, lora=adapter))
            scheduler.add(seqs[-1])
        while scheduler.has_work:
            step = scheduler.schedule()
            scheduler.commit(step, runner.launch(step)())
            pool.check(scheduler.running)
        assert all(not pool.match(seq.block_keys, 1) for seq in seqs if seq.finish is Finish.ERROR)
        return seqs

    huge, *others = run([tmp_path / "huge", None, tmp_path / "good"])
    alone = run([None, tmp_path / "good"])

    assert huge.finish is Finish.ERROR
    assert huge.error is not None
    assert "not numbers" in huge.error
    assert str(huge.adapter) in huge.error
    assert [seq.token_ids for seq in others] == [seq.token_ids for seq in alone]
    assert all(seq.finish is Finish.LENGTH for seq in others)


def generate(
    source: ModelSource, folders: list[Path | None], method: Literal["none", "ngram", "draft"]
) -> tuple[list[list[int]], int]:
    """Tokens of seeded sequences that run beside each other, one for each adapter (None: the base), and how many
    drafted tokens were right."""
    harness, sampler = Harness(source, exact=True), Sampler(96)
    draft_cache = KvCache(harness.config, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    drafter = {"none": None, "ngram": NgramDrafter(), "draft": DraftModel(harness.model, draft_cache, sampler, 200)}[
        method
    ]
    runner, pool = (
        TorchRunner(HostStepModel(harness.model, harness.cache), sampler, 200, drafter),
        BlockPool(NUM_BLOCKS, BLOCK_SIZE),
    )
    speculation = SpeculationConfig(method="none" if drafter is None else "ngram", max_draft_tokens=3, adaptive=False)
    hasher = ChainHasher(b"a secret for adapters", BLOCK_SIZE)
    scheduler = Scheduler(pool, hasher, EngineConfig(block_size=BLOCK_SIZE, speculation=speculation), 200, frozenset())
    seqs = []
    for number, folder in enumerate(folders):
        adapter = None if folder is None else harness.load(folder)
        root = hasher.root("tiny", None if adapter is None else adapter.digest)
        sampling = SamplingParams(max_tokens=24, temperature=0.7 * (number % 2), seed=5)
        seqs.append(Sequence("r", tokens(13), sampling, 13, hasher.extend(root, tokens(13)), root, 0.0, lora=adapter))
        seqs[-1].chain_key = seqs[-1].block_keys[-1]
        scheduler.add(seqs[-1])
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.commit(step, runner.launch(step)())
        pool.check(scheduler.running)
    return [seq.token_ids[13:] for seq in seqs], scheduler.drafts.num_accepted


def test_what_an_adapter_says_is_the_same_with_any_drafter_as_with_none(tmp_path: Path) -> None:
    """The draft model is the base: it proposes without the adapter, and is right now and then."""
    source = saved(tiny_model("llama"), tmp_path / "base")
    for name, seed in (("first", 1), ("second", 2)):
        adapted(tiny_model("llama"), tmp_path / name, seed=seed)
    folders = [tmp_path / "first", tmp_path / "first", None, tmp_path / "second"]

    plain, none_accepted = generate(source, folders, "none")
    drafted = {method: generate(source, folders, method) for method in ("ngram", "draft")}

    assert len({tuple(token_ids) for token_ids in plain}) == len(folders)
    assert none_accepted == 0
    for token_ids, num_accepted in drafted.values():
        assert token_ids == plain
        assert num_accepted > 0


def test_what_does_not_fit_or_is_damaged_is_refused(tmp_path: Path) -> None:
    harness = Harness(saved(tiny_model("llama"), tmp_path / "base"))
    adapted(tiny_model("llama"), tmp_path / "a", seed=1, rank=8)
    adapted(tiny_model("llama", hidden_size=96), tmp_path / "wide", seed=1)
    adapted(tiny_model("llama"), tmp_path / "nan", seed=1, size=float("inf"))

    with pytest.raises(InvalidRequest, match="rank is 8; this model serves ranks up to 4"):
        harness.load(tmp_path / "a", max_rank=4)
    with pytest.raises(InvalidRequest, match=r"has the shape \[96, 4\]; rank 4 and the base model ask for \[64, 4\]"):
        harness.load(tmp_path / "wide")
    with pytest.raises(InvalidRequest, match="not finite"):
        harness.load(tmp_path / "nan")
    with pytest.raises(InvalidRequest, match="not those of its digest"):
        load_lora("0" * 32, tmp_path / "a", harness.config, 8, torch.float32)


def test_adapters_of_the_kernels_form_are_read_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has its other threads back afterwards, also from an adapter that is refused."""
    adapted(tiny_model("llama"), tmp_path / "a", seed=1)
    config = read_config(saved(tiny_model("llama"), tmp_path / "base"))
    counts: list[int] = []

    def pack(*_: object) -> LoraAdapter:
        counts.append(torch.get_num_threads())
        raise InvalidRequest("refused")

    monkeypatch.setattr(lora, "pack_adapter", pack)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(InvalidRequest, match="refused"):
            load_lora(digest_of(tmp_path / "a"), tmp_path / "a", config, 8, torch.bfloat16, packed_bits=8)
        assert counts == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
