"""Messages of gateways and replicas of two versions, which meet during a rolling update."""

import msgspec

from penstock.wire.frames import (
    Constraint,
    Delta,
    DownFrame,
    Load,
    LoadAdapter,
    SamplingParams,
    Stairs,
    StepCosts,
    Submit,
    TimeAccounts,
    UpFrame,
    decode_down,
    decode_up,
    encode,
    pack_token_ids,
)


class SubmitBefore(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """`Submit` of the version that knew no `seconds_left`."""

    sid: int
    request_id: str
    packed_token_ids: bytes
    block_keys: bytes
    chain_key: bytes
    sampling: SamplingParams
    num_output_tokens: int = 0
    adapter: str | None = None
    tenant: str = ""
    deadline: float | None = None
    traceparent: str | None = None


class UpFrameBefore(msgspec.Struct, frozen=True, array_like=True):
    ops: list[SubmitBefore]


FIELDS = 1, "q", pack_token_ids([1, 2]), b"", b"c" * 16, SamplingParams(max_tokens=2), 0, None, "t", 1_700_000_030.0


def test_a_replica_of_the_version_before_reads_the_deadline_of_a_gateway_of_this_one() -> None:
    data = encode(UpFrame([Submit(*FIELDS, seconds_left=30.0, service_class="batch")]))
    (op,) = msgspec.msgpack.decode(data, type=UpFrameBefore).ops

    assert op == SubmitBefore(*FIELDS)


def test_a_gateway_of_the_version_before_is_understood() -> None:
    (op,) = decode_up(msgspec.msgpack.encode(UpFrameBefore([SubmitBefore(*FIELDS)]))).ops

    assert op == Submit(*FIELDS)
    assert isinstance(op, Submit)
    assert (op.deadline, op.seconds_left, op.service_class) == (1_700_000_030.0, None, "standard")


COSTS = StepCosts(base_s=0.01, knee_s=0.02, sampled_row_s=0.001)
LOAD = Load("e", 1, 2, 3, 4, 5, 6, 7, 8, COSTS, 512, num_sampled=2, num_compiled=3)


def as_lists(frame: DownFrame) -> list[object]:
    return list(msgspec.msgpack.decode(encode(frame)))


def field_of(name: str) -> int:
    """Place of a field of a load report: a version before it sends as many fields."""
    return Load.__struct_fields__.index(name)


def test_a_load_report_of_a_replica_that_knows_no_rows_is_read_and_rows_arrive() -> None:
    report = msgspec.structs.replace(LOAD, max_running=64, row_hold_s=2.5)
    [deltas, load, *rest] = as_lists(DownFrame([], report))
    assert isinstance(load, list)
    earlier = [deltas, load[: field_of("max_running")], *rest]

    assert decode_down(encode(DownFrame([], report))).load == report
    assert decode_down(msgspec.msgpack.encode(earlier)).load == LOAD


def test_a_load_report_of_a_replica_that_knows_no_sampled_rows_is_read() -> None:
    [deltas, load, *rest] = as_lists(DownFrame([], LOAD))
    assert isinstance(load, list)
    costs = load[9]
    earlier = [deltas, [*load[:9], costs[:-2], *load[10 : field_of("num_sampled")]], *rest]

    read = decode_down(msgspec.msgpack.encode(earlier)).load

    earlier_costs = msgspec.structs.replace(COSTS, sampled_row_s=0.0)
    assert read == msgspec.structs.replace(LOAD, costs=earlier_costs, num_sampled=0, num_compiled=0)


def test_a_load_report_of_a_replica_that_knows_no_stairs_is_read_and_stairs_arrive_whole() -> None:
    stairs = Stairs(256, 512, 0.008, ((16, 0.001), (64, 0.002)))
    report = msgspec.structs.replace(LOAD, costs=msgspec.structs.replace(COSTS, stairs=stairs))
    [deltas, load, *rest] = as_lists(DownFrame([], report))
    assert isinstance(load, list)
    earlier = [deltas, [*load[:9], load[9][:-1], *load[10:]], *rest]

    assert decode_down(encode(DownFrame([], report))).load == report
    assert decode_down(msgspec.msgpack.encode(earlier)).load == LOAD


def test_a_load_report_of_a_later_version_with_more_numbers_is_read() -> None:
    [deltas, load, *rest] = as_lists(DownFrame([], LOAD))
    assert isinstance(load, list)
    later = [deltas, [*load[:9], [*load[9], 0.5], *load[10:], 99], *rest]

    assert decode_down(msgspec.msgpack.encode(later)).load == LOAD


def test_deltas_and_load_reports_of_replicas_that_know_no_shares_of_time_are_read_and_known_ones_arrive() -> None:
    report = msgspec.structs.replace(LOAD, accounts=TimeAccounts(20.0, 3.0, 4.0, 5.0, 0.5))
    frame = DownFrame([Delta(7, [1, 2], num_beam_tokens=3, step_s=0.25)], report)
    [deltas, load, *rest] = as_lists(frame)
    assert isinstance(deltas, list)
    assert isinstance(load, list)
    earlier = [[deltas[0][:-1]], load[: field_of("accounts")], *rest]

    assert decode_down(encode(frame)) == frame
    assert decode_down(msgspec.msgpack.encode(earlier)) == DownFrame([Delta(7, [1, 2], num_beam_tokens=3)], LOAD)


class LoadAdapterBefore(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    digest: str


def test_replicas_that_know_no_tenant_of_an_adapter_to_load_read_the_rest() -> None:
    data = msgspec.msgpack.encode(LoadAdapter("d", "t"))

    assert msgspec.msgpack.decode(data, type=LoadAdapterBefore) == LoadAdapterBefore("d")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LoadAdapterBefore("d")), type=LoadAdapter) == LoadAdapter("d")


def test_a_constraint_reaches_replicas_that_know_none_as_nothing_and_the_others_whole() -> None:
    """Gateways send it only to replicas that publish that they know constraints."""
    data = encode(UpFrame([Submit(*FIELDS, constraint=Constraint("regex", "a+"))]))
    (known,) = decode_up(data).ops
    (unknown,) = msgspec.msgpack.decode(data, type=UpFrameBefore).ops
    (absent,) = decode_up(msgspec.msgpack.encode(UpFrameBefore([SubmitBefore(*FIELDS)]))).ops

    assert isinstance(known, Submit)
    assert isinstance(absent, Submit)
    assert known.constraint == Constraint("regex", "a+")
    assert unknown == SubmitBefore(*FIELDS)
    assert absent.constraint is None
