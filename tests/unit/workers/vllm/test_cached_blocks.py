from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import BlockEvents, SamplingParams, split_keys
from penstock.workers.engine.sequence import Sequence
from penstock.workers.vllm.bridge import CacheEvent, Cleared, Removed, Stored
from penstock.workers.vllm.cached_blocks import CachedBlocks

SIZE = 4
HASHER = ChainHasher(b"secret of sixteen", SIZE)
ROOT = HASHER.root("digest")
TOKENS = list(range(100, 140))
KEYS = HASHER.extend(ROOT, TOKENS)


def sequence(num_tokens: int = len(TOKENS), num_keys: int = 0, root: bytes = ROOT) -> Sequence:
    keys = HASHER.extend(root, TOKENS)[:num_keys]
    parent = keys[-1] if keys else root
    return Sequence("q", TOKENS[:num_tokens], SamplingParams(max_tokens=1), num_tokens, keys, parent, 0.0)


def record(cached: CachedBlocks, *events: CacheEvent, seqs: Iterable[Sequence] = (), size: int = SIZE) -> None:
    cached.record(events, dict(enumerate(seqs, 1)).get, size)


def held(cached: CachedBlocks) -> list[bytes]:
    snapshot = cached.snapshot()
    assert snapshot.is_snapshot
    return split_keys(snapshot.stored)


@pytest.mark.parametrize("num_keys", [0, 3, 10])
def test_blocks_have_the_keys_of_their_sequence_whether_the_router_made_them_or_not(num_keys: int) -> None:
    cached = CachedBlocks(HASHER)
    seq = sequence(num_keys=num_keys)
    record(cached, Stored(1, None, [7, 8]), Stored(1, 8, [9]), seqs=[seq])

    assert cached.drain() == BlockEvents(1, b"".join(KEYS[:3]))
    assert cached.drain() is None
    assert held(cached) == KEYS[:3]
    assert (seq.block_keys, seq.chain_key) == (KEYS, KEYS[-1])


@pytest.mark.parametrize(("size", "per_block"), [(4, [1, 1]), (8, [2, 2]), (12, [3, 3]), (2, [0, 1]), (6, [1, 2])])
def test_a_block_of_ours_counts_with_that_of_vllm_in_which_it_ends(size: int, per_block: list[int]) -> None:
    cached = CachedBlocks(HASHER)
    record(cached, Stored(1, None, [b"a"]), seqs=[sequence()], size=size)
    first = held(cached)
    record(cached, Stored(1, b"a", [b"b"]), seqs=[sequence()], size=size)

    assert first == KEYS[: per_block[0]]
    assert held(cached) == KEYS[: sum(per_block)]
    record(cached, Removed([b"b"]))
    assert held(cached) == first


def test_what_is_removed_and_stored_again_before_anybody_looks_has_not_changed() -> None:
    cached = CachedBlocks(HASHER)
    record(cached, Stored(1, None, [7, 8]), Removed([8]), seqs=[sequence()])
    assert cached.drain() == BlockEvents(1, KEYS[0])
    record(cached, Removed([7]), Stored(1, None, [7]), seqs=[sequence()])
    assert cached.drain() is None
    record(cached, Removed([7]))

    assert cached.drain() == BlockEvents(2, b"", KEYS[0])
    assert held(cached) == []


def test_a_hash_of_two_blocks_is_held_until_both_are_gone() -> None:
    cached = CachedBlocks(HASHER)
    record(cached, Stored(1, None, [7]), Stored(2, None, [7]), Removed([7]), seqs=[sequence(), sequence()])
    assert held(cached) == KEYS[:1]
    record(cached, Removed([7]))

    assert held(cached) == []


def test_a_key_of_two_hashes_is_held_until_both_are_gone() -> None:
    """Two tenants' copies of a published prefix."""
    cached = CachedBlocks(HASHER)
    record(cached, Stored(1, None, [7]), Stored(2, None, [8]), Removed([7]), seqs=[sequence(), sequence()])

    assert held(cached) == KEYS[:1]
    assert cached.drain() == BlockEvents(1, KEYS[0])
    record(cached, Removed([8]))
    assert cached.drain() == BlockEvents(2, b"", KEYS[0])


def test_nothing_is_recorded_of_whom_nobody_knows() -> None:
    cached = CachedBlocks(HASHER)
    record(cached, Stored(9, None, [7]), Stored(1, 7, [8]), Removed([7, 5]), seqs=[sequence()])

    assert held(cached) == []
    assert cached.drain() is None


def test_nothing_is_recorded_of_tokens_that_have_not_come() -> None:
    """A sequence that was aborted while vLLM computed it; another one with the same tokens tells of the block."""
    cached = CachedBlocks(HASHER)
    record(cached, Stored(1, None, [1, 2, 3]), seqs=[sequence(num_tokens=9)])
    assert held(cached) == KEYS[:2]
    record(cached, Stored(1, 2, [3]), seqs=[sequence()])

    assert held(cached) == KEYS[:3]


def test_a_cleared_cache_holds_nothing() -> None:
    cached = CachedBlocks(HASHER)
    record(cached, Stored(1, None, [1, 2]), seqs=[sequence()])
    cached.drain()
    record(cached, Cleared())

    assert cached.drain() == BlockEvents(2, b"", KEYS[0] + KEYS[1])
    assert held(cached) == []


STEPS = st.lists(
    st.one_of(st.tuples(st.just("store"), st.integers(0, 2)), st.tuples(st.just("remove"), st.integers(0, 99)))
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, drains=st.lists(st.booleans(), min_size=100, max_size=100))
def test_events_lead_to_what_is_held(steps: list[tuple[str, int]], drains: list[bool]) -> None:
    """Blocks of three sequences (two have the same keys under other hashes), in the order of their chains, and any of
    them removed; a mirror of the drained events holds what the snapshot does."""
    seqs = [sequence(), sequence(), sequence(root=HASHER.root("other"))]
    cached, mirror = CachedBlocks(HASHER), set[bytes]()
    chains: list[list[int]] = [[], [], []]
    blocks: Counter[int] = Counter()
    for (what, number), drained in zip(steps, drains, strict=False):
        if what == "store" and len(chains[number]) < len(KEYS):
            name = 100 * number + len(chains[number])
            record(cached, Stored(number + 1, chains[number][-1] if chains[number] else None, [name]), seqs=seqs)
            chains[number].append(name)
            blocks[name] += 1
        elif what == "remove" and blocks:
            name = sorted(blocks)[number % len(blocks)]
            blocks -= Counter([name])
            record(cached, Removed([name]))
            if name == chains[name // 100][-1]:
                chains[name // 100].pop()
        if drained and (events := cached.drain()) is not None:
            mirror = (mirror - set(split_keys(events.removed))) | set(split_keys(events.stored))
    if (events := cached.drain()) is not None:
        mirror = (mirror - set(split_keys(events.removed))) | set(split_keys(events.stored))

    assert mirror == set(held(cached))
    roots = {0: ROOT, 1: ROOT, 2: HASHER.root("other")}
    assert mirror >= {
        HASHER.extend(roots[name // 100], TOKENS)[name % 100] for name in blocks if _is_chained(name, blocks)
    }


def _is_chained(name: int, blocks: "Counter[int]") -> bool:
    """Whether all blocks before it are there, so that its parent was known whenever it was stored."""
    return all(before in blocks for before in range(name - name % 100, name))
