"""What is held in host memory under the slots, and a runner that loads from there."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.store import digest_of
from penstock.workers.compute.host_adapters import HostAdapters
from penstock.workers.compute.loading import load_runner
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.tiny_models import engine_config, saved, tiny_model


@dataclass(frozen=True)
class Adapter:
    digest: str
    num_bytes: int = 10


@dataclass
class Disk:
    size: int = 10
    read: list[str] = field(default_factory=list)

    def reader(self, digest: str) -> Callable[[], Adapter]:
        def read() -> Adapter:
            self.read.append(digest)
            return Adapter(digest, self.size)

        return read


def test_what_was_read_once_is_not_read_again_while_there_is_room() -> None:
    disk, held = Disk(), HostAdapters[Adapter](20)
    first = held.get("a", disk.reader("a"))
    held.get("b", disk.reader("b"))

    assert held.get("a", disk.reader("a")) is first
    held.get("c", disk.reader("c"))  # b, the least lately used, gives way
    assert held.get("a", disk.reader("a")) is first
    held.get("b", disk.reader("b"))

    assert disk.read == ["a", "b", "c", "b"]


def test_leaving_a_slot_is_a_use() -> None:
    disk, held = Disk(), HostAdapters[Adapter](20)
    for digest in "ab":
        held.get(digest, disk.reader(digest))

    held.touch("a")
    held.keep(Adapter("c"))
    held.touch("never held")

    for digest in "ac":
        held.get(digest, disk.reader(digest))
    assert disk.read == ["a", "b"]


def test_a_deleted_one_and_one_too_large_are_not_held() -> None:
    disk, held = Disk(), HostAdapters[Adapter](15)
    held.get("a", disk.reader("a"))
    held.forget("a")
    held.forget("a")
    assert held.num_bytes == 0

    held.keep(Adapter("b", 16))
    held.get("b", Disk(size=16).reader("b"))

    assert held.num_bytes == 0
    held.get("a", disk.reader("a"))
    assert disk.read == ["a", "a"]


def test_with_no_bytes_nothing_is_held() -> None:
    disk, held = Disk(), HostAdapters[Adapter](0)
    for _ in range(2):
        held.get("a", disk.reader("a"))

    assert disk.read == ["a", "a"]


def test_a_reading_that_fails_leaves_nothing() -> None:
    held = HostAdapters[Adapter](20)

    def fail() -> Adapter:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        held.get("a", fail)
    assert held.get("a", Disk().reader("a")) == Adapter("a")


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["get", "keep", "touch", "forget"]), st.sampled_from("abcdef"), st.integers(1, 30)),
        max_size=60,
    )
)
def test_the_bytes_are_those_of_what_is_held_and_never_above_the_bound(moves: list[tuple[str, str, int]]) -> None:
    held = HostAdapters[Adapter](40)
    for move, digest, size in moves:
        if move == "get":
            held.get(digest, Disk(size).reader(digest))
        elif move == "keep":
            held.keep(Adapter(digest, size))
        else:
            getattr(held, move)(digest)
        assert 0 <= held.num_bytes <= 40
    for digest in "abcdef":
        held.forget(digest)

    assert held.num_bytes == 0


def test_threads_may_load_at_once() -> None:
    held, disk = HostAdapters[Adapter](30), Disk()

    def load() -> None:
        for number in range(300):
            digest = "abcdef"[number % 6]
            assert held.get(digest, disk.reader(digest)).digest == digest
            held.forget("abcdef"[(number + 3) % 6])

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 0 <= held.num_bytes <= 30


@pytest.mark.parametrize(("host_bytes", "is_held"), [(2**20, True), (0, False)])
def test_a_runner_loads_an_adapter_that_left_its_slot_without_its_files(
    tmp_path: Path, host_bytes: int, is_held: bool
) -> None:
    config = engine_config(blocks=64)
    slots = msgspec.structs.replace(config.adapters, host_bytes=host_bytes)
    runner = load_runner(
        saved(tiny_model("llama"), tmp_path / "model"), msgspec.structs.replace(config, adapters=slots)
    )
    adapted(tiny_model("llama"), tmp_path / "a", 1)
    digest = digest_of(tmp_path / "a")
    first = runner.load_adapter(digest, tmp_path / "a", 8)
    runner.unload_adapter(first)
    (tmp_path / "a").rename(tmp_path / "away")

    if not is_held:
        with pytest.raises(FileNotFoundError):
            runner.load_adapter(digest, tmp_path / "a", 8)
        return
    assert runner.load_adapter(digest, tmp_path / "a", 8) is first
    runner.forget_adapter(digest)
    with pytest.raises(FileNotFoundError):
        runner.load_adapter(digest, tmp_path / "a", 8)
