"""A pool's record: the last target decided on news, bursts, what was enough, starts. Pure.

Not in it: the load, which gateways' totals tell at once. Times are ages at the time of writing, so those of one record
are exact among each other; how long ago it was written is told by two wall clocks, which may differ by seconds: nothing
comes out in the future, and nothing here needs to be more exact than that. What can't be read is no record.
"""

import math
from typing import Annotated, Literal

import msgspec

from penstock.autoscale.peaks import Peak, note_peak
from penstock.autoscale.policy import State
from penstock.autoscale.starts import KEEP

VERSION: Literal[1] = 1

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class PeakRecord(msgspec.Struct, frozen=True, array_like=True):
    """Replicas that were needed so many seconds ago."""

    ago_s: Seconds
    replicas: Count


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a pool. Ages are seconds at the time of writing."""

    version: Literal[1]
    written_unix_s: float
    target: Count | None = None
    """Last target that was decided on fresh reports; None: none was."""
    bursts: Annotated[list[PeakRecord], msgspec.Meta(max_length=10_000)] = []
    enough: Annotated[list[PeakRecord], msgspec.Meta(max_length=10_000)] = []
    took_s: Annotated[list[Seconds], msgspec.Meta(max_length=KEEP)] = []
    """Seconds of the last starts, the latest last."""
    known_ago_s: Seconds | None = None
    """Age of what is known without a gap about what was enough."""
    pressed_ago_s: Seconds | None = None
    """Age of the last deadline in danger; None: there was none."""
    raised_ago_s: Seconds | None = None
    """Age of the last rise for a deadline; None: there was none."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PoolRecord)


def encode(record: PoolRecord) -> bytes:
    return _encoder.encode(record)


def decode(data: bytes) -> PoolRecord:
    """Decodes a record. Raises msgspec.MsgspecError where it is broken, impossible, or of another version."""
    return _decoder.decode(data)


def make_record(target: int | None, state: State, now: float, unix_s: float) -> PoolRecord:
    """The record of what is known at `now`, monotonic seconds, which is `unix_s` by the wall clock."""
    return PoolRecord(
        version=VERSION,
        written_unix_s=unix_s,
        target=target,
        bursts=[PeakRecord(max(0.0, now - peak.at_s), peak.replicas) for peak in state.bursts],
        enough=[PeakRecord(max(0.0, now - peak.at_s), peak.replicas) for peak in state.enough],
        took_s=list(state.starts.took_s),
        known_ago_s=None if state.known_s is None else max(0.0, now - state.known_s),
        pressed_ago_s=_age(state.pressed_s, now),
        raised_ago_s=_age(state.raised_s, now),
    )


def age_of(record: PoolRecord, unix_s: float) -> float:
    """Seconds since the record was written, at least 0."""
    return max(0.0, unix_s - record.written_unix_s)


def restore(state: State, record: PoolRecord, now: float, unix_s: float) -> State:
    """The state with what the record knows besides."""
    written_s = now - age_of(record, unix_s)
    return state._replace(
        bursts=_merge(record.bursts, state.bursts, written_s),
        enough=_merge(record.enough, state.enough, written_s),
        starts=state.starts._replace(took_s=(*record.took_s, *state.starts.took_s)[-KEEP:]),
        known_s=state.known_s if record.known_ago_s is None else written_s - record.known_ago_s,
        pressed_s=max(state.pressed_s, _time(record.pressed_ago_s, written_s)),
        raised_s=max(state.raised_s, _time(record.raised_ago_s, written_s)),
    )


def is_same(before: PoolRecord, after: PoolRecord) -> bool:
    """Whether two records differ in their times alone."""
    return _essence(before) == _essence(after)


def is_urgent(before: PoolRecord, after: PoolRecord) -> bool:
    """Whether the target has risen, or a deadline is in danger for the first time: a successor that knew only the
    earlier record would take back too soon what was asked for."""
    return (
        (after.target or 0) > (before.target or 0)
        or (before.raised_ago_s is None and after.raised_ago_s is not None)
        or (before.pressed_ago_s is None and after.pressed_ago_s is not None)
    )


def _essence(record: PoolRecord) -> tuple[object, ...]:
    peaks = [[peak.replicas for peak in peaks] for peaks in (record.bursts, record.enough)]
    return record.target, peaks, record.took_s, record.raised_ago_s is None, record.pressed_ago_s is None


def _merge(recorded: list[PeakRecord], own: tuple[Peak, ...], written_s: float) -> tuple[Peak, ...]:
    peaks: tuple[Peak, ...] = ()
    for peak in sorted((*(Peak(written_s - each.ago_s, each.replicas) for each in recorded), *own)):
        peaks = note_peak(peaks, peak, math.inf)
    return peaks


def _age(at_s: float, now: float) -> float | None:
    return max(0.0, now - at_s) if math.isfinite(at_s) else None


def _time(ago_s: float | None, written_s: float) -> float:
    return -math.inf if ago_s is None else written_s - ago_s
