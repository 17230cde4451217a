"""The cache in front of Redis: how often keys are looked up, and what happens while Redis is away or empty."""

import asyncio
from collections import Counter

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisAway

from penstock.tenancy import keys
from penstock.tenancy.keys import KeyStore
from penstock.tenancy.tenants import Limits, Record, Settings, settings_key, tenant_of
from penstock.wire.errors import Overloaded, Unauthenticated

SECRET = b"s" * 32
KEY = "sk-penstock-" + "a" * 48
OTHER = "sk-penstock-" + "b" * 48


class FakeRedis:
    """Answers from a dict; can be away, or made to wait."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.is_unavailable = False
        self.gate: asyncio.Event | None = None

    async def get(self, name: str) -> bytes | None:
        self.asked[name] += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.is_unavailable:
            raise RedisAway("away")
        return self.data.get(name)

    @property
    def num_asked(self) -> int:
        """Look-ups of keys; each known one is followed by one of its tenant's settings."""
        return sum(count for name, count in self.asked.items() if name.startswith("penstock:key:"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def everyone_waits() -> None:
    """Lets every task run until it waits for something that only the test can give."""
    for _ in range(10):
        await asyncio.sleep(0)


class World:
    def __init__(self) -> None:
        self.redis, self.clock = FakeRedis(), Clock()
        self.store = KeyStore(self.redis, SECRET, cache_s=1.0, now=self.clock)

    async def add(self, key: str, tenant_id: str) -> None:
        name, value = keys.record_of(SECRET, tenant_id, key)
        self.redis.data[name] = value
        self.set_tenant(tenant_id)

    def set_tenant(self, tenant_id: str, settings: Settings | None = None, *, deleted: bool = False) -> None:
        record = Record(settings=settings or Settings(), created=0, updated=0, deleted=deleted)
        self.redis.data[settings_key(tenant_id)] = msgspec.json.encode(record)

    def revoke(self, key: str, tenant_id: str) -> None:
        name, _ = keys.record_of(SECRET, tenant_id, key)
        self.redis.data[name] = b'{"tenant":"","revoked":true}'


async def test_a_known_key_is_looked_up_once_per_cache_time() -> None:
    world = World()
    await world.add(KEY, "acme")
    assert world.store.cached(KEY) is None

    for _ in range(3):
        assert (await world.store.tenant(KEY)).id == "acme"
    assert world.store.cached(KEY) == tenant_of(SECRET, "acme")
    assert world.redis.num_asked == 1
    world.clock.now += 1.0
    assert world.store.cached(KEY) is None
    await world.store.tenant(KEY)
    assert world.redis.num_asked == 2


async def test_neither_redis_nor_memory_holds_the_key_itself() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.store.tenant(KEY)

    assert "a" * 48 not in repr(world.redis.data) + repr(vars(world.store))


def test_salts_differ_by_tenant_and_by_secret() -> None:
    salts = {tenant_of(secret, tenant).salt for secret in (SECRET, b"t" * 32) for tenant in ("a", "b")}

    assert len(salts) == 4
    assert tenant_of(SECRET, "a") == tenant_of(SECRET, "a")


async def test_a_record_that_can_not_be_read_keeps_nobody_elses_key_from_being_looked_up() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.add(OTHER, "other")
    world.redis.data[settings_key("other")] = b'{"settings": 5}'

    with pytest.raises(Overloaded):
        await world.store.tenant(OTHER)
    assert (await world.store.tenant(KEY)).id == "acme"


@pytest.mark.parametrize("key", ["", "sk-penstock-", "sk-" + "a" * 48, KEY + "a", KEY.upper(), KEY + "\n", "\ud800"])
async def test_a_malformed_key_is_refused_without_asking(key: str) -> None:
    world = World()
    assert world.store.cached(key) is None
    with pytest.raises(Unauthenticated):
        await world.store.tenant(key)
    assert world.redis.num_asked == 0


async def test_an_unknown_key_is_asked_for_once_in_a_while() -> None:
    world = World()
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await world.store.tenant(KEY)
    assert world.redis.num_asked == 1
    await world.add(KEY, "acme")
    world.clock.now += keys.UNKNOWN_S

    assert (await world.store.tenant(KEY)).id == "acme"


async def test_memory_for_unknown_keys_is_bounded() -> None:
    world = World()
    for number in range(keys.MAX_UNKNOWN + 100):
        with pytest.raises(Unauthenticated):
            await world.store.tenant(f"sk-penstock-{number:048x}")

    assert len(world.store._unknown) == keys.MAX_UNKNOWN
    assert len(world.store._lookups) == 0


async def test_a_revoked_key_ends_with_the_next_look_up() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.store.tenant(KEY)
    world.revoke(KEY, "acme")
    assert (await world.store.tenant(KEY)).id == "acme"
    world.clock.now += 1.0

    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await world.store.tenant(KEY)
    assert world.store.cached(KEY) is None


async def test_a_key_of_a_deleted_tenant_is_refused_and_one_of_an_unknown_tenant_too() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.add(OTHER, "other")
    await world.store.tenant(KEY)
    world.set_tenant("acme", deleted=True)
    del world.redis.data[settings_key("other")]
    world.clock.now += 1.0

    for key in (KEY, OTHER):
        with pytest.raises(Unauthenticated):
            await world.store.tenant(key)


async def test_changed_settings_are_there_after_the_cache_time() -> None:
    world = World()
    await world.add(KEY, "acme")
    assert (await world.store.tenant(KEY)).limits is None
    limits = Limits(tokens_per_minute=10)
    world.set_tenant("acme", Settings(limits=limits, models=("a",), tier_policy="edge_only"))
    world.clock.now += 1.0

    tenant = await world.store.tenant(KEY)
    assert (tenant.limits, tenant.models, tenant.tier_policy) == (limits, ("a",), "edge_only")
    assert tenant.salt == tenant_of(SECRET, "acme").salt


async def test_a_slow_look_up_does_not_lengthen_the_time_to_revocation() -> None:
    world = World()
    await world.add(KEY, "acme")
    world.redis.gate = asyncio.Event()
    asking = asyncio.create_task(world.store.tenant(KEY))
    await everyone_waits()
    world.clock.now += 0.4  # what it is told was true when it asked, not now
    world.redis.gate.set()
    await asking

    assert world.store.cached(KEY) is not None
    world.clock.now += 0.6
    assert world.store.cached(KEY) is None


async def test_while_redis_is_away_known_keys_go_on_and_unknown_ones_are_put_off() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.store.tenant(KEY)
    world.redis.is_unavailable = True
    world.clock.now += 3600.0

    assert (await world.store.tenant(KEY)).id == "acme"
    assert world.store.cached(KEY) is not None
    with pytest.raises(Overloaded) as caught:
        await world.store.tenant(OTHER)
    assert caught.value.retry_after_s
    assert world.redis.num_asked == 2
    world.redis.is_unavailable = False
    await world.add(OTHER, "other")
    world.clock.now += keys.UNAVAILABLE_S
    assert (await world.store.tenant(OTHER)).id == "other"
    assert (await world.store.tenant(KEY)).id == "acme"
    assert world.redis.num_asked == 4


async def test_a_look_up_that_takes_too_long_counts_as_redis_being_away() -> None:
    world = World()
    world.redis.gate = asyncio.Event()
    store = KeyStore(world.redis, SECRET, cache_s=1.0, now=world.clock, lookup_timeout_s=0.01)

    with pytest.raises(Overloaded):
        await store.tenant(KEY)


async def test_a_known_key_does_not_go_on_forever_without_redis() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.store.tenant(KEY)
    world.redis.is_unavailable = True
    world.clock.now += keys.STALE_S

    assert world.store.cached(KEY) is None
    with pytest.raises(Overloaded):
        await world.store.tenant(KEY)


async def test_how_long_a_known_key_goes_on_without_redis_is_a_setting() -> None:
    world = World()
    store = KeyStore(world.redis, SECRET, cache_s=1.0, now=world.clock, stale_s=60.0)
    await world.add(KEY, "acme")
    await store.tenant(KEY)
    world.redis.is_unavailable = True
    world.clock.now += 59.0
    assert (await store.tenant(KEY)).id == "acme"
    world.clock.now += 1.0

    with pytest.raises(Overloaded):
        await store.tenant(KEY)


async def test_a_known_key_survives_a_redis_that_lost_its_data() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.store.tenant(KEY)
    world.redis.data.clear()
    world.clock.now += 2.0

    assert (await world.store.tenant(KEY)).id == "acme"
    assert (await world.store.tenant(KEY)).id == "acme"
    assert world.redis.num_asked == 2
    world.clock.now += keys.STALE_S
    with pytest.raises(Unauthenticated):
        await world.store.tenant(KEY)


async def test_concurrent_look_ups_of_a_key_are_one_and_a_caller_that_leaves_does_not_end_it() -> None:
    world = World()
    await world.add(KEY, "acme")
    world.redis.gate = asyncio.Event()
    callers = [asyncio.create_task(world.store.tenant(KEY)) for _ in range(5)]
    await everyone_waits()
    callers[0].cancel()
    world.redis.gate.set()

    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert {answer.id for answer in answers[1:]} == {"acme"}  # type: ignore[union-attr]
    assert world.redis.num_asked == 1


async def test_guessing_can_not_pile_up_look_ups() -> None:
    world = World()
    await world.add(KEY, "acme")
    await world.store.tenant(KEY)
    world.clock.now += 2.0
    world.redis.gate = asyncio.Event()
    guesses = [
        asyncio.create_task(world.store.tenant(f"sk-penstock-{number:048x}")) for number in range(keys.MAX_LOOKUPS)
    ]
    await everyone_waits()
    assert world.redis.num_asked == keys.MAX_LOOKUPS + 1

    with pytest.raises(Overloaded):
        await world.store.tenant(OTHER)
    assert (await world.store.tenant(KEY)).id == "acme"
    world.redis.gate.set()
    outcomes = await asyncio.gather(*guesses, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Unauthenticated}


async def test_a_record_that_can_not_be_read_counts_as_redis_being_away() -> None:
    world = World()
    await world.add(KEY, "acme")
    world.redis.data = {name: msgspec.json.encode([1]) for name in world.redis.data}

    with pytest.raises(Overloaded):
        await world.store.tenant(KEY)


async def test_a_tenant_is_found_by_its_id_as_long_as_it_exists() -> None:
    world = World()
    world.set_tenant("acme", Settings(limits=Limits(max_parallel=3)))
    found = await world.store.tenant_by_id("acme")

    assert found is not None
    assert (found.id, found.limits) == ("acme", Limits(max_parallel=3))
    assert found.salt == tenant_of(SECRET, "acme").salt
    assert await world.store.tenant_by_id("nobody") is None
    world.set_tenant("acme", deleted=True)
    assert await world.store.tenant_by_id("acme") is None


async def test_a_tenant_that_cant_be_looked_up_is_not_taken_for_none() -> None:
    world = World()
    world.redis.is_unavailable = True

    with pytest.raises(Overloaded):
        await world.store.tenant_by_id("acme")
    world.redis.is_unavailable = False
    world.redis.data[settings_key("acme")] = b"[1]"
    with pytest.raises(Overloaded):
        await world.store.tenant_by_id("acme")
