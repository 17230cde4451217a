import msgspec
import pytest

from penstock.tenancy.share import DEFAULT_SHARE, Share
from penstock.tenancy.tenants import (
    TIER_POLICIES,
    Limits,
    Record,
    Settings,
    cache_scope,
    check_id,
    decode_record,
    settings_key,
    tenant_of,
)
from penstock.wire.errors import InvalidRequest


def test_a_tenant_without_limits_has_none_to_ask_for() -> None:
    assert tenant_of(b"s" * 32, "acme", Settings()).limits is None
    assert tenant_of(b"s" * 32, "acme", Settings(limits=Limits(max_parallel=1))).limits == Limits(max_parallel=1)


def test_a_tenant_may_use_all_models_or_those_that_are_named() -> None:
    assert tenant_of(b"s" * 32, "acme").may_use("any")
    named = tenant_of(b"s" * 32, "acme", Settings(models=("a", "b")))

    assert (named.may_use("a"), named.may_use("c")) == (True, False)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(limits=Limits(requests_per_minute=0)),
        Settings(limits=Limits(tokens_per_minute=-1)),
        Settings(tier_policy="somewhere"),
        Settings(weight=0.0),
        Settings(weight=float("nan")),
        Settings(weight=1000.0),
        Settings(service_class="first"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: Settings) -> None:
    with pytest.raises(InvalidRequest):
        settings.check()


def test_every_tier_policy_can_be_set() -> None:
    for policy in TIER_POLICIES:
        Settings(tier_policy=policy).check()


def test_weight_and_class_are_the_tenants_share() -> None:
    assert tenant_of(b"s" * 32, "acme", Settings()).share == DEFAULT_SHARE
    named = tenant_of(b"s" * 32, "acme", Settings(weight=4.0, service_class="batch"))

    assert named.share == Share(4.0, "batch")


def test_a_record_with_a_share_is_read_by_a_version_that_knows_of_none() -> None:
    class OldSettings(msgspec.Struct, omit_defaults=True):
        tier_policy: str = "edge_first"

    class OldRecord(msgspec.Struct, omit_defaults=True):
        created: int
        updated: int
        settings: OldSettings

    shared = Settings(tier_policy="edge_only", weight=4.0, service_class="batch")
    written = msgspec.json.encode(Record(settings=shared, created=1, updated=2))

    assert msgspec.json.decode(written, type=OldRecord) == OldRecord(1, 2, OldSettings("edge_only"))
    assert msgspec.json.encode(Record(created=1, updated=2)) == b'{"created":1,"updated":2}'


@pytest.mark.parametrize("tenant_id", ["", "a b", "a{b}", "x" * 65, ".a", "a/b"])
def test_an_id_is_a_plain_name(tenant_id: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant id"):
        check_id(tenant_id)


def test_a_record_comes_back_as_it_was_written() -> None:
    record = Record(
        settings=Settings(limits=Limits(tokens_per_minute=7), models=("a",)), created=1, updated=2, deleted=True
    )

    assert decode_record(msgspec.json.encode(record)) == record


def test_all_keys_of_a_tenant_are_in_one_slot() -> None:
    assert settings_key("acme") == "penstock:tenant:{acme}:settings"


def test_a_salt_of_the_requests_own_narrows_what_the_tenant_shares_and_never_widens_it() -> None:
    acme, other = tenant_of(b"s" * 32, "acme"), tenant_of(b"s" * 32, "other")
    scopes = [cache_scope(tenant, salt) for tenant in (acme, other) for salt in (None, "a", "b", "acme", "other")]

    assert cache_scope(acme, "a") == cache_scope(acme, "a")
    assert cache_scope(acme, None) == (acme.salt, "")
    assert len({scope.salt for scope in scopes}) == len(scopes)
    assert len({scope.label for scope in scopes if scope.label}) == 8
    assert all(len(scope.label) in (0, 32) and scope.label.isalnum() == bool(scope.label) for scope in scopes)
