from pathlib import Path

import pytest

from penstock.base.environment import (
    CLUSTER_SECRET,
    REDIS_URL,
    REPLICA_SECRETS,
    cluster_secret,
    provider_key,
    redis_url,
    redis_variable,
    replica_secrets,
    source_credential,
)
from penstock.base.errors import ConfigError
from penstock.base.subsecrets import ReplicaSecrets, block_secret, format_replica_secrets, stream_secret


def test_the_secret_is_read_from_hex_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_SECRET, "ab" * 32)

    assert cluster_secret() == b"\xab" * 32


@pytest.mark.parametrize("value", [None, "", "not hex", "ab" * 15, "ab" * 65])
def test_a_secret_that_is_missing_or_malformed_is_refused_without_showing_it(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CLUSTER_SECRET, raising=False)
    if value is not None:
        monkeypatch.setenv(CLUSTER_SECRET, value)

    with pytest.raises(ConfigError, match=CLUSTER_SECRET) as caught:
        cluster_secret()

    assert not value or value not in caught.value.message


def test_redis_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REDIS_URL, raising=False)
    assert redis_url("gateway") is None

    monkeypatch.setenv(REDIS_URL, "unix:///run/redis.sock")
    assert redis_url("gateway") == "unix:///run/redis.sock"

    monkeypatch.setenv(redis_variable("replica"), "unix://penstock-replica:pw@/run/redis.sock")
    assert redis_url("replica") == "unix://penstock-replica:pw@/run/redis.sock"
    assert redis_url("gateway") == "unix:///run/redis.sock"


def test_a_providers_key_loses_the_line_end_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "sk-1\n")

    assert provider_key("up", "TEST_KEY") == "sk-1"


@pytest.mark.parametrize("value", [None, " \n", "sk-1\nsk-2", "sk-\u201c1"])
def test_a_providers_key_that_is_missing_or_could_be_none_is_refused_without_showing_it(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("TEST_KEY", raising=False)
    else:
        monkeypatch.setenv("TEST_KEY", value)

    with pytest.raises(ConfigError, match="TEST_KEY") as refused:
        provider_key("up", "TEST_KEY")
    assert "sk-" not in str(refused.value)


def test_a_credential_for_a_source_names_its_setting_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "secret\n")
    monkeypatch.delenv("TEST_OTHER", raising=False)

    assert source_credential("TEST_KEY", "a.setting") == "secret"
    with pytest.raises(ConfigError, match=r"TEST_OTHER is not set: a\.setting names it"):
        source_credential("TEST_OTHER", "a.setting")


def test_a_replica_has_the_secrets_of_its_file_and_needs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CLUSTER_SECRET, raising=False)
    secrets = ReplicaSecrets(b"b" * 32, b"s" * 32, b"i" * 16)
    path = tmp_path / "replica"
    path.write_text(format_replica_secrets(secrets), encoding="ascii")
    monkeypatch.setenv(REPLICA_SECRETS, str(path))

    assert replica_secrets() == secrets


def test_without_a_file_a_replica_derives_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPLICA_SECRETS, raising=False)
    monkeypatch.setenv(CLUSTER_SECRET, "ab" * 32)

    secrets = replica_secrets()

    assert secrets.block == block_secret(b"\xab" * 32)
    assert secrets.stream == stream_secret(b"\xab" * 32, secrets.stream_key_id)


def test_a_file_of_secrets_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_SECRET, "ab" * 32)
    monkeypatch.setenv(REPLICA_SECRETS, str(tmp_path / "none"))

    with pytest.raises(ConfigError, match=REPLICA_SECRETS):
        replica_secrets()
