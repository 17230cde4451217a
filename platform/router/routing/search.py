"""The policy's choice among many replicas: `policy.choose` over tables instead of views, with the same filter, cost,
tie rule and draw. Pure; randomness comes in as a parameter.

Every candidate is compared: in arrays that costs less than finding out whom to leave out. What is short is what a
decision keeps of them (`shortlist`).
Invariant: the same tables and random numbers give the decision that `choose` makes, but where two costs, or a cost and
the bound of a tie, differ by rounding only.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.perf.many import Others, Request, cost_many, sum_backlogs_s
from penstock.router.routing.policy import (
    FULL_BACKLOG_S,
    LEAST_WEIGHT,
    MILDEST_FIRST,
    NUM_FOLLOWING,
    TIE_S,
    TIE_SHARE,
    Decision,
    Reason,
    Wait,
    draw_two,
)
from penstock.router.routing.replica_table import PoolQuery
from penstock.router.routing.shortlist import Shortlist, ShortPool, copy_rows

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NUM_CHEAPEST = 4
"""Candidates that a decision keeps of those that cost the same; where they are fewer, it keeps the next one."""


class Search(Protocol):
    """The choice among the replicas of pools: in arrays (`search`), or in C++ (`native_search`)."""

    def __call__(
        self, queries: Sequence[PoolQuery], request: Request, random: Random, *, may_overdraw: bool = False
    ) -> Decision:
        """The cheapest replica for a request; see `policy` for the cost. may_overdraw: whether the tenant has less than
        its share, so that neither credit nor free blocks are needed where few wait."""


class Searching(NamedTuple):
    """A choice among many, and the most replicas that are compared one by one (`policy.choose`), which is quicker where
    they are so few."""

    search: Search
    max_viewed: int


class _Field(NamedTuple):
    """The replicas of all pools, one pool behind the other: arrays with an entry for each."""

    is_candidate: Bools
    num_candidates: int
    cost_s: Floats
    """Infinite for those that can't take the request now."""
    ttft_s: Floats
    cached_tokens: Floats


def search(queries: Sequence[PoolQuery], request: Request, random: Random, *, may_overdraw: bool = False) -> Decision:
    """The `Search` in arrays."""
    able = [_find_able(query, request.num_tokens, may_overdraw=may_overdraw) for query in queries]
    counts = [int(np.count_nonzero(each)) for each in able]
    num_candidates = sum(counts)
    if not num_candidates:
        return Decision(None, _why_none(queries, request.num_tokens, may_overdraw=may_overdraw))
    mean_s = _mean_backlog_s(queries, able, counts)
    others = Others(mean_s, FULL_BACKLOG_S, LEAST_WEIGHT, NUM_FOLLOWING)
    waits_s = [query.start_wait_s(may_overdraw=may_overdraw) for query in queries]
    fields = [
        _read_field(query, request, candidates, count, others, start_wait_s)
        for query, candidates, count, start_wait_s in zip(queries, able, counts, waits_s, strict=True)
    ]
    field = fields[0] if len(fields) == 1 else _join(fields)
    best = int(field.cost_s.argmin())
    within_s = max(TIE_S, TIE_SHARE * float(field.ttft_s[best]))
    tied = (field.cost_s - field.cost_s[best] <= within_s).nonzero()[0]
    num_tied = len(tied)
    chosen, drawn = best, None
    if num_tied > 1:
        one, other = draw_two(range(num_tied), random)
        drawn = int(tied[one]), int(tied[other])
        chosen = min(drawn, key=lambda place: (*_crowd(queries, place), -field.cached_tokens[place]))
    cached_tokens = int(field.cached_tokens[chosen])
    extremes = _find_extremes(field) if cached_tokens else ()
    least, most = field.cached_tokens.take(extremes).tolist() if extremes else (0, 0)
    kept = _choose_kept(field, tied, {chosen, best, *(drawn or ()), *extremes})
    pools = [copy_rows(queries[0], kept, waits_s[0])] if len(queries) == 1 else _copy(queries, kept, waits_s)
    ids = [replica_id for pool in pools for replica_id in pool.replica_ids]
    drawn_ids = None if drawn is None else (ids[kept.index(drawn[0])], ids[kept.index(drawn[1])])
    return Decision(
        replica_id=ids[kept.index(chosen)],
        reason=explain(num_candidates, num_tied, holds_most=cached_tokens == most > least),
        predicted_ttft_s=float(field.ttft_s[chosen]),
        cached_tokens=cached_tokens,
        scores=dict(zip(ids, field.ttft_s[kept].tolist(), strict=True)),
        basis=Shortlist(request, pools, num_candidates, num_tied, drawn_ids, mean_s),
    )


IN_ARRAYS = Searching(search, 3)


def _find_able(query: PoolQuery, num_tokens: int, *, may_overdraw: bool) -> Bools:
    """The replicas that can take a request now."""
    table = query.table
    able: Bools = num_tokens - query.cached_tokens < table.limit_tokens
    if may_overdraw:
        able |= table.may_crowd > 0
    able &= table.max_model_len > num_tokens
    if query.is_allowed is not None:
        able &= query.is_allowed
    if query.lacks_adapter_slot is not None:
        able &= ~query.lacks_adapter_slot
    return able


def _why_none(queries: Sequence[PoolQuery], num_tokens: int, *, may_overdraw: bool) -> Wait:
    """The mildest of the obstacles, where no replica can take the request; `policy.choose` names the same."""
    found = set[Wait]()
    for query in queries:
        table = query.table
        is_open = table.max_model_len > 0
        if query.is_allowed is not None:
            is_open &= query.is_allowed
        is_fit = is_open & (table.max_model_len > num_tokens)
        has_credit = table.num_inflight < table.credit
        if may_overdraw:
            has_credit |= table.may_crowd > 0
        has_credit &= is_fit
        has_slot = has_credit if query.lacks_adapter_slot is None else has_credit & ~query.lacks_adapter_slot
        obstacles = (
            (Wait.NO_BLOCKS, has_slot),
            (Wait.NO_ADAPTER_SLOT, has_credit),
            (Wait.NO_CREDIT, is_fit),
            (Wait.CONTEXT, is_open),
        )
        found.add(next((wait for wait, where in obstacles if where.any()), Wait.NO_REPLICA))
    return next(wait for wait in MILDEST_FIRST if wait in found)


def _mean_backlog_s(queries: Sequence[PoolQuery], able: Sequence[Bools], counts: Sequence[int]) -> float:
    """Same as `policy.mean_backlog_s`. able, counts: the candidates of each pool, and their number."""
    totals_s = [
        sum_backlogs_s(query.table.works, query.table.paces(), candidates)
        for query, candidates, count in zip(queries, able, counts, strict=True)
        if count
    ]
    return sum(totals_s) / sum(counts)


def _read_field(
    query: PoolQuery, request: Request, able: Bools, num_able: int, others: Others, start_wait_s: Floats | None
) -> _Field:
    """able, num_able: the pool's candidates, and their number."""
    table, cached_tokens = query.table, query.cached_tokens
    if not num_able:
        nowhere = np.full(len(able), np.inf)
        return _Field(able, 0, nowhere, nowhere, cached_tokens)
    cost_s, ttft_s = cost_many(table.works, table.paces(), request, cached_tokens, others)
    if start_wait_s is not None:
        cost_s, ttft_s = cost_s + start_wait_s, ttft_s + start_wait_s
    if num_able < len(able):
        cost_s[~able] = np.inf
    return _Field(able, num_able, cost_s, ttft_s, cached_tokens)


def _join(fields: Sequence[_Field]) -> _Field:
    able, counts, *others = zip(*fields, strict=True)
    return _Field(np.concatenate(able), sum(counts), *map(np.concatenate, others))


def _find_extremes(field: _Field) -> tuple[int, int]:
    """The candidates that hold the least and the most of the request."""
    cached_tokens, is_candidate = field.cached_tokens, field.is_candidate
    if field.num_candidates == len(is_candidate):
        return int(cached_tokens.argmin()), int(cached_tokens.argmax())
    return (
        int(np.where(is_candidate, cached_tokens, np.inf).argmin()),
        int(np.where(is_candidate, cached_tokens, -1.0).argmax()),
    )


def _choose_kept(field: _Field, tied: NDArray[np.intp], certain: set[int]) -> list[int]:
    """Places of the candidates that the decision's basis keeps, in their order."""
    if field.num_candidates <= len(certain) + NUM_CHEAPEST:
        kept: list[int] = field.is_candidate.nonzero()[0].tolist()
        return kept
    if len(tied) >= NUM_CHEAPEST:
        return sorted(certain.union(tied[:NUM_CHEAPEST].tolist()))
    others = field.cost_s.copy()
    others[list(certain)] = np.inf
    return sorted((*certain, int(others.argmin())))


def explain(num_candidates: int, num_tied: int, *, holds_most: bool) -> Reason:
    """holds_most: whether no candidate holds more of the prompt than the chosen one, and another one less."""
    if num_candidates == 1:
        return Reason.ONLY_REPLICA
    if num_tied == num_candidates:
        return Reason.TIE
    return Reason.PREFIX if holds_most else Reason.LEAST_LOADED


def _crowd(queries: Sequence[PoolQuery], place: int) -> tuple[float, float]:
    """Requests of this router and sequences at a replica, by its place in the field."""
    for query in queries:
        table = query.table
        if place < len(table.replica_ids):
            return table.num_inflight[place], table.works.rows[place]
        place -= len(table.replica_ids)
    raise IndexError(place)


def _copy(queries: Sequence[PoolQuery], kept: Sequence[int], waits_s: Sequence[Floats | None]) -> list[ShortPool]:
    """Copies of the kept replicas, by their places in the field."""
    copies, first = [], 0
    for query, start_wait_s in zip(queries, waits_s, strict=True):
        end = first + len(query.table.replica_ids)
        rows = [place - first for place in kept if first <= place < end]
        if rows:
            copies.append(copy_rows(query, rows, start_wait_s))
        first = end
    return copies
