"""Whole sequences out of an engine without a stream."""

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
    monkeypatch.setattr(Engine, "is_healthy", lambda self, now: False)
    with OfflineEngine(TimedRunner(CONFIG), CONFIG) as engine, pytest.raises(EngineFault, match="has ended"):
        engine.wait(30)


def test_a_step_that_looks_stuck_once_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the process was stopped and went on."""
    monkeypatch.setattr(offline, "POLL_S", 0.01)
    looks = iter([False, True] * 50)
    monkeypatch.setattr(Engine, "is_healthy", lambda self, now: next(looks, True))
    slow = msgspec.structs.replace(CONFIG, timed=TimedConfig(base_s=0.02, num_blocks=64))
    with OfflineEngine(TimedRunner(slow), slow) as engine:
        engine.submit("slow", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
        assert engine.wait(30).num_output_tokens == 20
    assert next(looks, None) is not None
