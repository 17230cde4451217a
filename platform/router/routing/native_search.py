"""The choice among many replicas in C++: the decision of `policy.choose`, to the last bit, at a fraction of its time.

Python draws, names and packs; what is computed for each replica is computed there. Not thread safe: one event loop owns
it.
"""

import ctypes
from array import array
from collections.abc import Sequence
from random import Random
from struct import Struct

from penstock.perf.many import Request
from penstock.router.routing.native.build import load_library
from penstock.router.routing.native.library import Library
from penstock.router.routing.policy import MILDEST_FIRST, Decision, draw_two
from penstock.router.routing.replica_table import PoolQuery
from penstock.router.routing.search import IN_ARRAYS, Searching, explain
from penstock.router.routing.shortlist import NUM_FIELDS, PackedPool, PackedShortlist

_POOL = Struct("9q")
"""`Pool` of choice.cpp."""
_NUM_POINTERS, _NUM_FOUND, _NUM_KEEPING, _MAX_KEPT = 3, 7, 5, 9
_FOUND = slice(_NUM_POINTERS, _NUM_POINTERS + _NUM_FOUND)
_KEEPING = slice(_FOUND.stop, _FOUND.stop + _NUM_KEEPING)
_MEAN_BACKLOG = _FOUND.stop - 1
_FIELDS = _KEEPING.stop + _MAX_KEPT
_NUM_WORDS = _FIELDS + _MAX_KEPT * NUM_FIELDS
"""`Room` of choice.cpp, in parts of 8 bytes."""


def open_search() -> Searching:
    """The choice in C++, or where it can't be built, with a warning, in arrays."""
    library = load_library()
    return IN_ARRAYS if library is None else Searching(NativeSearch(library), 1)


class NativeSearch:
    """The `penstock.router.routing.search.Search` in C++."""

    def __init__(self, library: Library) -> None:
        self._compare, self._keep = library.compare, library.keep
        self._room = bytearray(8 * _NUM_WORDS)
        self._room_address = _address(self._room)
        view = memoryview(self._room)
        self._words, self._numbers = view.cast("q"), view.cast("d")
        self._pools = bytearray()
        self._widen_pools(1)
        self._widen(64)

    def __call__(
        self, queries: Sequence[PoolQuery], request: Request, random: Random, *, may_overdraw: bool = False
    ) -> Decision:
        held = self._pack(queries, may_overdraw=may_overdraw)
        num_pools, words, pools = len(queries), self._words, self._pools_address
        self._compare(pools, num_pools, self._room_address, *request, may_overdraw)
        num_candidates, num_tied, _best, _least, _most, obstacle, _mean_s = words[_FOUND].tolist()
        if not num_candidates:
            return Decision(None, MILDEST_FIRST[obstacle])
        one, other = draw_two(range(num_tied), random) if num_tied > 1 else (-1, -1)
        self._keep(pools, num_pools, self._room_address, one, other)
        del held
        num_kept, chosen, one, other, holds_most = words[_KEEPING].tolist()
        end = _FIELDS + num_kept * NUM_FIELDS
        kept = _name(queries, words[_KEEPING.stop : _KEEPING.stop + num_kept].tolist())
        ids = [replica_id for pool in kept for replica_id in pool.replica_ids]
        ttfts_s = self._numbers[_FIELDS + 9 : end : NUM_FIELDS].tolist()
        return Decision(
            ids[chosen],
            explain(num_candidates, num_tied, holds_most=bool(holds_most)),
            ttfts_s[chosen],
            int(self._numbers[_FIELDS + chosen * NUM_FIELDS + 7]),
            dict(zip(ids, ttfts_s, strict=True)),
            PackedShortlist(
                request,
                kept,
                bytes(self._room[8 * _FIELDS : 8 * end]),
                num_candidates,
                num_tied,
                None if one < 0 else (ids[one], ids[other]),
                self._numbers[_MEAN_BACKLOG],
            ),
        )

    def _pack(self, queries: Sequence[PoolQuery], *, may_overdraw: bool) -> list[object]:
        """Write where everything lies; returns what must not go away before it has been read."""
        if len(queries) > self._max_pools:
            self._widen_pools(len(queries))
        held: list[object] = []
        total = 0
        for number, query in enumerate(queries):
            table = query.table
            size, costs = len(table.replica_ids), table.packed_costs()
            start_wait_s = query.start_wait_s(may_overdraw=may_overdraw)
            held += [costs, start_wait_s]
            optional = [
                0 if each is None else each.ctypes.data
                for each in (query.is_allowed, start_wait_s, query.lacks_adapter_slot)
            ]
            cached = query.cached_tokens.ctypes.data
            _POOL.pack_into(
                self._pools,
                number * _POOL.size,
                *table.addresses,
                costs.buffer_info()[0],
                cached,
                *optional,
                size,
            )
            total += size
        if total > self._max_replicas:
            self._widen(2 * total)
        return held

    def _widen_pools(self, num_pools: int) -> None:
        self._max_pools = num_pools
        self._pools = bytearray(num_pools * _POOL.size)
        self._pools_address = _address(self._pools)

    def _widen(self, num_replicas: int) -> None:
        self._max_replicas = num_replicas
        costs_s, ttfts_s, tied = (array(kind, bytes(8 * num_replicas)) for kind in "ddq")
        self._rooms = costs_s, ttfts_s, tied
        for place, each in enumerate(self._rooms):
            self._words[place] = each.buffer_info()[0]


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _name(queries: Sequence[PoolQuery], places: Sequence[int]) -> list[PackedPool]:
    """The kept replicas of each pool, by their places among all."""
    if len(queries) == 1:
        table = queries[0].table
        ids = table.replica_ids
        return [PackedPool([ids[place] for place in places], table.mean_costs())]
    named, first = [], 0
    for query in queries:
        table = query.table
        end = first + len(table.replica_ids)
        kept = [table.replica_ids[place - first] for place in places if first <= place < end]
        if kept:
            named.append(PackedPool(kept, table.mean_costs()))
        first = end
    return named
