"""The mirror of the prefix index at the size of a large fleet: memory, events, look-ups, pauses; ours is the map in
C++, the rival the one in Python alone.

    python -m bench.index [--quick]

Memory: resident, in a fresh process for each figure, with as many predictions as are kept. Events: frames of 32 blocks
on a mirror that is full, as the share of a core that 200,000 blocks a second take. Look-ups: 512 blocks, of which every
replica holds another number (and, once more, all of them), read into an array over the replicas, as decisions have it.
Both mirrors in one process and in turn, the least of the rounds. Pauses: the longest single call, in CPU time, while
512 replicas of 30,000 blocks come, send snapshots again and go; the rival's at 64 replicas. Snapshots are applied in
pieces, a turn of the event loop each, as gateways do (`penstock.router.replicas.index_feed`); by the rival at once.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import numpy as np
import psutil

from bench.support.report import Row, write_report
from penstock.base.garbage import freeze_startup
from penstock.prefix.holders import HolderRows
from penstock.prefix.index import MAX_PREDICTIONS, ApplyResult, PrefixIndex
from penstock.prefix.native.build import load_library
from penstock.prefix.native_index import NativeIndex
from penstock.prefix.plain_index import PlainIndex
from penstock.router.replicas.index_feed import PIECE_KEYS, IndexFeed
from penstock.wire.frames import KEY_BYTES, BlockEvents, split_keys

BLOCKS, FRAME, DEPTH = 30_000, 32, 512
BLOCKS_PER_S = 200_000
SHARINGS = {"no block is shared": 1, "half are shared, each by two": 2, "half are shared, each by all": 0}
"""Replicas that hold a shared block, 0 for all of them."""
KINDS: dict[str, Callable[[], PrefixIndex]] = {"ours": lambda: open_native(), "rival": PlainIndex}


def open_native() -> NativeIndex:
    library = load_library()
    if library is None:
        raise SystemExit("the map in C++ can't be built here")
    return NativeIndex(library)


def name(number: int) -> str:
    return f"replica-{number}"


def announce(index: PrefixIndex, number: int, keys: bytes, event_seq: int = 0) -> None:
    applied = index.apply(name(number), "epoch", BlockEvents(event_seq, keys, is_snapshot=True))
    assert applied is ApplyResult.OK


def fill(index: PrefixIndex, num_replicas: int, num_sharing: int, random: Random) -> None:
    """A snapshot of each replica, half of its blocks shared by so many (0: all; 1: none is shared)."""
    half = KEY_BYTES * (BLOCKS // 2)
    shared = random.randbytes(half)
    for number in range(num_replicas):
        if num_sharing > 1 and number % num_sharing == 0:
            shared = random.randbytes(half)
        announce(index, number, random.randbytes(half) + (random.randbytes(half) if num_sharing == 1 else shared))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def memory(kind: str, num_replicas: int, num_sharing: int) -> float:
    """Bytes resident for each block and replica, predictions included: to be called in a fresh process."""
    random = Random(0)
    index = KINDS[kind]()
    before = resident_bytes()
    fill(index, num_replicas, num_sharing, random)
    for number in range(MAX_PREDICTIONS // DEPTH):
        index.expect(name(number % num_replicas), split_keys(random.randbytes(DEPTH * KEY_BYTES)), 0.0, 10.0)
    return (resident_bytes() - before) / (num_replicas * BLOCKS + MAX_PREDICTIONS)


def measure_memory(kind: str, num_replicas: int, num_sharing: int) -> float:
    command = [sys.executable, "-m", "bench.index", "--memory", kind, str(num_replicas), str(num_sharing)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def events_s(index: PrefixIndex, event_seq: int, random: Random, num_frames: int = 1000) -> tuple[float, float]:
    """CPU seconds of a block that is stored, and of one that is removed; leaves the index as it was."""
    frames = [random.randbytes(FRAME * KEY_BYTES) for _ in range(num_frames)]
    stored = [BlockEvents(event_seq + number, frame) for number, frame in enumerate(frames)]
    removed = [BlockEvents(event_seq + num_frames + number, b"", frame) for number, frame in enumerate(frames)]
    spent = []
    for batch in (stored, removed):
        began = time.thread_time()
        for events in batch:
            index.apply(name(0), "epoch", events)
        spent.append((time.thread_time() - began) / (num_frames * FRAME))
    return spent[0], spent[1]


def look_up_s(index: PrefixIndex, keys: list[bytes], num_found: int, times: int = 50) -> float:
    """CPU seconds of a look-up and of reading it as a decision does: an array over all replicas."""
    rows = HolderRows([name(number) for number in range(num_found)])
    rows.read(index.lookup(keys, 0.0))
    began = time.thread_time()
    for _ in range(times):
        held = rows.read(index.lookup(keys, 0.0))
    spent = (time.thread_time() - began) / times
    assert np.count_nonzero(held) == num_found
    return spent


def events_and_look_ups(num_replicas: int, num_filled: int, rounds: int) -> list[Row]:
    """Rows for mirrors with so many replicas, of which some hold BLOCKS blocks of their own besides the chains."""
    uneven, even = (split_keys(Random(seed).randbytes(DEPTH * KEY_BYTES)) for seed in (1, 2))
    indexes = {kind: make() for kind, make in KINDS.items()}
    for index in indexes.values():
        random = Random(0)
        for number in range(num_replicas):
            own = random.randbytes(BLOCKS * KEY_BYTES) if number < num_filled else b""
            deep = uneven[: 1 + number * DEPTH // num_replicas]
            announce(index, number, own + b"".join(even) + b"".join(deep))
    stored: dict[str, list[float]] = {kind: [] for kind in indexes}
    removed, different, same = ({kind: list[float]() for kind in indexes} for _ in range(3))
    for turn in range(rounds):
        for kind, index in indexes.items():
            one, other = events_s(index, 1 + 2000 * turn, Random(10 + turn))
            stored[kind].append(one)
            removed[kind].append(other)
            different[kind].append(look_up_s(index, uneven, num_replicas))
            same[kind].append(look_up_s(index, even, num_replicas))
    what = f"{num_replicas} replicas"
    return [
        *(
            Row(f"{what}: {BLOCKS_PER_S:,} blocks a second {verb}", *best(of, 100 * BLOCKS_PER_S), "% of a core")
            for verb, of in (("stored", stored), ("removed", removed))
        ),
        Row(f"{what}: look-up of {DEPTH} blocks, held to different depths", *best(different, 1e6), "us"),
        Row(f"{what}: look-up of {DEPTH} blocks that all hold", *best(same, 1e6), "us"),
    ]


def best(measured: dict[str, list[float]], factor: float) -> tuple[float, float]:
    return min(measured["ours"]) * factor, min(measured["rival"]) * factor


class Pauses:
    """The longest call of each kind, in CPU seconds, by its name; `time` is around the call."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    @contextmanager
    def time(self, what: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.record(what, time.thread_time() - began)

    def record(self, what: str, spent_s: float) -> None:
        self.longest[what] = max(self.longest.get(what, 0.0), spent_s)


class TimedFeed:
    """Snapshots through an IndexFeed whose event loop has nothing else to do, each turn of it timed."""

    def __init__(self, index: PrefixIndex, piece_keys: int, timer: Pauses) -> None:
        self._turns: list[Callable[[], None]] = []
        self._feed = IndexFeed(index, self._turns.append, piece_keys)
        self._timer = timer

    def announce(self, number: int, keys: bytes, event_seq: int, what: str) -> None:
        events, pieces = BlockEvents(event_seq, keys, is_snapshot=True), list[float]()
        self._turns.append(lambda: self._apply(name(number), events))
        while self._turns:
            began = time.thread_time()
            self._turns.pop()()
            pieces.append(time.thread_time() - began)
        self._timer.record(f"a piece of {what}", max(pieces))
        self._timer.record(f"all of {what}", sum(pieces))

    def _apply(self, replica_id: str, events: BlockEvents) -> None:
        applied = self._feed.apply(replica_id, "epoch", events)
        assert applied is ApplyResult.OK


def pauses(index: PrefixIndex, num_replicas: int, piece_keys: int) -> dict[str, float]:
    """Growth from nothing, by snapshots and by frames; snapshots again; replicas' ends, with events in between."""
    random, timer = Random(0), Pauses()
    feed = TimedFeed(index, piece_keys, timer)
    for number in range(num_replicas):
        if number % 8:
            keys = random.randbytes(BLOCKS * KEY_BYTES)
            feed.announce(number, keys, 0, "a first snapshot")
            continue
        announce(index, number, b"")
        for event_seq in range(1, BLOCKS // FRAME + 1):
            events = BlockEvents(event_seq, random.randbytes(FRAME * KEY_BYTES))
            with timer.time("frame while growing"):
                index.apply(name(number), "epoch", events)
    look_up = split_keys(random.randbytes(DEPTH * KEY_BYTES))
    for number in range(0, num_replicas, 4):
        keys = random.randbytes(BLOCKS * KEY_BYTES)
        feed.announce(number, keys, 5000, "a snapshot again")
    announce(index, 0, b"", 5000)
    event_seq = 5000
    for number in range(1, num_replicas, 2):
        with timer.time("replica's end"):
            index.remove(name(number))
        for _ in range(50):
            event_seq += 1
            events = BlockEvents(event_seq, random.randbytes(FRAME * KEY_BYTES))
            with timer.time("frame after an end"):
                index.apply(name(0), "epoch", events)
        with timer.time("prediction after an end"):
            index.expect(name(0), look_up, 0.0, 1.0)
    return timer.longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer replicas and rounds")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        kind, num_replicas, num_sharing = arguments.memory
        print(memory(kind, int(num_replicas), int(num_sharing)))
        return
    few, many, rounds = (8, 64, 3) if arguments.quick else (64, 512, 15)
    rows = [
        Row(f"{few} replicas: {what}", measure_memory("ours", few, of), measure_memory("rival", few, of), "bytes")
        for what, of in SHARINGS.items()
    ]
    rows += [
        Row(f"{many} replicas: {what}", measure_memory("ours", many, of), None, "bytes")
        for what, of in SHARINGS.items()
    ]
    for num_replicas in (few, many):
        rows += events_and_look_ups(num_replicas, few, rounds)
    freeze_startup()  # as gateways do
    ours, rival = pauses(open_native(), many, PIECE_KEYS), pauses(PlainIndex(), few, BLOCKS)
    rows += [Row(f"longest call: {what}", 1e3 * ours[what], 1e3 * rival[what], "ms") for what in ours]
    notes = [f"{many} replicas of {BLOCKS:,} blocks; {os.cpu_count()} cores, which others used too"]
    write_report("index", rows, notes=notes)


if __name__ == "__main__":
    main()
