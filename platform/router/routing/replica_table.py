"""The replicas of a pool as the policy compares them, in arrays: a row for each, written when something changed.

Not the comparison (`search`), and not whose requests run where (`penstock.router.replicas`). Invariant: a row holds
what the `ReplicaView` had that it was last given; one that is closed is no candidate.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from penstock.perf.blend import RunningMean
from penstock.perf.many import Paces, read_paces
from penstock.perf.model import predict_row_wait_s
from penstock.perf.work_table import WorkTable
from penstock.router.routing.policy import ReplicaView, is_crowded
from penstock.wire.frames import StepCosts

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class ReplicaTable:
    """replica_ids: of the rows, in their order; all are closed at first."""

    def __init__(self, pool: str, replica_ids: Sequence[str]) -> None:
        self.pool = pool
        self.replica_ids = replica_ids
        self.works = WorkTable(len(replica_ids))
        self._columns: Floats = np.zeros((8, len(replica_ids)))
        self.max_model_len, self.credit, self.num_inflight, self.may_crowd = self._columns[:4]
        """Arrays [replicas] of the longest context, 0 where a replica takes nothing; of the live sequences that this
        router may have there and of those that it has; of 1 where so few wait that a tenant may overdraw, else 0."""
        self.room_tokens, self.limit_tokens, self.is_ready, self.is_draining = self._columns[4:]
        """Arrays [replicas] of uncached tokens for which free blocks remain (a request must have less), of the same
        where there is credit, else -inf, and of 1 where a replica is ready, or drains, else 0."""
        self._flat = self._columns.data.cast("B").cast("d")
        self._row_wait_s: Floats = np.zeros(len(replica_ids))
        self._full: set[int] = set()
        """Rows of the replicas where a sequence has to wait until another one ends."""
        self._mean = RunningMean(len(replica_ids))
        self._paces: Paces | None = None
        self._packed: tuple[StepCosts, array[float]] | None = None
        self.addresses = tuple(
            [each.ctypes.data for each in (self.works.numbers, self.works.own_tpot_s, self._columns)]
        )
        """Where `WorkTable.numbers`, `WorkTable.own_tpot_s` and the arrays of this table lie, one behind the other."""

    def write(self, row: int, view: ReplicaView) -> None:
        """Replace what is known of a replica; what the view says of a request is ignored."""
        load, work, flat, size = view.load, view.work, self._flat, len(self.replica_ids)
        is_idle = not (work.num_running or work.num_waiting)
        room = float("inf") if is_idle else load.free_blocks * view.block_size - view.unreported.prefill_tokens
        flat[row] = 0 if load.is_draining else view.max_model_len
        flat[size + row], flat[2 * size + row] = load.max_inflight, view.num_inflight
        flat[3 * size + row] = 0 if is_crowded(load, work) else 1
        flat[4 * size + row] = room
        flat[5 * size + row] = room if view.num_inflight < load.max_inflight else float("-inf")
        flat[6 * size + row], flat[7 * size + row] = 1, load.is_draining
        self._write_row_wait(row, predict_row_wait_s(work, load.max_running, load.row_hold_s))
        self.works.write(row, work, load.max_batched_tokens, load.costs)
        self._mean.write(row, load.costs)
        self._paces = None

    def close(self, row: int) -> None:
        """Make a replica no candidate: it is not ready."""
        self._columns[:, row] = 0.0
        self._write_row_wait(row, 0.0)
        self._mean.write(row, None)
        self._paces = None

    def _write_row_wait(self, row: int, wait_s: float) -> None:
        if not wait_s and row not in self._full:
            return
        self._row_wait_s[row] = wait_s
        if wait_s:
            self._full.add(row)
        else:
            self._full.discard(row)

    def row_wait_s(self) -> Floats | None:
        """Array [replicas] of seconds until one more sequence is among the running ones; None: nowhere any."""
        return self._row_wait_s if self._full else None

    def paces(self) -> Paces:
        """What predictions begin with; at least one row must not be closed."""
        if self._paces is None:
            self._paces = read_paces(self.works, self._mean.read())
        return self._paces

    def mean_costs(self) -> StepCosts:
        """The mean of the replicas' costs; at least one row must not be closed."""
        return self._mean.read()

    def packed_costs(self) -> "array[float]":
        """The mean of the replicas' costs as the C++ choice reads them (`Packed` of model.hpp); zeros while all rows
        are closed."""
        if not self._mean.num_present:
            return array("d", _pack(StepCosts()))
        mean = self._mean.read()
        if self._packed is None or self._packed[0] is not mean:
            self._packed = mean, array("d", _pack(mean))
        return self._packed[1]

    def count_places(self, is_allowed: Bools | None = None) -> tuple[int, int]:
        """Places for sequences where a request may go (None: anywhere): those that are free now, and all that this
        router has or may have."""
        free, places = np.maximum(self.credit - self.num_inflight, 0), np.maximum(self.credit, self.num_inflight)
        if is_allowed is not None:
            free, places = free * is_allowed, places * is_allowed
        return int(free.sum()), int(places.sum())


class PoolQuery(NamedTuple):
    """What a request finds in the replicas of one pool: arrays with an entry for each."""

    table: ReplicaTable
    cached_tokens: Floats
    """Leading tokens of the request that each holds, in full blocks."""
    is_cached: bool = True
    """Whether any of them may hold a token."""
    is_allowed: Bools | None = None
    """Whether the request may go there; None: to each one."""
    adapter_load_s: Floats | None = None
    """Seconds until its adapter is loaded; None: it needs none."""
    lacks_adapter_slot: Bools | None = None
    """Whether it would have to wait for a slot there; None: nowhere."""

    def start_wait_s(self, *, may_overdraw: bool) -> Floats | None:
        """Seconds until the request could begin: a row is free, and its adapter there; None: nowhere any. may_overdraw:
        whether others make room for it."""
        row_wait_s = None if may_overdraw else self.table.row_wait_s()
        if row_wait_s is None or self.adapter_load_s is None:
            return self.adapter_load_s if row_wait_s is None else row_wait_s
        return np.maximum(row_wait_s, self.adapter_load_s)


def _pack(costs: StepCosts) -> list[float]:
    *coefficients, stairs = astuple(costs)
    if stairs is None:
        return [*coefficients, 0, 0, 0, 0, 0]
    places, seconds = zip(*stairs.cliffs, strict=True) if stairs.cliffs else ((), ())
    sizes = stairs.recorded_rows, stairs.recorded_tokens, stairs.eager_knee_s, len(places)
    return [*coefficients, 1, *sizes, *places, *seconds]
