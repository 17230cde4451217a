"""What a decision among many replicas keeps of those that it compared: copied at once, since the tables go on changing,
and put into words (`policy.Basis`) when somebody asks.

Invariant: nothing here changes after it was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.perf.many import Request
from penstock.perf.model import Work, scale_costs
from penstock.perf.work_table import read_work
from penstock.router.routing.policy import Basis, Compared
from penstock.router.routing.replica_table import PoolQuery
from penstock.wire.frames import StepCosts


class ShortPool(NamedTuple):
    """The replicas of one pool that are kept. Arrays have an entry for each of them."""

    replica_ids: Sequence[str]
    works: NDArray[np.float64]
    """Columns of `WorkTable.numbers`."""
    costs: StepCosts
    """The mean of the pool."""
    factors: NDArray[np.float64] | None
    """How much slower each is, beyond noise; None: they are alike."""
    num_inflight: NDArray[np.float64]
    cached_tokens: NDArray[np.float64]
    start_wait_s: NDArray[np.float64] | None
    """Seconds until the request could begin; None: none anywhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """The kept replicas of each pool, in the order in which they were compared."""

    request: Request
    pools: Sequence[ShortPool]
    num_candidates: int
    num_tied: int
    drawn: tuple[str, str] | None
    mean_backlog_s: float

    def read(self) -> Basis:
        """The basis of the decision."""
        compared = [each for pool in self.pools for each in _describe(pool)]
        return Basis(*self.request, compared, self.num_candidates, self.num_tied, self.drawn, self.mean_backlog_s)


def copy_rows(query: PoolQuery, rows: Sequence[int], start_wait_s: NDArray[np.float64] | None) -> ShortPool:
    """Copy what is known of some replicas of a pool. start_wait_s: of all of them, as of `PoolQuery.start_wait_s`."""
    table, paces, ids = query.table, query.table.paces(), query.table.replica_ids
    return ShortPool(
        [ids[row] for row in rows],
        table.works.numbers.take(rows, 1),
        paces.costs,
        None if paces.factors is None else paces.factors.take(rows),
        table.num_inflight.take(rows),
        query.cached_tokens.take(rows),
        None if start_wait_s is None else start_wait_s.take(rows),
    )


def _describe(pool: ShortPool) -> list[Compared]:
    described = []
    for place, replica_id in enumerate(pool.replica_ids):
        work, max_batched_tokens = read_work(pool.works, place)
        described.append(
            Compared(
                replica_id,
                work,
                pool.costs if pool.factors is None else scale_costs(pool.costs, float(pool.factors[place])),
                max_batched_tokens,
                int(pool.num_inflight[place]),
                int(pool.cached_tokens[place]),
                0.0 if pool.start_wait_s is None else float(pool.start_wait_s[place]),
            )
        )
    return described


class PackedPool(NamedTuple):
    """The replicas of one pool that are kept, by their ids, and the mean of the pool's costs."""

    replica_ids: Sequence[str]
    costs: StepCosts


NUM_FIELDS = 11
"""Numbers that the C++ choice keeps of a replica: those of its work and its `max_batched_tokens`, requests in flight,
cached tokens, seconds until it could begin, predicted TTFT, factor of its costs."""
_FIELDS = Struct(f"{NUM_FIELDS}d")


@dataclass(frozen=True, slots=True, eq=False)
class PackedShortlist:
    """The same as the C++ choice keeps it. fields: `NUM_FIELDS` doubles of each replica, pool behind pool."""

    request: Request
    pools: Sequence[PackedPool]
    fields: bytes
    num_candidates: int
    num_tied: int
    drawn: tuple[str, str] | None
    mean_backlog_s: float

    def read(self) -> Basis:
        """The basis of the decision."""
        members = [(replica_id, pool.costs) for pool in self.pools for replica_id in pool.replica_ids]
        compared = []
        for (replica_id, costs), fields in zip(members, _FIELDS.iter_unpack(self.fields), strict=True):
            *whole, start_wait_s, _ttft_s, factor = fields
            *work, max_batched_tokens, num_inflight, cached_tokens = map(int, whole)
            compared.append(
                Compared(
                    replica_id,
                    Work(*work),
                    scale_costs(costs, factor),
                    max_batched_tokens,
                    num_inflight,
                    cached_tokens,
                    start_wait_s,
                )
            )
        return Basis(*self.request, compared, self.num_candidates, self.num_tied, self.drawn, self.mean_backlog_s)
