import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.autoscale.peaks import Peak, highest, note_peak
from penstock.autoscale.policy import State
from penstock.autoscale.records.record import PoolRecord, age_of, decode, encode, is_same, make_record, restore
from penstock.autoscale.starts import KEEP, Starts

NOW, UNIX_S = 5000.0, 1_800_000_000.0
STEPS = st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 40)), max_size=20)


def peaks_of(steps: list[tuple[float, int]], end_s: float) -> tuple[Peak, ...]:
    """What a pool remembers that needed these replicas, each so many seconds after the one before, the last at the
    end."""
    peaks: tuple[Peak, ...] = ()
    at_s = end_s - sum(step_s for step_s, _ in steps)
    for step_s, replicas in steps:
        at_s += step_s
        peaks = note_peak(peaks, Peak(at_s, replicas), math.inf)
    return peaks


def state(bursts: tuple[Peak, ...] = (), took_s: tuple[float, ...] = (), raised_s: float = -math.inf) -> State:
    return State(bursts=bursts, enough=bursts, starts=Starts(took_s=took_s), raised_s=raised_s)


@given(STEPS, st.lists(st.floats(0.0, 3600.0), max_size=KEEP), st.floats(0.0, 600.0))
def test_a_new_process_knows_what_the_old_one_knew_by_its_own_clock(
    steps: list[tuple[float, int]], took_s: list[float], away_s: float
) -> None:
    before = state(peaks_of(steps, NOW), tuple(took_s), NOW - 3.0)
    record = decode(encode(make_record(7, before, NOW, UNIX_S)))
    clock_s = 40.0  # a monotonic clock of its own

    after = restore(State(), record, clock_s, UNIX_S + away_s)

    assert record.target == 7
    assert after.starts.took_s == tuple(took_s)
    assert after.raised_s == pytest.approx(clock_s - away_s - 3.0, abs=1e-3)
    assert after.pressed_s == -math.inf
    for keep_s in (1.0, 50.0, 500.0):
        known = highest(before.bursts, NOW + away_s, keep_s + 0.01)
        assert highest(after.bursts, clock_s, keep_s) <= known <= highest(after.bursts, clock_s, keep_s + 0.02)


@given(STEPS, STEPS)
def test_what_was_learned_before_redis_answered_is_kept_beside_the_record(
    recorded: list[tuple[float, int]], own: list[tuple[float, int]]
) -> None:
    record = make_record(1, state(peaks_of(recorded, NOW - 100.0)), NOW, UNIX_S)

    found = restore(state(peaks_of(own, NOW)), record, NOW, UNIX_S)

    replicas = [peak.replicas for peak in found.bursts]
    assert replicas == sorted(set(replicas), reverse=True)
    assert max(replicas, default=0) == max((count for _, count in (*recorded, *own)), default=0)


@pytest.mark.parametrize("off_s", [-5.0, 5.0, -1e6])
def test_a_clock_that_is_off_brings_nothing_from_the_future(off_s: float) -> None:
    record = make_record(3, state((Peak(NOW - 20.0, 4),), raised_s=NOW - 1.0), NOW, UNIX_S)

    found = restore(State(), record, NOW, UNIX_S + off_s)

    assert age_of(record, UNIX_S + off_s) == max(0.0, off_s)
    assert found.bursts == (Peak(NOW - 20.0 - max(0.0, off_s), 4),)
    assert found.raised_s <= NOW - 1.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not JSON",
        b"[]",
        b'{"written_unix_s":1.0}',
        b'{"version":2,"written_unix_s":1.0}',
        b'{"version":1,"written_unix_s":1e999}',
        b'{"version":1,"written_unix_s":1.0,"target":-1}',
        b'{"version":1,"written_unix_s":1.0,"bursts":[[-1.0,3]]}',
        b'{"version":1,"written_unix_s":1.0,"took_s":[1e300]}',
        b'{"version":1,"written_unix_s":1.0,"enough":"many"}',
    ],
)
def test_what_is_broken_or_impossible_or_of_another_version_is_no_record(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(data)


def test_a_field_of_a_later_program_is_passed_over() -> None:
    assert decode(b'{"version":1,"written_unix_s":1.0,"later":true}') == PoolRecord(version=1, written_unix_s=1.0)


def test_only_times_do_not_make_a_record_another_one() -> None:
    one = make_record(3, state((Peak(NOW - 20.0, 4),)), NOW, UNIX_S)

    assert is_same(one, make_record(3, state((Peak(NOW, 4),)), NOW + 9.0, UNIX_S + 9.0))
    assert not is_same(one, make_record(4, state((Peak(NOW - 20.0, 4),)), NOW, UNIX_S))
    assert not is_same(one, make_record(3, state((Peak(NOW - 20.0, 5),)), NOW, UNIX_S))
    assert not is_same(one, make_record(3, state((Peak(NOW - 20.0, 4),), (2.0,)), NOW, UNIX_S))
