"""Sizes of KV caches: the arithmetic, what is measured for it, and on the CPU all of it for real."""

import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.footprint import most_here
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.lora import LoraAdapter
from penstock.workers.compute.memory import (
    HostMeter,
    Needs,
    Trial,
    adapter_bytes,
    measure,
    plan_left,
    recordings_bytes,
)
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.replay import Recorded
from penstock.workers.compute.warm_up import load_zeros
from penstock.workers.config import AdapterSlots, EngineConfig
from penstock.workers.engine.sequence import Chunk, Resident, Step
from penstock.workers.engine.sequence import Sequence as Answer
from tests.unit.workers.built_kernels import built_kernels
from tests.unit.workers.tiny_models import BLOCK_BYTES, engine_config

GIB, MIB = 2**30, 2**20
SIZE = st.integers(0, 200 * GIB)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@given(st.builds(Needs, SIZE, SIZE, SIZE, SIZE, SIZE), st.floats(0.01, 1))
def test_all_together_take_no_more_than_the_share(needs: Needs, share: float) -> None:
    room = needs.room(share)
    others = needs.taken + needs.steps + needs.recordings + needs.adapters

    assert room >= 0
    assert room == 0 or room + others <= share * needs.total < room + others + 1


def test_a_card_of_80_gib_with_an_8b_in_bfloat16() -> None:
    needs = Needs(80 * GIB, 16 * GIB, 2 * GIB, GIB, GIB)

    assert needs.room(0.9) == 52 * GIB
    assert "KV cache 52.00 GiB, which is 425984 tokens" in needs.describe(0.9, 52 * GIB, 425984)
    assert "engine.memory_share 0.9 gives 72.00: weights and what else was there 16.00" in needs.describe(0.9, 1, 1)


@pytest.mark.parametrize(
    ("largest", "two", "count", "expected"),
    [(0, 0, 0, 0), (100, 100, 1, 100), (100, 107, 41, 380), (100, 90, 41, 100)],
)
def test_recordings_share_the_memory_of_the_largest_and_have_a_little_each(
    largest: int, two: int, count: int, expected: int
) -> None:
    assert recordings_bytes(largest, two, count) == expected


class CountedRunner:
    """Takes memory of a counted device."""

    num_blocks, max_model_len = 4, 64

    def __init__(self, device: "CountedDevice") -> None:
        self._device = device

    def launch(self, step: Step) -> Callable[[], object]:
        self._device.highest = max(self._device.highest, 10 * step.num_tokens)
        return lambda: None

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> Resident:
        raise NotImplementedError

    def forget(self, seq: Answer) -> None:
        pass


class CountedDevice:
    """A device whose weights take 1000 bytes, a cache 50, recordings 300, and 4 more for each number of rows and 3 for
    each of tokens. What the smallest of several recordings loads, 7 bytes, stays."""

    def __init__(self) -> None:
        self.kept, self.own = 1000, 0
        self.highest = 0
        self.made: list[Recorded | None] = []

    def make_trial(self, recorded: Recorded | None) -> Trial:
        self.made.append(recorded)
        taken = 0 if recorded is None else 300 + 4 * len(recorded.rows) + 3 * len(recorded.tokens)
        if recorded is not None and len(recorded.rows) > 1:
            self.kept = 1007
        self.own = 50 + taken
        runner = CountedRunner(self)
        weakref.finalize(runner, self.free)
        return Trial(runner, 50)

    def free(self) -> None:
        self.own = 0

    def total(self) -> int:
        return 100_000

    def used(self) -> int:
        return self.kept + self.own

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return self.highest


@pytest.mark.parametrize(
    ("recorded", "trials", "recordings"),
    [
        (Recorded((1, 2, 4, 8)), [Recorded((8,)), Recorded((1, 8))], 300 + 4 * 4),
        (
            Recorded((1, 2, 4), (16, 20, 26), 8, 32),
            [Recorded((4,), (26,), 8, 32), Recorded((1, 4), (16, 26), 8, 32)],
            300 + 7 * 3,
        ),
        (Recorded((1, 2), (16, 20, 26)), [Recorded((2,), (26,)), Recorded((1, 2), (16, 26))], 300 + 7 * 3),
        (Recorded((1, 2), (16,)), [Recorded((2,), (16,)), Recorded((1, 2), (16,))], 300 + 4 * 2 + 3),
        (Recorded((1,)), [Recorded((1,))], 304),
        (None, [None], 0),
    ],
)
def test_weights_steps_and_recordings_are_measured_apart(
    recorded: Recorded | None, trials: list[Recorded | None], recordings: int
) -> None:
    device = CountedDevice()
    config = EngineConfig(max_num_seqs=8, max_batched_tokens=48)

    needs = measure(device.make_trial, recorded, device, config, 64, adapter_bytes=5)

    assert needs == Needs(100_000, 1000 if len(trials) == 1 else 1007, 10 * 48, recordings, 5)
    # the first trial shows what is loaded once
    assert device.made == ([] if len(trials) == 1 else trials[1:]) + trials


def factor_bytes(model: ModelConfig) -> int:
    """Bytes of DoRA's factors of every linear layer; `load_zeros` has none."""
    return 4 * model.num_layers * sum(outputs for outputs, _ in model.linear_shapes.values())


def test_adapters_are_reckoned_with_as_large_as_they_are_when_loaded(source: ModelSource) -> None:
    model = read_config(source)
    zeros = load_zeros(load_runner(source, engine_config()), model)
    config = EngineConfig(adapters=AdapterSlots(slots=3, max_rank=4))

    assert isinstance(zeros, LoraAdapter)
    assert adapter_bytes(model, config, torch.float32) == 3 * (4 * zeros.num_bytes + factor_bytes(model))


def test_adapters_of_fused_steps_are_reckoned_with_in_the_kernels_form(source: ModelSource) -> None:
    built_kernels()
    model, runner = read_config(source), load_runner(source, msgspec.structs.replace(engine_config(), dtype="bfloat16"))
    if not runner._steps.model.packed_adapter_bits:
        pytest.skip("this CPU has none of the instructions that the kernels are quick with")
    zeros = load_zeros(runner, model)
    config = EngineConfig(adapters=AdapterSlots(slots=3, max_rank=4))

    assert isinstance(zeros, LoraAdapter)
    assert zeros.layers == []
    # ranks are stored in pairs: one takes as much as two
    reckoned = adapter_bytes(model, config, torch.bfloat16, 16)
    assert reckoned == 3 * (2 * zeros.num_bytes + factor_bytes(model))


def test_too_little_room_is_refused_with_what_went_where(source: ModelSource) -> None:
    needs = Needs(GIB, GIB, 0, 0, 0)

    with pytest.raises(ConfigError, match=r"\(auto: 0\) holds 0 KV blocks.*there 1\.00.*Raise engine\.memory_share"):
        plan_left(read_config(source), engine_config(), torch.float32, 0, needs, needs.room(0.9))


def test_a_draft_models_blocks_are_taken_of_what_is_left(source: ModelSource) -> None:
    needs = Needs(GIB, 0, 0, 0, 0)
    planned = plan_left(read_config(source), engine_config(), torch.float32, BLOCK_BYTES, needs, 100 * BLOCK_BYTES)

    assert planned == (50, 200)


def host(folder: Path, limit: str = "max", anonymous: int = 0) -> HostMeter:
    """A process of 200 MiB on a machine with 1000 MiB left."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "self/status").write_text("Name:\tx\nVmHWM:\t  307200 kB\nVmRSS:\t  204800 kB\n")
    (proc / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable:    1024000 kB\n")
    (cgroup / "memory.max").write_text(limit + "\n")
    (cgroup / "memory.stat").write_text(f"anon {anonymous}\nfile 5000\n")
    return HostMeter(proc, cgroup)


def test_without_a_limit_a_replica_may_have_what_the_machine_has_left(tmp_path: Path) -> None:
    assert host(tmp_path).total() == 1200 * MIB


def test_in_a_container_it_may_have_what_others_there_have_not_taken(tmp_path: Path) -> None:
    assert host(tmp_path / "a", str(800 * MIB), 300 * MIB).total() == 700 * MIB
    assert host(tmp_path / "b", str(800 * MIB), 100 * MIB).total() == 800 * MIB
    assert host(tmp_path / "c", str(9000 * MIB), 300 * MIB).total() == 1200 * MIB
    assert host(tmp_path / "d", str(100 * MIB), 300 * MIB).total() == 200 * MIB


def test_what_a_replica_can_ever_have_does_not_depend_on_what_others_hold(tmp_path: Path) -> None:
    for name, limit, expected in (("a", "max", 9999999 * 1024), ("b", str(800 * MIB), 800 * MIB)):
        host(tmp_path / name, limit, 300 * MIB)

        assert most_here(tmp_path / name / "proc", tmp_path / name / "cgroup") == expected


def test_the_peak_of_this_process_is_that_of_what_it_runs() -> None:
    meter = HostMeter()

    def take() -> None:
        torch.ones(64 * MIB // 4).sum()

    assert 56 * MIB < meter.peak(take) < 160 * MIB
    assert meter.peak(lambda: None) < 32 * MIB


def share_for(num_bytes: int) -> float:
    meter = HostMeter()
    return (meter.used() + num_bytes) / meter.total()


def test_a_replica_on_a_cpu_takes_what_its_share_leaves_and_says_what_went_where(
    source: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    config = msgspec.structs.replace(engine_config(), kv_memory_bytes="auto", memory_share=share_for(400 * MIB))
    with caplog.at_level(logging.INFO, "penstock.runner"):
        runner = load_runner(source, config)

    assert 32 * BLOCK_BYTES < runner.num_blocks * BLOCK_BYTES < 500 * MIB
    assert runner.max_model_len == 256
    assert f"which is {runner.num_blocks * config.block_size} tokens." in caplog.text
    seq = Answer("r", [5] * 9, SamplingParams(max_tokens=1, temperature=0.0), 9, [], b"", 0.0, block_table=[7, 3, 1])
    ((choice,),) = runner.launch(Step([Chunk(seq, 0, 9)], []))()
    assert choice.error is None


def test_a_share_that_the_weights_alone_exceed_is_refused(source: ModelSource) -> None:
    config = msgspec.structs.replace(engine_config(), kv_memory_bytes="auto", memory_share=1e-4)

    with pytest.raises(ConfigError, match=r"holds 0 KV blocks.*Raise engine\.memory_share"):
        load_runner(source, config)
