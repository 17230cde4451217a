"""The table of roles against a real server, and against every call of Redis in the tree."""

import ast
import re
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio
from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError

from penstock.adapters.registry import Adapter, Registry, forget_tenant
from penstock.autoscale.observe import Reports
from penstock.autoscale.records.store import RedisRecords
from penstock.base.redis import connect
from penstock.base.redis_roles import ROLES, RoleName, acl_line, acl_rules, make_password, url_of
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.prefix.store import IndexStore, IndexWriter
from penstock.tenancy.charges import Aside, BudgetRequest, SettledCharge, month_name
from penstock.tenancy.keys import KeyReader, KeyStore, create_key, list_keys, revoke_all, revoke_id
from penstock.tenancy.limit_script import GatewayScript, LimitScript
from penstock.tenancy.tenants import Limits, Settings, Tenants
from penstock.tenancy.usage import UsageLog, Used, read_usage
from penstock.tenancy.window import LimitRequest, Settled
from penstock.wire.frames import BlockEvents
from penstock.wire.scaling import GATEWAYS_KEY, TARGETS_KEY, report_key
from penstock.wire.serve_agent import WANTED_KEY, answer_key, call_key, calls_key

ROOT = Path(__file__).resolve().parents[3]
SECRET = bytes(range(32))
PASSWORDS: dict[RoleName, str] = {role: make_password(SECRET, role) for role in ROLES}
KEY = "penstock:key:{00}"
SETTINGS = "penstock:tenant:{acme}:settings"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    folder = tmp_path_factory.mktemp("r")
    running = EmbeddedRedis(
        executable=find_executable(), data_dir=folder / "data", socket_dir=folder, passwords=PASSWORDS
    )
    running.start()
    yield running
    running.stop()


async def refused(url: str, *command: str | bytes | int) -> bool:
    """Whether Redis refuses the command for want of rights; any other answer counts as having run it."""
    async with connect(url) as client:
        try:
            await client.execute_command(*command)  # type: ignore[no-untyped-call]
        except NoPermissionError:
            return True
        except redis.exceptions.ResponseError as error:
            # a script is told of it in the words of its own error
            return "permission" in str(error)
        return False


NOBODYS: list[tuple[str | bytes | int, ...]] = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("CONFIG", "GET", "*"),
    ("ACL", "SETUSER", "penstock-replica", "+@all"),
    ("ACL", "LIST"),
    ("DEBUG", "SLEEP", "0"),
    ("SHUTDOWN",),
    ("SAVE",),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "ID", "999999"),
    ("REPLICAOF", "NO", "ONE"),
    ("MODULE", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("SWAPDB", "0", "1"),
    ("MIGRATE", "h", "1", "k", "0", "1"),
    ("GET", "somebody:elses"),
    ("SET", "somebody:elses", "1"),
]
TENANTS: list[tuple[str | bytes | int, ...]] = [
    ("SET", KEY, '{"tenant":"acme"}'),
    ("SET", KEY, '{"tenant":"acme"}', "NX"),
    ("GET", KEY),
    ("GET", SETTINGS),
    ("SET", SETTINGS, "{}"),
    ("SMEMBERS", "penstock:tenants"),
    ("SADD", "penstock:tenants", "mine"),
    ("HGETALL", "penstock:tenant:{acme}:keys"),
    ("HSET", "penstock:tenant:{acme}:keys", "a", "1"),
    ("HGETALL", "penstock:tenant:{acme}:usage:2026-11-22"),
    ("HGETALL", "penstock:tenant:{acme}:limits:tokens"),
    ("DEL", SETTINGS),
    ("HGETALL", "penstock:adapters:{acme}"),
    ("EVAL", "return redis.call('get', KEYS[1])", 1, KEY),
    ("RENAME", "penstock:prefix:{e}:meta", KEY),
    ("COPY", "penstock:prefix:{e}:meta", KEY),
    ("RESTORE", KEY, 0, b"x"),
    ("DUMP", KEY),
    ("SORT", KEY),
    ("TYPE", KEY),
    ("OBJECT", "ENCODING", KEY),
    ("SCAN", 0),
    ("RANDOMKEY",),
]
SCALING: list[tuple[str | bytes | int, ...]] = [
    ("SET", TARGETS_KEY, "x"),
    ("SET", WANTED_KEY, "x"),
    ("SET", report_key("g"), "x"),
    ("RPUSH", calls_key("c"), "x"),
    ("SADD", GATEWAYS_KEY, "g"),
    ("BLPOP", calls_key("c"), 1),
]


@pytest.mark.parametrize("command", [*NOBODYS, *TENANTS, *SCALING], ids=lambda command: " ".join(map(str, command[:2])))
async def test_a_replica_can_do_nothing_but_keep_its_copy_of_the_index(
    command: tuple[str | bytes | int, ...], server: EmbeddedRedis
) -> None:
    assert await refused(server.url_for("replica"), *command)


@pytest.mark.parametrize(
    "command",
    [*NOBODYS, *TENANTS, ("HSET", "penstock:prefix:{e}:meta", "seq", 1)],
    ids=lambda command: " ".join(map(str, command[:2])),
)
async def test_the_autoscaler_knows_nothing_of_tenants(
    command: tuple[str | bytes | int, ...], server: EmbeddedRedis
) -> None:
    assert await refused(server.url_for("autoscaler"), *command)


@pytest.mark.parametrize(
    "command",
    [
        *NOBODYS,
        ("DEL", SETTINGS),
        ("UNLINK", SETTINGS),
        ("RENAME", KEY, KEY),
        ("SREM", "penstock:tenants", "acme"),
        ("SCAN", 0),
        ("EVAL", "return 1", 0),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
async def test_a_gateway_deletes_nothing_and_looks_for_nothing(
    command: tuple[str | bytes | int, ...], server: EmbeddedRedis
) -> None:
    assert await refused(server.url_for("gateway"), *command)


@pytest.mark.parametrize("command", NOBODYS, ids=lambda command: " ".join(map(str, command[:2])))
async def test_an_operator_can_do_nothing_to_the_server_and_to_what_is_not_ours(
    command: tuple[str | bytes | int, ...], server: EmbeddedRedis
) -> None:
    assert await refused(server.url_for("operator"), *command)


async def test_a_script_of_a_replicas_can_do_no_more_than_the_replica(server: EmbeddedRedis) -> None:
    async with connect(server.url_for("replica")) as client:
        for call in (f"redis.call('get', '{KEY}')", f"redis.call('set', '{KEY}', '1')", "redis.call('flushall')"):
            script = client.register_script(f"return {call}")
            with pytest.raises(redis.exceptions.ResponseError, match=r"permission|can't run|ACL|NOPERM"):
                await cast("Awaitable[Any]", script(keys=["penstock:prefix:{e}:meta"]))


async def test_without_a_user_nothing_is_answered(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        with pytest.raises((AuthenticationError, ConnectionError)):
            await client.ping()


async def test_a_wrong_password_opens_nothing(server: EmbeddedRedis) -> None:
    async with connect(url_of(server.url, "replica", PASSWORDS["gateway"])) as client:
        with pytest.raises((AuthenticationError, ConnectionError), match="invalid username-password"):
            await client.ping()


async def test_a_replica_keeps_its_copy_of_the_index(server: EmbeddedRedis) -> None:
    async def snapshot() -> BlockEvents:
        return BlockEvents(3, b"k" * 16, is_snapshot=True)

    async with connect(server.url_for("replica")) as client:
        writer = IndexWriter(client, "r1", "epoch", snapshot)
        assert await writer._write()
        writer.push(BlockEvents(4, b"l" * 16, b"k" * 16))
        assert await writer._write()
        async with connect(server.url_for("gateway")) as reader:
            found = await IndexStore(reader).snapshot("epoch")
        await client.delete(writer._blocks, writer._meta)

    assert found == BlockEvents(4, b"l" * 16, is_snapshot=True)


async def test_an_operator_makes_tenants_and_keys_and_a_gateway_serves_them(server: EmbeddedRedis) -> None:
    async with connect(server.url_for("operator")) as operator, connect(server.url_for("gateway")) as gateway:
        await Tenants(operator).create("made", Settings(limits=Limits(tokens_per_minute=100)), 1.0)
        key = await create_key(operator, SECRET, "made")
        tenant = await KeyStore(cast(KeyReader, gateway), SECRET, 0.5).tenant(key)

        assert tenant.id == "made"
        await Tenants(operator).change("made", lambda settings: settings, 2.0)
        assert list(await Tenants(operator).all()) == ["made"]
        [info] = await list_keys(operator, "made")
        await revoke_id(operator, info.id)
        assert await revoke_all(operator, "made") == 0
        await forget_tenant(operator, "made")
        await Tenants(operator).delete("made", 3.0)


async def test_a_gateway_counts_limits_usage_and_gateways(server: EmbeddedRedis) -> None:
    async with connect(server.url_for("gateway")) as client:
        assert await GatewayScript(client, "gateway-1").register() == 1
        ledger, limits = LimitScript(client), Limits(requests_per_minute=9, tokens_per_minute=100, max_parallel=2)
        verdict = await ledger.apply("acme", LimitRequest(id="q1", tokens=10, limits=limits))
        await ledger.apply("acme", LimitRequest(renewed=["q1"]))
        await ledger.apply("acme", LimitRequest(settled=[Settled("q1", 5)]))
        owing = BudgetRequest(nano=5, limit="9", aside=Aside("aside:g", 2))
        assert (await ledger.apply("acme", LimitRequest(id="q2", budget=owing))).spent_nano == 7
        charged = BudgetRequest(settled=[SettledCharge("q2", 3)], aside=Aside("aside:g", 0), limit="9")
        assert (await ledger.apply("acme", LimitRequest(budget=charged))).spent_nano == 3
        assert await ledger.read_spent("acme", month_name(time.time())) == 3
        usage = UsageLog(client, "gateway-1", now=lambda: 0.0)
        usage.add("acme", "m", "", Used(1, 2, 0, 3))
        await usage.flush()

        assert verdict.is_admitted
    async with connect(server.url_for("operator")) as client:
        assert [row.used.requests for row in await read_usage(client, "acme", ["1970-01-01"])] == [1]


async def test_a_gateway_keeps_adapters(server: EmbeddedRedis) -> None:
    async with connect(server.url_for("gateway")) as client:
        registry = Registry(client, 4)
        await registry.put("acme", "a", Adapter("d", "m", "md", 8, ("q",), 1, 1))

        assert await registry.get("acme", "a") is not None
        assert list(await registry.all("acme")) == ["a"]
        assert await registry.owned_digests() == {"d"}
        assert await registry.remove("acme", "a") is not None


async def test_the_autoscaler_and_its_agent_speak_through_redis(server: EmbeddedRedis) -> None:
    async with connect(server.url_for("autoscaler")) as autoscaler, connect(server.url_for("gateway")) as agent:
        async with agent.pipeline(transaction=False) as pipe:
            pipe.set(report_key("gone"), b"x", px=1)
            pipe.sadd(GATEWAYS_KEY, "gone")
            pipe.get(TARGETS_KEY)
            await pipe.execute()
        await Reports(autoscaler).read()
        async with autoscaler.pipeline(transaction=True) as batch:
            batch.set(call_key("1"), b"call", px=30_000)
            batch.rpush(calls_key("c"), "1")
            batch.ltrim(calls_key("c"), -64, -1)
            batch.pexpire(calls_key("c"), 30_000)
            await batch.execute()
        assert await cast("Awaitable[Any]", agent.blpop([calls_key("c")], timeout=20)) is not None
        assert await agent.getdel(call_key("1")) == b"call"
        async with agent.pipeline(transaction=True) as batch:
            batch.rpush(answer_key("1"), b"answer")
            batch.pexpire(answer_key("1"), 30_000)
            await batch.execute()
        assert await cast("Awaitable[Any]", autoscaler.blpop([answer_key("1")], timeout=20)) is not None
        await RedisRecords(autoscaler).write("chat", b"record")
        assert await RedisRecords(autoscaler).read("chat") == b"record"
        await autoscaler.set(WANTED_KEY, b"w", px=30_000)
        assert await autoscaler.get(WANTED_KEY) == b"w"


# the table against the tree

WHO: dict[str, tuple[RoleName, ...]] = {
    "platform/tenancy/limits.lua": ("gateway",),
    "platform/tenancy/budgets.lua": ("gateway",),
    "platform/tenancy/gateways.lua": ("gateway",),
    "platform/tenancy/usage.lua": ("gateway",),
    "platform/adapters/register.lua": ("gateway",),
    "platform/router/batches/put_file.lua": ("gateway",),
    "platform/router/batches/create_batch.lua": ("gateway",),
    "platform/router/batches/replace_record.lua": ("gateway",),
    "platform/router/batches/take_lease.lua": ("gateway",),
    "platform/router/batches/renew_lease.lua": ("gateway",),
    "platform/router/batches/commit_line.lua": ("gateway",),
    "platform/router/batches/file_registry.py": ("gateway",),
    "platform/router/batches/batch_registry.py": ("gateway",),
    "platform/prefix/apply_events.lua": ("replica",),
    "platform/tenancy/limit_script.py": ("gateway", "operator"),
    "platform/cli/explain.py": ("operator",),
    "platform/tenancy/limits.py": ("gateway",),
    "platform/tenancy/usage.py": ("gateway", "operator"),
    "platform/tenancy/keys.py": ("gateway", "operator"),
    "platform/tenancy/tenants.py": ("operator",),
    "platform/adapters/registry.py": ("gateway", "operator"),
    "platform/tenancy/replace.lua": ("operator",),
    "platform/tenancy/data_loss.py": ("gateway",),
    "platform/tenancy/service_exchange.py": ("gateway",),
    "platform/base/redis_disk.py": ("operator",),
    "platform/prefix/complete_copy.lua": ("replica",),
    "platform/prefix/published.py": ("gateway", "operator"),
    "platform/prefix/store.py": ("gateway", "replica"),
    "platform/router/replicas/report.py": ("gateway",),
    "platform/autoscale/observe.py": ("autoscaler",),
    "platform/autoscale/records/store.py": ("autoscaler",),
    "platform/autoscale/remote.py": ("autoscaler",),
    "platform/autoscale/serve_agent.py": ("gateway",),
    "platform/cli/serve_apps.py": ("autoscaler",),
}
"""The files that call Redis, and who runs them; a new one is red until its role's commands are looked through."""
CLIENTS = {"client", "_client", "pipe", "batch", "pipeline", "operator"}
LUA_CALL = re.compile(r"redis\.p?call\('(\w+)'")
OVER_HTTP = {"platform/cli/up.py", "platform/cli/status.py"}
"""Files whose `client.get` is HTTP's."""
NO_COMMANDS = {"register_script", "pipeline", "aclose", "execute", "close"}


def commands_of(path: Path) -> set[str]:
    """Names of the commands that a file calls, in small letters."""
    if path.suffix == ".lua":
        text = path.read_text(encoding="utf-8")
        return {name.lower() for name in LUA_CALL.findall(text)}
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in CLIENTS and hasattr(redis.asyncio.client.Pipeline, node.func.attr):
                found.add(node.func.attr)
    return {{"delete": "del"}.get(name, name) for name in found - NO_COMMANDS}


def redis_files() -> dict[str, set[str]]:
    paths = [*(ROOT / "platform").rglob("*.lua"), *(ROOT / "platform").rglob("*.py")]
    return {
        str(path.relative_to(ROOT)): commands
        for path in paths
        if (path.suffix == ".lua" or "redis" in path.read_text(encoding="utf-8"))
        and str(path.relative_to(ROOT)) not in OVER_HTTP
        and not path.is_relative_to(ROOT / "platform" / "workers" / "compute")
        and (commands := commands_of(path))
    }


def test_every_file_that_calls_redis_is_some_roles_and_its_commands_are_allowed() -> None:
    found = redis_files()

    assert found.keys() - WHO.keys() == set()
    for name, commands in found.items():
        allowed = {command for role in WHO[name] for command in ROLES[role].commands}
        if "operator" not in WHO[name]:
            assert commands - allowed == set(), name


def test_a_role_has_no_command_that_nobody_calls() -> None:
    files = redis_files()
    called = {
        role: {command for name, roles in WHO.items() if role in roles for command in files.get(name, ())}
        for role in ROLES
    }
    always = {"evalsha", "script|load", "multi", "exec", "sadd", "srem", "scard"}

    for role in ("gateway", "replica", "autoscaler"):
        assert set(ROLES[role].commands) - called[role] - always == set(), role


def test_a_line_holds_no_password() -> None:
    line = acl_line("replica", "secret-word")

    assert "secret-word" not in line
    assert line.endswith(acl_rules("replica"))
    assert len(set(PASSWORDS.values())) == len(ROLES)
