"""bench.hostile: what an attack does and counts, what the innocent saw, and when an attack is withstood."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from bench.hostile import (
    ATTACKS,
    Figures,
    Record,
    Result,
    chosen,
    figures,
    is_within,
    print_record,
    read_record,
    write_record,
)
from bench.support.hostile_attacks import attack, filled, upload_form
from bench.support.hostile_client import Attacker, Outcome, Target
from bench.support.hostile_load import Failure, Observations, Seen
from penstock.router.transport.upload import boundary_of, receive
from penstock.wire.bodies import decode_chat
from tests.real_time import real_time

QUIET = Figures(
    gap_p50_ms=20.0,
    gap_p99_ms=24.0,
    gap_max_ms=30.0,
    ttft_p99_ms=40.0,
    num_gaps=1000,
    num_new=10,
    failures=(),
    client_lag_ms=0.0,
)
MIB = 2**20


def result(*, tally: dict[str, int] | None = None, peak: int = 100, left: int = 0, **changes: object) -> Result:
    """A withstood attack, but for changes of the figures under it. peak, left: memory gained, MiB."""
    return Result(
        quiet=QUIET,
        attacked=msgspec.structs.replace(QUIET, **changes),
        start_bytes=200 * MIB,
        peak_bytes=(200 + peak) * MIB,
        left_bytes=(200 + left) * MIB,
        replica_growth_bytes=0,
        gateway_cpu_s=1.0,
        attacker=Outcome(tally={"429": 3} if tally is None else tally, cpu_s=1.0, seconds=10.0),
        is_gateway_alive=True,
        commit="abc",
        seconds=10.0,
    )


def test_an_attack_that_nobody_noticed_is_withstood() -> None:
    assert result().faults() == []
    assert result(tally={"left": 900, "held": 3}).faults() == []


def test_what_is_within_the_attackers_limits_need_not_be_refused() -> None:
    assert result(tally={"200": 5}).faults(is_allowed=True) == []
    assert result(tally={"200": 5}, gap_max_ms=251.0).faults(is_allowed=True) == ["gap max"]


@pytest.mark.parametrize(
    ("attacked", "fault"),
    [
        (result(gap_p99_ms=51.0), "gap p99"),
        (result(gap_max_ms=251.0), "gap max"),
        (result(gap_max_ms=None), "gap max"),
        (result(ttft_p99_ms=81.0), "TTFT p99"),
        (result(ttft_p99_ms=None), "TTFT p99"),
        (result(failures=("stream: RuntimeError",)), "1 requests failed"),
        (result(peak=257), "memory"),
        (result(left=65), "memory 30 s later"),
        (result(tally={"200": 5, "held": 2}), "the attacker was not refused"),
        (result(tally={"400": 5, "500": 1}), "the attacker got 500"),
        (msgspec.structs.replace(result(), is_gateway_alive=False), "the gateway died"),
    ],
)
def test_each_fault_is_named(attacked: Result, fault: str) -> None:
    assert attacked.faults() == [fault]


@pytest.mark.parametrize(
    ("value", "quiet", "expected"), [(50, 1, True), (51, 1, False), (80, 40, True), (81, 40, False), (None, 1, False)]
)
def test_twice_the_quiet_figure_or_50_ms(value: float | None, quiet: float, expected: bool) -> None:
    assert is_within(value, quiet) is expected


def test_a_gap_counts_where_any_of_it_lies_in_the_attack() -> None:
    seen = Observations(
        gaps=[Seen(8.0, 9.0), Seen(9.5, 10.5), Seen(11.0, 11.02), Seen(19.9, 25.0), Seen(20.5, 21.0)],
        waits=[Seen(9.9, 15.0), Seen(12.0, 12.5), Seen(20.1, 20.2)],
        failures=[
            Failure(Seen(8.0, 9.0), "early"),
            Failure(Seen(9.0, 11.0), "in it"),
            Failure(Seen(20.0, 21.0), "late"),
        ],
        lags=[Seen(11.0, 11.1)],
    )

    found = figures(seen, 10.0, 20.0)

    assert (found.num_gaps, found.gap_max_ms, found.gap_p50_ms) == (3, 5100.0, 1000.0)
    assert (found.num_new, found.ttft_p99_ms) == (1, 500.0)
    assert found.failures == ("in it",)
    assert found.client_lag_ms == 100.0


def test_there_are_25_attacks_or_more_and_a_name_that_is_none_is_refused() -> None:
    assert len(ATTACKS) >= 25
    assert list(chosen(["silent", "churn"])) == ["silent", "churn"]
    with pytest.raises(SystemExit, match="no attack nothing"):
        chosen(["nothing"])


def test_a_column_keeps_what_the_other_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hostile.json"
    write_record(path, Record(attacks={"silent": {"before": result(gap_max_ms=4600.0)}}))
    record = read_record(path)
    record.attacks["silent"]["now"] = result()
    write_record(path, record)

    found = read_record(path)
    print_record(found, ATTACKS)

    assert found.attacks["silent"]["before"].attacked.gap_max_ms == 4600.0
    assert found.faults == {"silent": []}
    assert "4600 / 30" in capsys.readouterr().out


# attacks


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that answers each head with 429 and reads what follows."""
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
        pass
    finally:
        writer.transport.abort()


@real_time
@pytest.mark.parametrize("name", ATTACKS)
async def test_every_attack_ends_in_time_and_counts_what_it_got(name: str) -> None:
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = Target(
        host="127.0.0.1",
        port=port,
        key="sk",
        model="sim",
        stream_ports=(port,),
        seconds=0.1,
        body_bytes=20_000,
        scale=0.001,
    )

    async with server, asyncio.timeout(10):
        outcome = await attack(name, target)

    assert sum(outcome.tally.values()) >= 1
    assert not set(outcome.tally) - {"429", "cut", "held", "left"}


def test_a_filled_body_is_valid_and_as_large_as_it_may_be() -> None:
    target = Target(host="h", port=1, key="", model="sim", seconds=1, body_bytes=20_000)

    body = filled(Attacker(target), '"messages":[', '{"role":"user","content":""},', "]}")

    assert 19_900 < len(body) <= 20_000
    assert len(decode_chat(body).messages) > 600


async def test_a_form_is_what_the_gateway_reads(tmp_path: Path) -> None:
    boundary = boundary_of(b"multipart/form-data; boundary=hostile")
    assert boundary is not None

    async def parts():  # type: ignore[no-untyped-def]
        yield upload_form("mine", 3)

    assert (await receive(boundary, parts(), tmp_path)).fields == {"name": "mine"}
    assert {path.name for path in os.scandir(tmp_path)} == {"adapter_config.json", "adapter_model.safetensors"}
