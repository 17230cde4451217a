"""Frames between replicas and routers of different versions."""

import msgspec

from penstock.wire.frames import DownFrame, Load, StepCosts, decode_down, encode

COSTS = StepCosts(base_s=0.01, knee_s=0.02, sampled_row_s=0.001)
LOAD = Load("e", 1, 2, 3, 4, 5, 6, 7, 8, COSTS, 512, num_sampled=2)


def as_lists(frame: DownFrame) -> list[object]:
    return list(msgspec.msgpack.decode(encode(frame)))


def test_a_load_report_of_a_replica_that_knows_no_sampled_rows_is_read() -> None:
    [deltas, load, *rest] = as_lists(DownFrame([], LOAD))
    assert isinstance(load, list)
    costs = load[9]
    earlier = [deltas, [*load[:9], costs[:-1], *load[10:-1]], *rest]

    read = decode_down(msgspec.msgpack.encode(earlier)).load

    assert read == msgspec.structs.replace(LOAD, costs=msgspec.structs.replace(COSTS, sampled_row_s=0.0), num_sampled=0)


def test_a_load_report_of_a_later_version_with_more_numbers_is_read() -> None:
    [deltas, load, *rest] = as_lists(DownFrame([], LOAD))
    assert isinstance(load, list)
    later = [deltas, [*load[:9], [*load[9], 0.5], *load[10:], 99], *rest]

    assert decode_down(msgspec.msgpack.encode(later)).load == LOAD
