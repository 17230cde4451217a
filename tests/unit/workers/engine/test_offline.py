"""Whole sequences out of an engine without a stream."""

import time
from collections.abc import Callable

import msgspec
import pytest

from penstock.wire.errors import EngineFault
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.config import EngineConfig, TimedConfig
from penstock.workers.engine import offline
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.timed import TimedRunner

CONFIG = EngineConfig(runner="timed", max_num_seqs=4, timed=TimedConfig(base_s=0.001, num_blocks=64))


def test_sequences_come_as_they_end() -> None:
    with OfflineEngine(TimedRunner(CONFIG), CONFIG) as engine:
        for name, count in (("long", 60), ("short", 2), ("middle", 20)):
            engine.submit(name, [5, 6, 7], SamplingParams(max_tokens=count, ignore_eos=True))
        ended = [engine.wait(30) for _ in range(3)]
        assert engine.load is not None
    assert [seq.request_id for seq in ended] == ["short", "middle", "long"]
    assert [seq.num_output_tokens for seq in ended] == [2, 20, 60]
    assert {seq.finish for seq in ended} == {Finish.LENGTH}


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "POLL_S", 0.05)
    with OfflineEngine(TimedRunner(CONFIG), CONFIG) as engine, pytest.raises(TimeoutError):
        engine.wait(0.2)
    # that the engine notices its own end is tested with the engine
    monkeypatch.setattr(Engine, "can_compute", False)
    with OfflineEngine(TimedRunner(CONFIG), CONFIG) as engine, pytest.raises(EngineFault, match="has ended"):
        engine.wait(0.01)


def test_a_step_that_stalls_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "POLL_S", 0.05)
    slow = msgspec.structs.replace(CONFIG, stall_s=0.2, timed=TimedConfig(base_s=1.0, num_blocks=64))
    with OfflineEngine(TimedRunner(slow), slow) as engine:
        engine.submit("slow", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
        with pytest.raises(EngineFault, match="has ended"):
            engine.wait(30)


def test_a_process_that_was_stopped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock has gone on, and what was waited for takes as much longer."""
    monkeypatch.setattr(offline, "POLL_S", 0.05)
    slow = msgspec.structs.replace(CONFIG, stall_s=1.5, timed=TimedConfig(base_s=0.3, num_blocks=64))
    with OfflineEngine(TimedRunner(slow), slow) as engine:
        engine.submit("slow", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
        monkeypatch.setattr(time, "monotonic", Stopped(time.monotonic).read)
        assert engine.wait(300).num_output_tokens == 2


class Stopped:
    """A clock that has gone on by 100 s at its third reading."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0

    def read(self) -> float:
        self._count += 1
        return self._clock() + 100 * (self._count > 2)
