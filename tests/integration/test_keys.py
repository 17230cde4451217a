"""API keys in a real Redis."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.tenancy.keys import KEY_PATTERN, KeyStore, create_key, revoke_key
from penstock.wire.errors import InvalidRequest, Overloaded, Unauthenticated

SECRET = b"s" * 32


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


def test_a_key_works_from_creation_to_revocation(server: EmbeddedRedis) -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_redis_holds_nothing_that_opens_a_door(server: EmbeddedRedis, tmp_path: Path) -> None:
    async def main() -> str:
        async with connect(server.url) as client:
            key = await create_key(client, SECRET, "acme")
            await KeyStore(client, SECRET, cache_s=1.0, lookup_timeout_s=5.0).tenant(key)
            with pytest.raises(Unauthenticated):
                await KeyStore(client, b"another secret..", cache_s=1.0, lookup_timeout_s=5.0).tenant(key)
            return key

    key = asyncio.run(main())
    server.stop()

    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"acme" in written
    assert key.removeprefix("sk-penstock-").encode() not in written


def test_a_tenant_id_must_be_a_plain_name(server: EmbeddedRedis) -> None:
    async def main() -> None:
        async with connect(server.url) as client:
            for tenant_id in ("", "a b", "a{b}", "x" * 65, ".a"):
                with pytest.raises(InvalidRequest, match="tenant id"):
                    await create_key(client, SECRET, tenant_id)

    asyncio.run(main())


def test_a_known_key_goes_on_when_redis_has_died(server: EmbeddedRedis) -> None:
    async def main() -> None:
        async with connect(server.url) as client:
            store = KeyStore(client, SECRET, cache_s=0.0, lookup_timeout_s=5.0)
            key = await create_key(client, SECRET, "acme")
            await store.tenant(key)
            server.stop()

            assert (await store.tenant(key)).id == "acme"
            with pytest.raises(Overloaded):
                await store.tenant("sk-penstock-" + "0" * 48)

    asyncio.run(main())
