"""Snapshots in pieces, over the mirror in Python and over the map in C++, against the mirror in Python that is given
each of them whole."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.native import find_compilers
from penstock.prefix.index import ApplyResult, PrefixIndex
from penstock.prefix.native.build import load_library
from penstock.prefix.native_index import NativeIndex
from penstock.prefix.plain_index import PlainIndex
from penstock.router.replicas.index_feed import PIECE_KEYS, IndexFeed
from penstock.wire.frames import BlockEvents


def make_native() -> NativeIndex:
    library = load_library()
    if library is None:
        assert not find_compilers(), "the map does not build"
        pytest.skip("there is no C++ compiler on this machine, and no ziglang")
    return NativeIndex(library)


MAKERS: dict[str, Callable[[], PrefixIndex]] = {"python": PlainIndex, "c++": make_native}


@pytest.fixture(params=list(MAKERS))
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return MAKERS[request.param]()


class Turns:
    """What an event loop was asked to call."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    def take(self) -> bool:
        """One turn; whether there was anything to call."""
        asked = list(self.asked)
        self.asked.clear()
        for callback in asked:
            callback()
        return bool(asked)


def draw_keys(count: int, seed: int = 0) -> list[bytes]:
    random = Random(seed)
    return [random.randbytes(16) for _ in range(count)]


def snapshot(event_seq: int, keys: list[bytes]) -> BlockEvents:
    return BlockEvents(event_seq, b"".join(keys), is_snapshot=True)


def test_a_long_snapshot_is_applied_in_pieces_and_a_short_one_at_once(index: PrefixIndex) -> None:
    turns, keys = Turns(), draw_keys(2 * PIECE_KEYS + 100)
    feed = IndexFeed(index, turns.asked.append)

    assert feed.apply("short", "e", snapshot(0, keys[:PIECE_KEYS])) is ApplyResult.OK
    assert not turns.asked
    assert feed.apply("long", "e", snapshot(0, keys)) is ApplyResult.OK
    held = [index.num_held("long")]
    while turns.take():
        held.append(index.num_held("long"))
        assert len(turns.asked) <= 1

    assert held == [PIECE_KEYS, 2 * PIECE_KEYS, len(keys)]
    assert index.lookup(keys, 0.0) == {"short": PIECE_KEYS, "long": len(keys)}


def test_one_piece_is_applied_a_turn_however_many_snapshots_wait(index: PrefixIndex) -> None:
    turns, keys = Turns(), draw_keys(3 * PIECE_KEYS)
    feed = IndexFeed(index, turns.asked.append)
    for name in ("a", "b"):
        feed.apply(name, "e", snapshot(0, keys))

    seen = []
    while turns.take():
        seen.append((index.num_held("a") // PIECE_KEYS, index.num_held("b") // PIECE_KEYS))

    assert seen == [(2, 1), (2, 2), (3, 2), (3, 3)]


def test_what_was_removed_meanwhile_does_not_come_back_and_what_was_stored_again_stays(index: PrefixIndex) -> None:
    turns, keys = Turns(), draw_keys(PIECE_KEYS + 3)
    feed = IndexFeed(index, turns.asked.append)
    feed.apply("a", "e", snapshot(0, keys))
    gone, back, _ = keys[PIECE_KEYS:]

    assert feed.apply("a", "e", BlockEvents(1, b"", gone + back)) is ApplyResult.OK
    assert feed.apply("a", "e", BlockEvents(2, back)) is ApplyResult.OK
    turns.take()

    assert index.held("a") == {*keys} - {gone}


@pytest.mark.parametrize("end", ["gap", "another epoch", "another snapshot", "removed"])
def test_what_was_to_come_is_forgotten(index: PrefixIndex, end: str) -> None:
    turns, keys = Turns(), draw_keys(PIECE_KEYS + 3)
    feed = IndexFeed(index, turns.asked.append)
    feed.apply("a", "e", snapshot(0, keys))

    if end == "gap":
        assert feed.apply("a", "e", BlockEvents(7, keys[0])) is ApplyResult.GAP
    elif end == "another epoch":
        assert feed.apply("a", "later", BlockEvents(1, keys[0])) is ApplyResult.GAP
    elif end == "another snapshot":
        feed.apply("a", "e", snapshot(1, keys[:2]))
    else:
        feed.remove("a")
    while turns.take():
        pass

    assert index.held("a") == ({*keys[:2]} if end == "another snapshot" else set())


POOL = draw_keys(16, 7)
NAMES = st.sampled_from(["a", "b"])
KEY_LISTS = st.lists(st.sampled_from(POOL), unique=True)
LONG_LISTS = st.permutations(POOL).flatmap(lambda keys: st.integers(0, len(keys)).map(lambda count: keys[:count]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("snapshot"), NAMES, LONG_LISTS, st.integers(-1, 2)),
        st.tuples(st.just("events"), NAMES, KEY_LISTS, LONG_LISTS, st.sampled_from([1, 1, 1, 1, 0, 2])),
        st.tuples(st.just("epoch"), NAMES),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("turn")),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kind", list(MAKERS))
@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_between_pieces_a_part_is_held_and_at_the_end_what_a_mirror_holds_that_gets_all_at_once(
    kind: str, steps: list[tuple]
) -> None:
    index, turns, whole = MAKERS[kind](), Turns(), PlainIndex()
    feed = IndexFeed(index, turns.asked.append, piece_keys=3)
    event_seqs, epochs = {"a": 0, "b": 0}, {"a": 0, "b": 0}
    for what, *rest in steps:
        if what == "turn":
            turns.take()
        else:
            name = rest[0]
            if what == "remove":
                feed.remove(name)
                whole.remove(name)
            elif what == "epoch":
                epochs[name] += 1
            else:
                event_seqs[name] = max(0, event_seqs[name] + rest[-1])
                stored = b"".join(rest[1])
                is_snapshot = what == "snapshot"
                removed = b"" if is_snapshot else b"".join(rest[2])
                events = BlockEvents(event_seqs[name], stored, removed, is_snapshot)
                epoch = str(epochs[name])
                assert feed.apply(name, epoch, events) is whole.apply(name, epoch, events)
        for each in event_seqs:
            assert index.held(each) <= whole.held(each)
    while turns.take():
        pass
    for each in event_seqs:
        assert index.held(each) == whole.held(each)
        assert index.num_held(each) == whole.num_held(each)
    assert index.lookup(POOL, 0.0) == whole.lookup(POOL, 0.0)
