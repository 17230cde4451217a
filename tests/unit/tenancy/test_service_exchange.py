"""Reports of gateways, made and merged; and three gateways with counters of their own over the same replicas."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec
import pytest
import redis.asyncio

from penstock.tenancy.service_exchange import (
    IDLE_S,
    KEPT_S,
    MAX_REPORT_BYTES,
    MAX_TENANTS,
    STALE_S,
    Merger,
    Publisher,
    Report,
    ServiceExchange,
)
from penstock.tenancy.share import Service


def report(number: int, **costs: float) -> Report:
    return Report(number, {tenant: Service(cost, False) for tenant, cost in costs.items()})


def test_what_others_gave_counts_from_the_second_report_on() -> None:
    merger = Merger()
    assert merger.merge({"other": report(7, a=100.0)}, 0.0) == ({}, set())

    assert merger.merge({"other": report(8, a=130.0, b=5.0)}, 1.0) == ({"a": 30.0, "b": 5.0}, set())
    assert merger.merge({"other": report(8, a=130.0, b=5.0)}, 2.0) == ({}, set())


def test_a_missed_report_is_made_up_for_by_the_next() -> None:
    merger = Merger()
    merger.merge({"other": report(1, a=10.0), "third": report(1, a=1.0)}, 0.0)

    assert merger.merge({"other": report(4, a=50.0), "third": report(2, a=3.0)}, 3.0) == ({"a": 42.0}, set())


def test_what_was_given_while_gateways_could_not_see_each_other_is_forgotten() -> None:
    merger = Merger()
    merger.merge({"other": report(1, a=10.0)}, 0.0)
    assert merger.merge({"other": report(9, a=1e6)}, STALE_S + 1) == ({}, set())
    merger.merge({}, STALE_S + 2)
    assert merger.merge({"other": report(11, a=2e6)}, STALE_S + 3) == ({}, set())

    assert merger.merge({"other": report(12, a=2e6 + 5)}, STALE_S + 4) == ({"a": 5.0}, set())


def test_a_sum_that_began_anew_takes_nothing_away() -> None:
    merger = Merger()
    merger.merge({"other": report(1, a=100.0)}, 0.0)

    assert merger.merge({"other": report(2, a=3.0)}, 1.0) == ({}, set())


def test_a_tenant_waits_at_another_gateway_until_that_one_has_not_written_for_long() -> None:
    merger, waiting = Merger(), Report(1, {"a": Service(0.0, True)})
    assert merger.merge({"other": waiting}, 0.0) == ({}, {"a"})
    assert merger.merge({"other": waiting}, STALE_S) == ({}, {"a"})

    assert merger.merge({"other": waiting}, STALE_S + 0.1) == ({}, set())
    assert merger.stale(KEPT_S) == []
    assert merger.stale(KEPT_S + 0.1) == ["other"]


def test_a_report_leaves_out_who_was_given_nothing_for_long() -> None:
    publisher = Publisher()
    busy, idle, waiting = Service(1.0, False), Service(2.0, False), Service(0.0, True)
    assert publisher.make({"busy": busy, "idle": idle, "waiting": waiting}, 0.0)[1] == []
    busy = Service(5.0, False)
    made, left_out = publisher.make({"busy": busy, "idle": idle, "waiting": waiting}, IDLE_S + 1)

    assert made == Report(2, {"busy": busy, "waiting": waiting})
    assert left_out == ["idle"]


def test_a_report_tells_of_a_bounded_number_of_tenants_those_that_wait_first() -> None:
    given = {f"t{number}": Service(1.0, number >= 9) for number in range(MAX_TENANTS + 9)}
    made, left_out = Publisher().make(given, 0.0)

    assert len(made.given) == MAX_TENANTS
    assert all(service.is_waiting for service in made.given.values())
    assert sorted(left_out) == [f"t{number}" for number in range(9)]
    longest = {f"{number:064}": Service(1e300 / 3, True) for number in range(MAX_TENANTS)}
    assert len(msgspec.msgpack.encode(Report(2**60, longest))) < MAX_REPORT_BYTES


class FakePipeline:
    def __init__(self, replies: list[object]) -> None:
        self._replies = replies

    async def __aenter__(self) -> "FakePipeline":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self

    async def execute(self) -> list[object]:
        return self._replies


class FakeRedis:
    """Answers every pipeline with the same fields of the hash."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self.fields = fields

    def pipeline(self, *, transaction: bool) -> FakePipeline:
        return FakePipeline([1, 1, self.fields])


class FakeCounters:
    def __init__(self) -> None:
        self.taken: list[tuple[Mapping[str, float], Iterable[str]]] = []

    def given(self) -> Mapping[str, Service]:
        return {}

    def forget_given(self, tenants: Iterable[str]) -> None:
        pass

    def take_elsewhere(self, costs: Mapping[str, float], waiting: Iterable[str]) -> None:
        self.taken.append((costs, waiting))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"x" * (MAX_REPORT_BYTES + 1), msgspec.msgpack.encode({"a": 1})])
async def test_what_can_not_be_read_is_left_out(data: bytes) -> None:
    good = msgspec.msgpack.encode(Report(1, {"a": Service(1.0, True)}))
    fake: redis.asyncio.Redis = FakeRedis({b"bad": data, b"good": good, b"me": good})  # type: ignore[assignment]
    counters = FakeCounters()
    await ServiceExchange(fake, "me", counters, lambda: None).exchange()

    assert counters.taken == [({}, {"a"})]


class FakeLoads:
    def __init__(self) -> None:
        self.others: list[float] | None = None

    def sample(self) -> float:
        return 3.5

    def compare(self, others: Sequence[float]) -> None:
        self.others = list(others)


async def test_gateways_tell_how_busy_they_are_and_older_ones_nothing() -> None:
    fields = {
        b"busy": msgspec.msgpack.encode(Report(1, {}, 12.0)),
        b"older": msgspec.msgpack.encode((1, {})),
        b"me": msgspec.msgpack.encode(Report(1, {}, 99.0)),
    }
    fake, loads = cast("redis.asyncio.Redis", FakeRedis(fields)), FakeLoads()
    now = [0.0]
    exchange = ServiceExchange(fake, "me", FakeCounters(), lambda: None, lambda: now[0], loads=loads)
    await exchange.exchange()
    assert loads.others == [12.0]

    now[0] = STALE_S + 0.1
    await exchange.exchange()
    assert loads.others == [], "one that writes no more has nothing under way"
    assert Publisher().make({}, 0.0, 3.5)[0] == Report(1, {}, 3.5)
