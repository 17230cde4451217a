"""API keys in a real Redis."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.tenancy.keys import (
    KEY_PATTERN,
    LOOKUP_TIMEOUT_S,
    KeyStore,
    create_key,
    list_keys,
    put_key,
    revoke_id,
    revoke_key,
)
from penstock.tenancy.tenants import Limits, Settings, Tenants, tenant_of
from penstock.wire.errors import InvalidRequest, Overloaded, Unauthenticated

SECRET = b"s" * 32


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


async def test_a_key_works_from_creation_to_revocation(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        store = KeyStore(client, SECRET, cache_s=0.0, lookup_timeout_s=5.0)
        keys = [await create_key(client, SECRET, tenant) for tenant in ("acme", "acme", "other")]
        assert len(set(keys)) == 3
        assert all(KEY_PATTERN.fullmatch(key) for key in keys)

        tenants = [await store.tenant(key) for key in keys]
        assert [tenant.id for tenant in tenants] == ["acme", "acme", "other"]
        assert tenants[0].salt == tenants[1].salt != tenants[2].salt
        await revoke_key(client, SECRET, keys[0])
        with pytest.raises(Unauthenticated):
            await store.tenant(keys[0])
        assert (await store.tenant(keys[1])).id == "acme"


async def test_a_gateway_that_stood_still_itself_refuses_no_key_for_it(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(server.url) as client:
        key, get = await create_key(client, SECRET, "acme"), client.get

        async def get_and_stand_still(name: str) -> bytes:
            asyncio.get_running_loop().call_soon(time.sleep, LOOKUP_TIMEOUT_S + 0.3)
            return await get(name)

        monkeypatch.setattr(client, "get", get_and_stand_still)

        assert (await KeyStore(client, SECRET, cache_s=0.0).tenant(key)).id == "acme"


def test_redis_holds_nothing_that_opens_a_door(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def create_and_use() -> str:
        async with connect(server.url) as client:
            key = await create_key(client, SECRET, "acme")
            await KeyStore(client, SECRET, cache_s=1.0, lookup_timeout_s=5.0).tenant(key)
            with pytest.raises(Unauthenticated):
                await KeyStore(client, b"another secret..", cache_s=1.0, lookup_timeout_s=5.0).tenant(key)
            return key

    key = asyncio.run(create_and_use())
    server.stop()

    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"acme" in written
    assert key.removeprefix("sk-penstock-").encode() not in written
    for name, hidden in {"secret": SECRET, "salt": tenant_of(SECRET, "acme").salt}.items():
        assert hidden not in written, name
        assert hidden.hex().encode() not in written, name


async def test_a_tenant_id_must_be_a_plain_name(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        for tenant_id in ("", "a b", "a{b}", "x" * 65, ".a"):
            with pytest.raises(InvalidRequest, match="tenant id"):
                await create_key(client, SECRET, tenant_id)


async def test_a_known_key_goes_on_when_redis_has_died(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        store = KeyStore(client, SECRET, cache_s=0.0, lookup_timeout_s=5.0)
        key = await create_key(client, SECRET, "acme")
        await store.tenant(key)
        server.stop()

        assert (await store.tenant(key)).id == "acme"
        with pytest.raises(Overloaded):
            await store.tenant("sk-penstock-" + "0" * 48)


async def test_a_revoked_key_can_not_be_put_back(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        key = await create_key(client, SECRET, "acme")
        assert await put_key(client, SECRET, "acme", key)
        await revoke_key(client, SECRET, key)

        assert not await put_key(client, SECRET, "acme", key)
        with pytest.raises(Unauthenticated):
            await KeyStore(client, SECRET, cache_s=0.0, lookup_timeout_s=5.0).tenant(key)


async def test_keys_are_listed_and_revoked_by_ids_that_say_nothing(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        keys = [await create_key(client, SECRET, "acme") for _ in range(40)]
        ids = [info.id for info in await list_keys(client, "acme")]
        assert len(set(ids)) == 40
        with pytest.raises(InvalidRequest, match="keys have an id that begins"):
            await revoke_id(client, "")
        with pytest.raises(InvalidRequest, match="keys have an id that begins"):
            await revoke_id(
                client,
                next(digit for digit in "0123456789abcdef" if sum(name.startswith(digit) for name in ids) > 1),
            )
        await revoke_id(client, ids[0])

        assert {info.id for info in await list_keys(client, "acme")} == set(ids[1:])
        store = KeyStore(client, SECRET, cache_s=0.0, lookup_timeout_s=5.0)
        outcomes = await asyncio.gather(*(store.tenant(key) for key in keys), return_exceptions=True)
        assert sum(isinstance(outcome, Unauthenticated) for outcome in outcomes) == 1


async def test_an_id_is_used_once_and_changes_at_the_same_time_are_all_kept(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        tenants = Tenants(client)
        await tenants.create("acme", Settings(limits=Limits(tokens_per_minute=1)), now=1.0)
        with pytest.raises(InvalidRequest, match="already"):
            await tenants.create("acme", Settings(), now=2.0)

        def one_more(settings: Settings) -> Settings:
            assert settings.limits.tokens_per_minute is not None
            return Settings(limits=Limits(tokens_per_minute=settings.limits.tokens_per_minute + 1))

        await asyncio.gather(*(tenants.change("acme", one_more, now=3.0) for _ in range(4)))
        record = await tenants.get("acme")
        assert (record.settings.limits.tokens_per_minute, record.created, record.updated) == (5, 1, 3)
        assert list(await tenants.all()) == ["acme"]

        await tenants.delete("acme", now=4.0)
        assert await tenants.all() == {}
        for reuse in (tenants.create("acme", Settings(), now=5.0), create_key(client, SECRET, "acme")):
            with pytest.raises(InvalidRequest, match="not used again"):
                await reuse
