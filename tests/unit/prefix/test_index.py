"""The mirror, in Python and over the map in C++, against a model that keeps nothing but sets, and its behaviour at
gaps, epochs and lapses."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.base.native import find_compilers
from penstock.prefix.index import ApplyResult, PrefixIndex
from penstock.prefix.native.build import load_library
from penstock.prefix.native_index import NativeIndex
from penstock.prefix.plain_index import PlainIndex
from penstock.wire.frames import BlockEvents

KEYS = [bytes([i]) * 16 for i in range(12)]


def snapshot(event_seq: int, *keys: bytes) -> BlockEvents:
    return BlockEvents(event_seq, b"".join(keys), is_snapshot=True)


def stored(event_seq: int, *keys: bytes) -> BlockEvents:
    return BlockEvents(event_seq, b"".join(keys))


def removed(event_seq: int, *keys: bytes) -> BlockEvents:
    return BlockEvents(event_seq, b"", b"".join(keys))


MakeIndex = Callable[..., PrefixIndex]


def make_native(**bounds: int) -> NativeIndex:
    library = load_library()
    if library is None:
        assert not find_compilers(), "the map does not build"
        pytest.skip("there is no C++ compiler on this machine, and no ziglang")
    return NativeIndex(library, **bounds)


@pytest.fixture(params=[PlainIndex, make_native], ids=["python", "c++"])
def make(request: pytest.FixtureRequest) -> MakeIndex:
    found: MakeIndex = request.param
    return found


def synced(make: MakeIndex, *replicas: str) -> PrefixIndex:
    index = make()
    for replica in replicas:
        assert index.apply(replica, "e", snapshot(0)) is ApplyResult.OK
    return index


def test_the_depth_is_the_leading_run_that_a_replica_holds(make: MakeIndex) -> None:
    index = synced(make, "a", "b", "c")
    index.apply("a", "e", stored(1, *KEYS[:4]))
    index.apply("b", "e", stored(1, KEYS[0], KEYS[1], KEYS[3]))
    index.apply("c", "e", stored(1, KEYS[1], KEYS[2]))

    assert index.lookup(KEYS[:4], 0.0) == {"a": 4, "b": 2}
    assert index.lookup(KEYS[:6], 0.0) == {"a": 4, "b": 2}
    assert index.lookup([], 0.0) == {}


def test_events_before_a_snapshot_are_a_gap(make: MakeIndex) -> None:
    index = make()

    assert index.apply("a", "e", stored(1, KEYS[0])) is ApplyResult.GAP
    assert index.lookup(KEYS, 0.0) == {}


def test_a_gap_drops_what_was_known_until_a_snapshot_comes(make: MakeIndex) -> None:
    index = synced(make, "a")
    index.apply("a", "e", stored(1, KEYS[0]))

    assert index.apply("a", "e", stored(3, KEYS[1])) is ApplyResult.GAP
    assert index.lookup(KEYS, 0.0) == {}
    assert index.apply("a", "e", stored(4, KEYS[1])) is ApplyResult.GAP
    assert index.apply("a", "e", snapshot(4, *KEYS[:3])) is ApplyResult.OK
    assert index.lookup(KEYS, 0.0) == {"a": 3}
    assert index.num_held("a") == 3


def test_events_that_a_snapshot_already_covers_are_stale(make: MakeIndex) -> None:
    index = make()
    index.apply("a", "e", snapshot(5, *KEYS[:2]))

    assert index.apply("a", "e", removed(5, *KEYS[:2])) is ApplyResult.STALE
    assert index.apply("a", "e", snapshot(4)) is ApplyResult.STALE
    assert index.lookup(KEYS, 0.0) == {"a": 2}


def test_another_epoch_is_another_cache(make: MakeIndex) -> None:
    index = make()
    index.apply("a", "old", snapshot(7, *KEYS[:2]))

    assert index.apply("a", "new", stored(8, KEYS[2])) is ApplyResult.GAP
    assert index.lookup(KEYS, 0.0) == {}
    assert index.apply("a", "new", snapshot(0, KEYS[0])) is ApplyResult.OK
    assert index.held("a") == {KEYS[0]}


def test_a_removed_replica_vanishes_at_once_and_its_place_is_used_again(make: MakeIndex) -> None:
    index = synced(make, "a", "b")
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


def test_a_prediction_counts_until_it_lapses(make: MakeIndex) -> None:
    index = synced(make, "a")

    index.expect("a", KEYS[:3], now=10.0, ttl_s=2.0)

    assert index.lookup(KEYS, 11.9) == {"a": 3}
    assert index.lookup(KEYS, 12.0) == {}


def test_a_confirmed_prediction_does_not_lapse(make: MakeIndex) -> None:
    index = synced(make, "a")
    index.expect("a", KEYS[:3], now=10.0, ttl_s=2.0)

    index.apply("a", "e", stored(1, *KEYS[:2]))

    assert index.lookup(KEYS, 13.0) == {"a": 2}


def test_a_prediction_made_again_lasts_as_long_as_the_later_one(make: MakeIndex) -> None:
    index = synced(make, "a")
    index.expect("a", KEYS[:1], now=10.0, ttl_s=2.0)
    index.expect("a", KEYS[:1], now=11.0, ttl_s=2.0)

    assert index.lookup(KEYS, 12.5) == {"a": 1}
    assert index.lookup(KEYS, 13.0) == {}


def test_predictions_for_an_unknown_replica_are_ignored(make: MakeIndex) -> None:
    index = make()

    index.expect("a", KEYS, 0.0, 1.0)

    assert index.lookup(KEYS, 0.0) == {}


def test_memory_is_bounded(make: MakeIndex) -> None:
    index = make(max_blocks_per_replica=4, max_predictions=3)
    index.apply("a", "e", snapshot(0, *KEYS[:10]))
    index.apply("b", "e", snapshot(0))
    index.expect("b", KEYS, 0.0, 10.0)

    assert index.held("a") == set(KEYS[:4])
    assert index.lookup(KEYS, 0.0)["b"] == 3
    assert sum(index.lookup([key], 0.0).get("b", 0) for key in KEYS) == 3


def test_one_prediction_too_many_lets_the_oldest_requests_lapse(make: MakeIndex) -> None:
    index = make(max_predictions=5)
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


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
def test_the_index_agrees_with_plain_sets(make: MakeIndex, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    index, model, now = make(), Model(), 0
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
    assert index.collect() == 0  # a key that nobody holds is not kept


@pytest.mark.parametrize("num_replicas", [2, 64])
def test_one_bit_per_replica_is_enough_for_many(make: MakeIndex, num_replicas: int) -> None:
    index = make()
    chain = [os.urandom(16) for _ in range(250)]
    for number in range(num_replicas):
        index.apply(f"r{number}", "e", snapshot(0, *chain[: number + 1]))

    assert index.lookup(chain, 0.0) == {f"r{number}": number + 1 for number in range(num_replicas)}


@pytest.mark.parametrize("seed", range(40))
def test_both_mirrors_agree_on_many_replicas_and_keys(seed: int) -> None:
    """Sets of owners have every size, and parts of the table grow, are swept and shrink."""
    random = Random(seed)
    num_replicas = random.choice([1, 3, 5, 70, 200])
    plain, native = PlainIndex(max_predictions=300), make_native(max_predictions=300)
    names = [f"r{number}" for number in range(num_replicas)]
    chains = [[random.randbytes(16) for _ in range(random.randrange(1, 60))] for _ in range(20)]
    event_seqs = dict.fromkeys(names, 0)
    for now in range(400):
        name, chain = random.choice(names), random.choice(chains)
        keys = (
            chain[random.randrange(len(chain)) :]
            if random.random() < 0.2
            else chain[: random.randrange(len(chain) + 1)]
        )
        match random.choices(["stored", "removed", "expect", "snapshot", "remove", "gap"], [9, 3, 4, 2, 1, 1])[0]:
            case "expect":
                ttl_s = random.randrange(1, 30)
                plain.expect(name, keys, now, ttl_s)
                native.expect(name, keys, now, ttl_s)
            case "remove":
                plain.remove(name)
                native.remove(name)
            case what:
                event_seqs[name] += 2 if what == "gap" else 1
                packed = b"".join(keys)
                stored_keys, removed_keys = (b"", packed) if what == "removed" else (packed, b"")
                events = BlockEvents(event_seqs[name], stored_keys, removed_keys, is_snapshot=what == "snapshot")
                assert plain.apply(name, "e", events) is native.apply(name, "e", events)
        wanted = random.choice(chains)
        assert plain.lookup(wanted, now) == native.lookup(wanted, now)
        assert plain.num_held(name) == native.num_held(name)
    assert all(plain.held(name) == native.held(name) for name in names)
    assert plain.collect() == native.collect()


def test_a_table_of_many_keys_grows_and_gives_everything_back() -> None:
    native = make_native()
    keys = [os.urandom(16) for _ in range(120_000)]
    for replica, held in (("a", keys), ("b", keys[:60_000])):
        native.apply(replica, "e", snapshot(0, *held))

    assert native.held("a") == frozenset(keys)
    assert native.lookup(keys[59_990:60_010], 0.0) == {"a": 20, "b": 10}
    assert native.apply("a", "e", removed(1, *keys[1_000:])) is ApplyResult.OK
    assert (native.num_held("a"), native.collect()) == (1_000, 60_000)
    native.remove("b")
    assert native.lookup(keys[:2_000], 0.0) == {"a": 1_000}
    assert native.collect() == 1_000


def test_keys_that_differ_in_a_few_bits_only_are_told_apart() -> None:
    native = make_native()
    keys = [bytes(8) + (number << shift).to_bytes(8, "little") for shift in (0, 20, 52) for number in range(1, 1_000)]
    native.apply("a", "e", snapshot(0, *keys))

    assert native.held("a") == frozenset(keys)
    assert native.lookup([bytes(16)], 0.0) == {}
