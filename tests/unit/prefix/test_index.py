"""The mirror against a model that keeps nothing but sets, and its behaviour at gaps, epochs and lapses."""

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prefix.index import ApplyResult, PrefixIndex
from penstock.wire.frames import BlockEvents

KEYS = [bytes([i]) * 16 for i in range(12)]


def snapshot(event_seq: int, *keys: bytes) -> BlockEvents:
    return BlockEvents(event_seq, b"".join(keys), is_snapshot=True)


def stored(event_seq: int, *keys: bytes) -> BlockEvents:
    return BlockEvents(event_seq, b"".join(keys))


def removed(event_seq: int, *keys: bytes) -> BlockEvents:
    return BlockEvents(event_seq, b"", b"".join(keys))


def synced(*replicas: str) -> PrefixIndex:
    index = PrefixIndex()
    for replica in replicas:
        assert index.apply(replica, "e", snapshot(0)) is ApplyResult.OK
    return index


def test_the_depth_is_the_leading_run_that_a_replica_holds() -> None:
    index = synced("a", "b", "c")
    index.apply("a", "e", stored(1, *KEYS[:4]))
    index.apply("b", "e", stored(1, KEYS[0], KEYS[1], KEYS[3]))
    index.apply("c", "e", stored(1, KEYS[1], KEYS[2]))

    assert index.lookup(KEYS[:4], 0.0) == {"a": 4, "b": 2}
    assert index.lookup(KEYS[:6], 0.0) == {"a": 4, "b": 2}
    assert index.lookup([], 0.0) == {}


def test_events_before_a_snapshot_are_a_gap() -> None:
    index = PrefixIndex()

    assert index.apply("a", "e", stored(1, KEYS[0])) is ApplyResult.GAP
    assert index.lookup(KEYS, 0.0) == {}


def test_a_gap_drops_what_was_known_until_a_snapshot_comes() -> None:
    index = synced("a")
    index.apply("a", "e", stored(1, KEYS[0]))

    assert index.apply("a", "e", stored(3, KEYS[1])) is ApplyResult.GAP
    assert index.lookup(KEYS, 0.0) == {}
    assert index.apply("a", "e", stored(4, KEYS[1])) is ApplyResult.GAP
    assert index.apply("a", "e", snapshot(4, *KEYS[:3])) is ApplyResult.OK
    assert index.lookup(KEYS, 0.0) == {"a": 3}
    assert index.num_held("a") == 3


def test_events_that_a_snapshot_already_covers_are_stale() -> None:
    index = PrefixIndex()
    index.apply("a", "e", snapshot(5, *KEYS[:2]))

    assert index.apply("a", "e", removed(5, *KEYS[:2])) is ApplyResult.STALE
    assert index.apply("a", "e", snapshot(4)) is ApplyResult.STALE
    assert index.lookup(KEYS, 0.0) == {"a": 2}


def test_another_epoch_is_another_cache() -> None:
    index = PrefixIndex()
    index.apply("a", "old", snapshot(7, *KEYS[:2]))

    assert index.apply("a", "new", stored(8, KEYS[2])) is ApplyResult.GAP
    assert index.lookup(KEYS, 0.0) == {}
    assert index.apply("a", "new", snapshot(0, KEYS[0])) is ApplyResult.OK
    assert index.held("a") == {KEYS[0]}


def test_a_removed_replica_vanishes_at_once_and_its_place_is_used_again() -> None:
    index = synced("a", "b")
    index.apply("a", "e", stored(1, *KEYS[:3]))
    index.expect("a", KEYS[:5], 0.0, 10.0)
    index.apply("b", "e", stored(1, KEYS[0]))

    index.remove("a")
    index.remove("never seen")

    assert index.lookup(KEYS, 0.0) == {"b": 1}
    assert (index.num_held("a"), index.num_held("b")) == (0, 1)
    index.apply("c", "e", snapshot(0, KEYS[0], KEYS[1]))
    assert index.lookup(KEYS, 0.0) == {"b": 1, "c": 2}
    assert index.lookup(KEYS, 99.0) == {"b": 1, "c": 2}


def test_a_prediction_counts_until_it_lapses() -> None:
    index = synced("a")

    index.expect("a", KEYS[:3], now=10.0, ttl_s=2.0)

    assert index.lookup(KEYS, 11.9) == {"a": 3}
    assert index.lookup(KEYS, 12.0) == {}


def test_a_confirmed_prediction_does_not_lapse() -> None:
    index = synced("a")
    index.expect("a", KEYS[:3], now=10.0, ttl_s=2.0)

    index.apply("a", "e", stored(1, *KEYS[:2]))

    assert index.lookup(KEYS, 13.0) == {"a": 2}


def test_a_prediction_made_again_lasts_as_long_as_the_later_one() -> None:
    index = synced("a")
    index.expect("a", KEYS[:1], now=10.0, ttl_s=2.0)
    index.expect("a", KEYS[:1], now=11.0, ttl_s=2.0)

    assert index.lookup(KEYS, 12.5) == {"a": 1}
    assert index.lookup(KEYS, 13.0) == {}


def test_predictions_for_an_unknown_replica_are_ignored() -> None:
    index = PrefixIndex()

    index.expect("a", KEYS, 0.0, 1.0)

    assert index.lookup(KEYS, 0.0) == {}


def test_memory_is_bounded() -> None:
    index = PrefixIndex(max_blocks_per_replica=4, max_predictions=3)
    index.apply("a", "e", snapshot(0, *KEYS[:10]))
    index.apply("b", "e", snapshot(0))
    index.expect("b", KEYS, 0.0, 10.0)

    assert index.held("a") == set(KEYS[:4])
    assert index.lookup(KEYS, 0.0)["b"] == 3
    assert sum(index.lookup([key], 0.0).get("b", 0) for key in KEYS) == 3


def test_one_prediction_too_many_lets_the_oldest_requests_lapse() -> None:
    index = PrefixIndex(max_predictions=5)
    index.apply("a", "e", snapshot(0))
    index.expect("a", KEYS[:3], 0.0, 10.0)
    index.expect("a", KEYS[6:8], 1.0, 10.0)
    index.expect("a", KEYS[9:11], 2.0, 10.0)

    assert [index.lookup(KEYS[start:], 2.0) for start in (0, 6, 9)] == [{}, {"a": 2}, {"a": 2}]
    assert index.lookup(KEYS[9:], 12.0) == {}


@dataclass
class Naive:
    """What one replica is known to hold."""

    epoch: str
    event_seq: int | None = None
    held: set[bytes] = field(default_factory=set)
    predicted: dict[bytes, int] = field(default_factory=dict)

    def has(self, key: bytes, now: int) -> bool:
        return key in self.held or self.predicted.get(key, -1) > now


keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=6)
replicas = st.sampled_from(["a", "b", "c"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("snapshot"), replicas, st.sampled_from(["e1", "e2"]), st.integers(0, 6), keys),
        st.tuples(st.just("events"), replicas, st.sampled_from(["e1", "e2"]), st.integers(-1, 2), keys, keys),
        st.tuples(st.just("expect"), replicas, keys, st.integers(1, 5)),
        st.tuples(st.just("remove"), replicas),
        st.tuples(st.just("wait"), st.integers(1, 3)),
    ),
    max_size=40,
)


class Model:
    def __init__(self) -> None:
        self.replicas: dict[str, Naive] = {}

    def apply(self, name: str, epoch: str, events: BlockEvents) -> ApplyResult:
        known = self.replicas.get(name)
        if known is None or known.epoch != epoch:
            known = self.replicas[name] = Naive(epoch)
        there = {events.stored[i : i + 16] for i in range(0, len(events.stored), 16)}
        gone = {events.removed[i : i + 16] for i in range(0, len(events.removed), 16)}
        if events.is_snapshot:
            if known.event_seq is not None and events.event_seq < known.event_seq:
                return ApplyResult.STALE
            known.held = there
        elif known.event_seq is None or events.event_seq > known.event_seq + 1:
            self.replicas[name] = Naive(epoch)
            return ApplyResult.GAP
        elif events.event_seq <= known.event_seq:
            return ApplyResult.STALE
        else:
            known.held = (known.held - gone) | there
        known.event_seq = events.event_seq
        for key in there:
            known.predicted.pop(key, None)
        return ApplyResult.OK

    def held(self, name: str) -> set[bytes]:
        known = self.replicas.get(name)
        return known.held if known else set()

    def lookup(self, wanted: list[bytes], now: int) -> dict[str, int]:
        found = {}
        for name, known in self.replicas.items():
            depth = next((i for i, key in enumerate(wanted) if not known.has(key, now)), len(wanted))
            if depth:
                found[name] = depth
        return found


@settings(max_examples=300, deadline=None)
@given(operations)
def test_the_index_agrees_with_plain_sets(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    index, model, now = PrefixIndex(), Model(), 0
    for step in steps:
        match step:
            case ("snapshot", name, epoch, event_seq, there):
                events = snapshot(event_seq, *there)
                assert index.apply(name, epoch, events) is model.apply(name, epoch, events)
            case ("events", name, epoch, ahead, there, gone):
                known = model.replicas.get(name)
                event_seq = (known.event_seq or 0) + ahead if known else 0
                events = BlockEvents(event_seq, b"".join(there), b"".join(key for key in gone if key not in there))
                assert index.apply(name, epoch, events) is model.apply(name, epoch, events)
            case ("expect", name, wanted, ttl):
                index.expect(name, wanted, now, ttl)
                if name in model.replicas:
                    replica = model.replicas[name]
                    replica.predicted |= {key: now + ttl for key in wanted if key not in replica.held}
            case ("remove", name):
                index.remove(name)
                model.replicas.pop(name, None)
            case ("wait", ticks):
                now += ticks
        assert index.lookup(KEYS, now) == model.lookup(KEYS, now)
        assert index.lookup(KEYS[3:], now) == model.lookup(KEYS[3:], now)
        assert [index.num_held(name) for name in "abc"] == [len(model.held(name)) for name in "abc"]
    for name in "abc":
        index.remove(name)
    assert not index._masks  # a key that nobody holds is not kept


@pytest.mark.parametrize("num_replicas", [2, 64])
def test_one_bit_per_replica_is_enough_for_many(num_replicas: int) -> None:
    index = PrefixIndex()
    chain = [os.urandom(16) for _ in range(250)]
    for number in range(num_replicas):
        index.apply(f"r{number}", "e", snapshot(0, *chain[: number + 1]))

    assert index.lookup(chain, 0.0) == {f"r{number}": number + 1 for number in range(num_replicas)}
