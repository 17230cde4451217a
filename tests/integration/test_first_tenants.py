"""`penstock tenant apply`, as the chart's job runs it: from a file, by the environment, again and again."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.base.redis_server import EmbeddedRedis, find_executable

KEYS = [f"sk-penstock-{digit * 48}" for digit in "ab"]
FIRST = f"tenants: [{{name: acme, keys: [{KEYS[0]}, {KEYS[1]}], requests_per_minute: 60}}, {{name: beta}}]\n"


@pytest.fixture
def redis_url(tmp_path: Path, socket_dir: Path) -> Iterator[str]:
    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    server.start()
    yield server.url
    server.stop()


def penstock(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_CLUSTER_SECRET": "5a" * 32}
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_tenant_begins_as_the_file_says_and_what_an_operator_changed_stays_changed(
    redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(FIRST, encoding="utf-8")

    assert penstock(redis_url, "tenant", "apply", str(file)).stdout.splitlines() == ["acme: 2 keys", "beta: 0 keys"]
    assert '"requests_per_minute": 60' in penstock(redis_url, "tenant", "show", "acme", "--json").stdout
    assert penstock(redis_url, "tenant", "set", "acme", "--requests-per-minute", "75").returncode == 0
    assert penstock(redis_url, "key", "revoke", KEYS[1]).returncode == 0
    assert penstock(redis_url, "tenant", "delete", "beta").returncode == 0
    file.write_text(FIRST.replace("60", "90"), encoding="utf-8")
    again = penstock(redis_url, "tenant", "apply", str(file))

    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[0] == "acme: 1 keys, 1 left out, they were revoked"
    assert again.stdout.splitlines()[1].startswith("beta: left out, a tenant 'beta' was deleted")
    assert '"requests_per_minute": 75' in penstock(redis_url, "tenant", "show", "acme", "--json").stdout


def test_new_tenants_get_the_default_limits_and_the_others_keep_theirs(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: before}]\n", encoding="utf-8")
    assert penstock(redis_url, "tenant", "apply", str(file)).returncode == 0
    file.write_text(
        "{defaults: {tokens_per_minute: 5000, max_parallel: 4}, tenants: [{name: before}, {name: after}]}\n",
        encoding="utf-8",
    )
    assert penstock(redis_url, "tenant", "apply", str(file)).returncode == 0
    assert penstock(redis_url, "tenant", "create", "own", "--max-parallel", "0", "--weight", "2").returncode == 0
    shown = msgspec.json.decode(penstock(redis_url, "tenant", "list", "--json").stdout)

    limits = {each["id"]: (each["tokens_per_minute"], each["max_parallel"]) for each in shown}
    assert limits == {"before": (None, None), "after": (5000, 4), "own": (5000, None)}
    changed = penstock(redis_url, "tenant", "defaults", "--max-parallel", "9").stdout
    assert "5,000" in changed
    assert "9" in changed


def test_a_mistake_in_the_file_is_a_sentence_without_the_key(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: acme, keys: [sk-penstock-short]}]\n", encoding="utf-8")

    refused = penstock(redis_url, "tenant", "apply", str(file))

    assert refused.returncode == 2
    assert "tenants['acme'].keys[0] is no key" in refused.stderr
    assert "short" not in refused.stderr
