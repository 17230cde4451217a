import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.base.environment import CLUSTER_SECRET
from penstock.base.subsecrets import block_secret, parse_replica_secrets, stream_secret
from penstock.cli.main import app
from penstock.cli.state import StateDir


def test_a_replicas_file_is_made_of_the_clusters_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_SECRET, "ab" * 32)
    path = tmp_path / "replica"

    done = CliRunner().invoke(app, ["replica-secrets", str(path)])

    assert done.exit_code == 0
    assert done.output == ""
    found = parse_replica_secrets(path.read_text(encoding="ascii"))
    assert found.block == block_secret(b"\xab" * 32)
    assert found.stream == stream_secret(b"\xab" * 32, found.stream_key_id)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_the_clusters_secret_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_SECRET, raising=False)

    done = CliRunner().invoke(app, ["replica-secrets", str(tmp_path / "replica")])

    assert done.exit_code == 2
    assert not (tmp_path / "replica").exists()


def test_replicas_of_one_machine_have_a_file_made_of_the_state_folders_secret(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (tmp_path / "temp").mkdir()

    path = state.write_replica_secrets(tmp_path / "temp")

    assert parse_replica_secrets(path.read_text(encoding="ascii")).block == block_secret(state.secret())
