"""vLLM itself behind the engine's methods, without a platform around it: what it tells of its cache against what it
finds there, adapters against our own engine's answers, and a model in parts.

vLLM lives in an environment of its own; PENSTOCK_VLLM_PYTHON names its interpreter (docs/vllm.md).
"""

import asyncio
import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import save_file

from bench.support.cpu import is_alive
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.store import digest_of
from penstock.prefix.hashing import ChainHasher
from penstock.prefix.index import ApplyResult
from penstock.prefix.plain_index import PlainIndex
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import BlockEvents, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import AdapterSlots, EngineConfig, VllmConfig
from penstock.workers.engine.engine import StepReport
from penstock.workers.engine.sequence import Chunk, Resident, Sequence, Step
from penstock.workers.serving.adapters import Adapters
from penstock.workers.vllm.engine import VllmEngine
from penstock.workers.vllm.launch import make_launch
from penstock.workers.vllm.model import prepare_folder
from tests.unit.adapters.files import config as adapter_config
from tests.unit.workers.adapter_files import write_adapter

PYTHON = os.environ.get("PENSTOCK_VLLM_PYTHON")
if not PYTHON:
    pytest.skip("PENSTOCK_VLLM_PYTHON names no interpreter with vLLM", allow_module_level=True)

pytestmark = [pytest.mark.timeout(900)]

VLLM_BLOCK = 32
HASHER = ChainHasher(bytes(16), 16)
SOURCE = resolve("demo")
ROOT = HASHER.root(SOURCE.digest)
TIMEOUT_S = 300.0
NEW_TOKENS = 8
PROMPT = "The sun is a star. The moon is"


class Served:
    """An engine of vLLM's, and a router's index that follows it."""

    def __init__(self, settings: EngineConfig) -> None:
        self.reports: SimpleQueue[StepReport] = SimpleQueue()
        assert PYTHON is not None
        launch = make_launch(SOURCE, str(prepare_folder(SOURCE)), settings, PYTHON, os.environ, has_adapters=True)
        self.engine = VllmEngine(launch, settings, HASHER, self.reports.put)
        self.index = PlainIndex()
        self.applied: set[ApplyResult] = set()

    def start(self) -> None:
        self.engine.start()
        self.applied.add(self.index.apply("replica", "epoch", self.snapshot()))

    def snapshot(self) -> BlockEvents:
        found: SimpleQueue[BlockEvents] = SimpleQueue()
        self.engine.request_snapshot(found.put)
        return found.get(timeout=TIMEOUT_S)

    def finish(self, *seqs: Sequence) -> None:
        """Compute sequences to their ends."""
        for seq in seqs:
            self.engine.submit(seq)
        deadline = time.monotonic() + TIMEOUT_S
        while any(seq.finish is None for seq in seqs):
            self._follow(self.reports.get(timeout=deadline - time.monotonic()))
        while not self.reports.empty():
            self._follow(self.reports.get())
        assert [seq.error for seq in seqs] == [None] * len(seqs)

    def _follow(self, report: StepReport) -> None:
        if report.events is not None:
            self.applied.add(self.index.apply("replica", "epoch", report.events))

    def num_expected(self, seq: Sequence) -> int:
        """Tokens of the prompt that the index says vLLM has."""
        return 16 * self.index.lookup(seq.block_keys, 0.0).get("replica", 0)


def settings(**changes: Any) -> EngineConfig:
    args = {"enforce_eager": True, "block_size": VLLM_BLOCK}
    return EngineConfig(
        runner="vllm", dtype="float32", threads=1, max_num_seqs=4, max_batched_tokens=512, kv_memory_bytes=64 * 2**20,
        adapters=AdapterSlots(slots=2, max_rank=8), vllm=VllmConfig(args=args, start_timeout_s=600.0), **changes,
    )  # fmt: skip


@contextmanager
def serving(engine_config: EngineConfig) -> Iterator[Served]:
    served = Served(engine_config)
    served.start()
    try:
        yield served
    finally:
        assert served.engine.stop(timeout_s=30.0)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(settings()) as found:
        yield found


def sequence(
    token_ids: Seq[int], adapter: Resident | None = None, tenant: str = "acme", max_tokens: int = NEW_TOKENS
) -> Sequence:
    """A tenant's greedy sequence, with the keys that a router would give it."""
    digest = None if adapter is None else adapter.digest
    root = HASHER.add_salt(HASHER.root(SOURCE.digest, digest), tenant.encode())
    keys = HASHER.extend(root, list(token_ids))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Sequence(
        "q", list(token_ids), sampling, len(token_ids), keys, keys[-1] if keys else root, time.monotonic(),
        adapter=digest, tenant=tenant, lora=adapter,
    )  # fmt: skip


def prompt() -> list[int]:
    return load_tokenizer(SOURCE).encode(PROMPT, add_special=True)


def random_prompt(draw: Random) -> list[int]:
    """Not of whole blocks: vLLM computes the last token of a prompt, and so the whole block that ends with it."""
    return [draw.randrange(1000, 40000) for _ in range(draw.randrange(100, 420) | 1)]


def test_vllm_finds_in_its_cache_what_its_events_have_told_and_nothing_else(served: Served) -> None:
    """Prompts come again, long after or at once, for the same tenant or another, while others take their blocks."""
    draw = Random(3)
    prompts = [random_prompt(draw) for _ in range(6)]
    found, expected = [], []
    for turn in range(40):
        token_ids = prompts[draw.randrange(len(prompts) if turn > 10 else 3)]
        seq = sequence(token_ids, tenant=draw.choice(["acme", "acme", "other"]), max_tokens=2)
        expected.append(served.num_expected(seq))
        served.finish(seq)
        found.append(seq.num_cached_tokens)

    assert found == expected
    assert sum(number > 0 for number in expected) > 8
    assert expected.count(0) > 8, "nothing was ever given up"
    assert served.applied == {ApplyResult.OK}
    assert served.index.held("replica") == frozenset(
        served.snapshot().stored[at : at + 16] for at in range(0, len(served.snapshot().stored), 16)
    )


def test_an_answer_continues_its_prompts_chain(served: Served) -> None:
    """The next turn of a chat has the answer in its prompt."""
    token_ids = random_prompt(Random(5))[:90]
    first = sequence(token_ids, max_tokens=2 * VLLM_BLOCK)
    served.finish(first)
    second = sequence(first.token_ids, max_tokens=1)

    computed = len(first.token_ids) - 1  # the last token of the answer was not computed
    assert served.num_expected(second) == computed // VLLM_BLOCK * VLLM_BLOCK
    served.finish(second)
    assert second.num_cached_tokens == computed // VLLM_BLOCK * VLLM_BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def digests(folder: Path) -> list[str]:
    return [write_adapter(folder, SOURCE, seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def ours(folder: Path, digests: list[str]) -> dict[str | None, list[int]]:
    """Answers of our own engine, of the base and of each adapter."""
    before = torch.get_num_threads()
    runner = load_runner(SOURCE, EngineConfig(dtype="float32", threads=1, kv_memory_bytes=64 * 2**20))
    found: dict[str | None, list[int]] = {}
    for digest in (None, *digests):
        adapter = None if digest is None else runner.load_adapter(digest, folder / digest, 8)
        seq = sequence(prompt(), adapter)
        seq.block_table = [0, 1]
        while seq.num_output_tokens < NEW_TOKENS:
            step = Step([Chunk(seq, seq.num_computed_tokens, seq.num_uncomputed_tokens)], [])
            ((chosen,),) = runner.launch(step)()
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(chosen.token_id)
        found[digest] = seq.token_ids[seq.num_prompt_tokens :]
    torch.set_num_threads(before)
    return found


async def pinned(adapters: Adapters, digest: str) -> Resident:
    """The adapter, as a sequence that waits for it gets it."""
    waiting: asyncio.Future[Resident] = asyncio.get_running_loop().create_future()

    def fail(why: str) -> None:
        waiting.set_exception(AssertionError(why))

    adapters.want(digest, waiting.set_result, fail)
    return await asyncio.wait_for(waiting, TIMEOUT_S)


async def test_adapters_answer_as_on_our_own_engine_also_when_they_take_turns_in_the_slots(
    served: Served, folder: Path, digests: list[str], ours: dict[str | None, list[int]]
) -> None:
    """Two slots; twice around, so that each was given up and came back."""
    load = partial(served.engine.load_adapter, max_rank=8)
    adapters = Adapters(folder, load, 2, unload=served.engine.unload_adapter)
    for digest in digests * 2:
        adapter = await pinned(adapters, digest)
        seq, base = sequence(prompt(), adapter), sequence(prompt())
        await asyncio.to_thread(served.finish, seq, base)
        adapters.release(digest)

        said = [found.token_ids[found.num_prompt_tokens :] for found in (seq, base)]
        assert said == [ours[digest], ours[None]]
    for digest in digests:
        adapters.drop(digest)
    adapters.stop()
    assert len({tuple(answer) for answer in ours.values()}) == 4, "adapters change nothing, so nothing was compared"


async def test_two_adapters_and_the_base_answer_in_one_batch(
    served: Served, folder: Path, digests: list[str], ours: dict[str | None, list[int]]
) -> None:
    loaded = [
        await asyncio.to_thread(served.engine.load_adapter, digest, folder / digest, max_rank=8)
        for digest in digests[:2]
    ]
    seqs = [sequence(prompt(), adapter) for adapter in (*loaded, None)]
    await asyncio.to_thread(served.finish, *seqs)
    for adapter in loaded:
        served.engine.unload_adapter(adapter)

    assert [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs] == [ours[digests[0]], ours[digests[1]], ours[None]]


def test_an_adapter_that_vllm_does_not_take_is_refused_and_the_others_go_on(served: Served, tmp_path: Path) -> None:
    place = "base_model.model.model.layers.0.self_attn.no_such_proj"
    tensors = {f"{place}.lora_A.weight": torch.ones(2, 576), f"{place}.lora_B.weight": torch.ones(576, 2)}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_bytes(msgspec.json.encode(adapter_config(target_modules=["no_such_proj"])))

    with pytest.raises(InvalidRequest, match="ValueError"):
        served.engine.load_adapter(digest_of(tmp_path), tmp_path, max_rank=8)
    served.finish(seq := sequence(prompt()))
    assert seq.num_output_tokens == NEW_TOKENS


@pytest.mark.slow
def test_a_model_in_three_parts_answers_as_the_whole_one_with_its_adapters_and_its_events(
    folder: Path, digests: list[str], ours: dict[str | None, list[int]]
) -> None:
    """The demo model's nine query heads over three key/value heads, a process a part."""
    with serving(settings(tensor_parallel_size=3)) as divided:
        adapter = divided.engine.load_adapter(digests[0], folder / digests[0], max_rank=8)
        base, adapted = sequence(prompt()), sequence(prompt(), adapter)
        divided.finish(base, adapted)
        long = random_prompt(Random(7))
        divided.finish(sequence(long, max_tokens=1))
        again = sequence(long, max_tokens=1)
        expected = divided.num_expected(again)
        divided.finish(again)
        child = divided.engine._child
        assert child is not None
        started = psutil.Process(child.pid).children(recursive=True)

    assert [seq.token_ids[seq.num_prompt_tokens :] for seq in (base, adapted)] == [ours[None], ours[digests[0]]]
    assert again.num_cached_tokens == expected > 0
    assert len(started) >= 3
    assert not any(is_alive(process) for process in started)
