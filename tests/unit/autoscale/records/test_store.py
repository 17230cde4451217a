"""A restart in mid-scale with a real Redis: the next scaler goes on from the record."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.journal import Journal
from penstock.autoscale.observation import ServeState
from penstock.autoscale.observe import Reports
from penstock.autoscale.records.record import decode, encode
from penstock.autoscale.records.store import KEPT_S, RedisRecords, record_key
from penstock.autoscale.scaler import ScaledPool, Scaler
from penstock.base.redis import connect
from penstock.base.redis_roles import ROLES, RoleName, make_password
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.wire import scaling
from penstock.wire.frames import Load, StepCosts
from penstock.wire.scaling import GATEWAYS_KEY, GatewayReport, PoolFlow, PoolReport, ReplicaReport, report_key

PASSWORDS: dict[RoleName, str] = {role: make_password(b"s" * 32, role) for role in ROLES}
SETTINGS = AutoscaleConfig(max_replicas=9, window_s=3.0, burst_floor="day")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    folder = tmp_path_factory.mktemp("r")
    running = EmbeddedRedis(
        executable=find_executable(), data_dir=folder / "data", socket_dir=folder, passwords=PASSWORDS
    )
    running.start()
    yield running
    running.stop()


class Serve:
    """What Serve runs: a target is met at once, or never where `is_stuck`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.is_stuck = False

    async def read(self) -> dict[str, ServeState]:
        return {"chat": ServeState(self.target, tuple(f"r{number}" for number in range(self.target)))}

    async def set_target(self, pool: str, target: int) -> None:
        if self.is_stuck:
            raise TimeoutError
        self.target = target

    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool:
        self.target = target
        return True


class Rig:
    """Turns of a scaler over one Redis, on clocks of its own."""

    def __init__(self, client: redis.asyncio.Redis, gateway: redis.asyncio.Redis, serve: Serve) -> None:
        self.now, self.number = 0.0, 0
        self.off_s = 0.0
        self.client, self.gateway, self.serve = client, gateway, serve
        self.settings = SETTINGS
        self.begin()

    def begin(self) -> None:
        """A process that knows nothing takes the scaler's place."""
        self.scaler = Scaler(
            "scaler",
            [ScaledPool("chat", "chat", 8, self.settings)],
            Reports(self.client, lambda: self.now),
            self.serve,
            Journal(None),
            lambda: self.now,
            lambda: 1e9 + self.now + self.off_s,
            records=RedisRecords(self.client),
        )

    async def play(self, turns: int, queued: int) -> None:
        for _ in range(turns):
            self.now, self.number = self.now + 1.0, self.number + 1
            load = Load("e", 0, 4, 8, 0, 0, 800, 100, 2048, StepCosts(base_s=0.02, row_s=0.001), 512)
            replicas = [ReplicaReport(f"r{number}", "chat", load, 16, 0, 0) for number in range(self.serve.target)]
            rows = [PoolReport("chat", PoolFlow(), queued, queued / 4)]
            report = GatewayReport("g", self.number, rows, replicas)
            await self.gateway.sadd(GATEWAYS_KEY, "g")
            await self.gateway.set(report_key("g"), scaling.encode(report))
            await self.scaler.reconcile()

    async def lose_reports(self) -> None:
        await self.gateway.set(report_key("g"), b"of another version")


async def play(server: EmbeddedRedis) -> Rig:
    """A pool in a rush whose scaler has just asked for more replicas, and kept that."""
    client, gateway = connect(server.url_for("autoscaler")), connect(server.url_for("gateway"))
    async with connect(server.url_for("operator")) as operator:
        await operator.delete(record_key("chat"))
    rig = Rig(client, gateway, Serve(2))
    await rig.play(7, queued=40)  # the record is written again WRITE_S after the first time
    assert rig.serve.target > 2
    return rig


async def close(rig: Rig) -> None:
    await rig.client.aclose()
    await rig.gateway.aclose()


@pytest.mark.parametrize("off_s", [0.0, -5.0, 5.0])
async def test_a_decision_that_was_not_carried_out_is_by_the_next_scaler_without_any_news(
    server: EmbeddedRedis, off_s: float
) -> None:
    rig = await play(server)
    wanted, rig.serve.target = rig.serve.target, 2
    await rig.lose_reports()
    rig.off_s = off_s
    rig.begin()
    rig.now += 3.0
    await rig.scaler.reconcile()
    await close(rig)

    assert rig.serve.target == wanted


async def test_a_scaler_that_ends_while_it_asks_for_more_has_left_word_of_it(server: EmbeddedRedis) -> None:
    rig = await play(server)

    class Ending(Serve):
        async def set_target(self, pool: str, target: int) -> None:
            self.target = target
            raise SystemExit

    async with connect(server.url_for("operator")) as operator:
        await operator.delete(record_key("chat"))
    rig.serve = Ending(2)
    rig.begin()
    with pytest.raises(SystemExit):
        await rig.play(3, queued=40)
    data = await rig.client.get(record_key("chat"))
    await close(rig)

    record = decode(data)
    assert record.target == rig.serve.target > 2
    assert record.pressed_ago_s == 0.0


async def test_bursts_starts_and_the_time_to_ask_for_more_outlive_the_process(server: EmbeddedRedis) -> None:
    rig = await play(server)
    before = rig.scaler._pool_states["chat"].state
    rig.begin()
    rig.now += 2.0
    await rig.scaler.reconcile()
    after = rig.scaler._pool_states["chat"].state
    data = await RedisRecords(rig.client).read("chat")
    lapse_ms = await rig.gateway.pexpire(record_key("chat"), int(KEPT_S * 1000))
    await close(rig)

    assert data is not None
    assert lapse_ms
    assert before.bursts
    assert [peak.replicas for peak in after.bursts] == [peak.replicas for peak in before.bursts]
    assert after.raised_s == pytest.approx(before.raised_s, abs=0.01)


async def test_an_old_record_raises_nothing_and_bursts_are_still_known(server: EmbeddedRedis) -> None:
    rig = await play(server)
    data = await RedisRecords(rig.client).read("chat")
    assert data is not None
    record = decode(data)
    rig.serve.target = 2
    rig.now += SETTINGS.scale_down_delay_s + 60.0
    rig.begin()
    await rig.lose_reports()
    await rig.scaler.reconcile()
    bursts = rig.scaler._pool_states["chat"].state.bursts
    await close(rig)

    assert rig.serve.target == 2
    assert [peak.replicas for peak in bursts] == [peak.replicas for peak in record.bursts] != []


@pytest.mark.parametrize("broken", [b"\x00nonsense", b'{"version":9,"written_unix_s":1}'])
async def test_a_record_that_cannot_be_read_is_written_over(
    server: EmbeddedRedis, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await play(server)
    rig.serve.target = 2
    await rig.client.set(record_key("chat"), broken)
    rig.begin()
    with caplog.at_level("WARNING", "penstock.autoscale"):
        await rig.play(9, queued=0)
    data = await RedisRecords(rig.client).read("chat")
    await close(rig)

    assert [record.message for record in caplog.records].count("record ignored") == 1
    assert data is not None
    assert encode(decode(data)) == data


async def test_bounds_that_have_become_narrower_hold_for_what_is_restored(server: EmbeddedRedis) -> None:
    rig = await play(server)
    rig.serve.target = 2
    rig.settings = AutoscaleConfig(max_replicas=3, window_s=3.0)
    rig.begin()
    await rig.scaler.reconcile()
    await close(rig)

    assert rig.serve.target == 3


async def test_without_redis_a_scaler_goes_on_and_says_so_once(
    server: EmbeddedRedis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await play(server)

    class Refusing(RedisRecords):
        async def write(self, pool: str, data: bytes) -> None:
            raise redis.exceptions.ConnectionError(f"{pool} {len(data)}")

    rig.scaler = Scaler(
        "scaler",
        [ScaledPool("chat", "chat", 8, SETTINGS)],
        Reports(rig.client, lambda: rig.now),
        rig.serve,
        Journal(tmp_path / "log.jsonl"),
        lambda: rig.now,
        lambda: rig.now,
        records=Refusing(rig.client),
    )
    rig.serve.target = 1
    with caplog.at_level("WARNING", "penstock.autoscale"):
        await asyncio.wait_for(rig.play(9, queued=40), 10.0)
    await close(rig)

    assert rig.serve.target > 1
    assert [record.message for record in caplog.records].count("not reached") == 1
