"""The array over a pool's replicas against the mapping, for both mirrors."""

from random import Random

import pytest

from penstock.prefix.holders import HolderRows
from penstock.prefix.index import PrefixIndex
from penstock.prefix.native.build import load_library
from penstock.prefix.native_index import NativeIndex
from penstock.prefix.plain_index import PlainIndex
from penstock.wire.frames import BlockEvents

KEYS = [bytes([number]) * 16 for number in range(40)]
NAMES = [f"replica-{number}" for number in range(12)]


@pytest.fixture(params=["python", "C++"])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    if request.param == "python":
        return PlainIndex()
    library = load_library()
    if library is None:
        pytest.skip("the map in C++ can't be built here")
    return NativeIndex(library)


def test_the_array_holds_what_the_mapping_says_while_replicas_come_and_go(index: PrefixIndex) -> None:
    random, rows, most = Random(3), HolderRows(NAMES), 0
    for event_seq in range(300):
        name = random.choice([*NAMES, "of another pool"])
        if random.random() < 0.2:
            index.remove(name)
        else:  # a snapshot gives a replica another slot
            keys = b"".join(KEYS[: random.randrange(len(KEYS))])
            index.apply(name, "epoch", BlockEvents(event_seq, keys, is_snapshot=True))

        held = rows.read(index.lookup(KEYS, 0.0))

        found = index.lookup(KEYS, 0.0)
        assert held.tolist() == [found.get(each, 0) for each in NAMES]
        assert len(found) == len(list(found)) == len(dict(found))
        most = max(most, len(found))
    assert most > 8


def test_replicas_that_hold_nothing_are_left_out(index: PrefixIndex) -> None:
    index.apply("a", "epoch", BlockEvents(0, KEYS[0], is_snapshot=True))

    found = index.lookup(KEYS[:2], 0.0)

    assert "a" in found
    assert "b" not in found
    assert found == {"a": 1}
    assert HolderRows(["b"]).read(found).tolist() == [0.0]
