"""Addresses of several Redis servers; and the keys of a command, all in one slot."""

import pytest
from redis.crc import key_slot

from penstock.base.errors import ConfigError
from penstock.base.redis_url import ManyServers, check_redis_url, parse_many
from penstock.tenancy.tenants import keys_key, settings_key, tenant_key


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
    ],
)
def test_an_address_of_several_is_read(url: str, servers: ManyServers) -> None:
    assert parse_many(url) == servers
    check_redis_url(url)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://:word@host", "must begin with one of redis://"),
        ("redis:host", "must begin with one of"),
        ("redis+sentinel://:word@a:1", "ends with the master's name"),
        ("redis+sentinel://:word@a:1/m/x", "ends with the master's name"),
        ("redis+cluster://:word@a:1/2", "has database 0 only"),
        ("redis+cluster://:word@a:x", "each host is HOST:PORT"),
        ("redis+cluster://:word@a:1,,b:2", "each host is HOST:PORT"),
        ("redis+cluster://:word@", "each host is HOST:PORT"),
    ],
)
def test_a_mistake_is_a_sentence_without_the_password(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        check_redis_url(url)

    assert "word" not in refused.value.message


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
