import asyncio
from dataclasses import dataclass, field

import pytest

from penstock.autoscale.peaks import Peak
from penstock.autoscale.policy import State
from penstock.autoscale.records.memory import REFRESH_S, WRITE_S, Memory
from penstock.autoscale.records.record import decode


@dataclass
class Store:
    data: dict[str, bytes] = field(default_factory=dict)
    num_writes: int = 0
    is_unavailable: bool = False

    async def read(self, pool: str) -> bytes | None:
        if self.is_unavailable:
            raise OSError("away")
        return self.data.get(pool)

    async def write(self, pool: str, data: bytes) -> None:
        self.num_writes += 1
        self.data[pool] = data


@dataclass
class Rig:
    store: Store = field(default_factory=Store)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.memory = Memory(self.store, lambda: self.now, lambda: 1e9 + self.now)

    def play(self, seconds: int, replicas: int) -> int:
        """Number of writes in so many seconds of turns."""
        before = self.store.num_writes
        for _ in range(seconds):
            self.now += 1.0
            asyncio.run(self.memory.keep("a", replicas, State(enough=(Peak(self.now, replicas),))))
        return self.store.num_writes - before


def test_a_change_is_written_at_once_and_then_not_for_some_seconds() -> None:
    rig = Rig()
    asyncio.run(rig.memory.recall(["a"]))

    assert rig.play(1, 4) == 1
    assert rig.play(1, 3) == 0
    assert rig.play(int(WRITE_S), 2) == 1
    assert decode(rig.store.data["a"]).target == 2


def test_a_rise_and_a_first_deadline_in_danger_are_written_at_once() -> None:
    """A successor that did not know of them would take back what was just asked for."""
    rig = Rig()
    asyncio.run(rig.memory.recall(["a"]))

    assert rig.play(1, 2) == 1
    assert rig.play(1, 3) == 1
    rig.now += 1.0
    asyncio.run(rig.memory.keep("a", 3, State(pressed_s=rig.now, raised_s=rig.now)))
    assert decode(rig.store.data["a"]).pressed_ago_s == 0.0
    assert rig.play(1, 3) == 0


def test_what_does_not_change_is_written_again_before_it_is_old() -> None:
    rig = Rig()
    asyncio.run(rig.memory.recall(["a"]))
    rig.play(1, 2)

    assert rig.play(int(10 * REFRESH_S), 2) == 10


def test_records_are_read_once_and_nothing_is_written_before() -> None:
    rig = Rig(Store({"a": b'{"version":1,"written_unix_s":1e9,"target":5}'}, is_unavailable=True))

    with pytest.raises(OSError, match="away"):
        asyncio.run(rig.memory.recall(["a", "b"]))
    assert rig.play(20, 1) == 0, "or what the one before knew would be lost"
    rig.store.is_unavailable = False
    found = asyncio.run(rig.memory.recall(["a", "b"]))

    assert {pool: record.target for pool, record in found.items()} == {"a": 5}
    assert asyncio.run(rig.memory.recall(["a", "b"])) == {}
    assert rig.play(1, 1) == 1


def test_a_broken_record_is_said_and_the_others_are_read(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Store({"a": b"\xff", "b": b'{"version":1,"written_unix_s":1e9}'}))

    with caplog.at_level("WARNING", "penstock.autoscale"):
        found = asyncio.run(rig.memory.recall(["a", "b"]))

    assert set(found) == {"b"}
    assert [record.message for record in caplog.records] == ["record ignored"]
