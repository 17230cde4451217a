import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from penstock.base.errors import ConfigError
from penstock.cli.state import RunState, StateDir


def run_state(temp_dir: str = "none", pid: int | None = None) -> RunState:
    own = psutil.Process()
    return RunState(
        pid=pid or own.pid,
        pid_started=own.create_time(),
        version="1",
        config="penstock.yaml",
        gateway="http://127.0.0.1:1",
        redis="embedded",
        temp_dir=temp_dir,
        pools=(),
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_start_in_the_same_folder_is_one_sentence_that_names_the_first(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path / "s"), StateDir(tmp_path / "s")

    with first.locked():
        first.write(run_state())
        with (
            pytest.raises(
                ConfigError, match=rf"already running .*process {os.getpid()}, http://127\.0\.0\.1:1"
            ) as caught,
            second.locked(),
        ):
            pass

    assert "\n" not in caught.value.message
    with second.locked():
        assert second.read() is None


def test_a_killed_holder_leaves_the_folder_usable(tmp_path: Path) -> None:
    lock = (
        f"from pathlib import Path; from penstock.cli.state import StateDir; lock = "
        f"StateDir(Path({str(tmp_path)!r})).locked()"
    )
    hold = f"{lock}; lock.__enter__(); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError), StateDir(tmp_path).locked():
            pass
        holder.kill()

    with StateDir(tmp_path).locked():
        pass


def test_the_temp_folder_of_a_killed_run_is_removed_at_the_next_start(tmp_path: Path) -> None:
    left = Path(tempfile.mkdtemp(prefix="penstock-"))
    (left / "redis.sock").touch()
    state = StateDir(tmp_path)
    state.write(run_state(str(left)))

    with state.locked():
        assert not left.exists()
        assert state.read() is None


def test_a_folder_that_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "penstock-precious"
    precious.mkdir()
    state = StateDir(tmp_path)
    state.write(run_state(str(precious)))

    with state.locked():
        assert precious.exists()


def test_secrets_are_readable_by_their_owner_only_and_stay_the_same(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "s")
    with state.locked():
        state.write_env("http://127.0.0.1:1/v1", "sk-1")
        state.write_key("sk-1")
        secret = state.secret()

        assert len(secret) == 32
        assert StateDir(tmp_path / "s").secret() == secret
        assert state.read_key() == "sk-1"
        assert {mode(tmp_path / "s" / name) for name in ("env", "key", "secret")} == {0o600}
        assert mode(tmp_path / "s") == 0o700


def test_the_env_file_is_shell_syntax(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.write_env("http://127.0.0.1:8000/v1", "sk-penstock-1")

    shown = subprocess.run(
        ["sh", "-c", f". {state.env_path}; echo $OPENAI_BASE_URL $OPENAI_API_KEY"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert shown == "http://127.0.0.1:8000/v1 sk-penstock-1\n"


def test_clearing_keeps_key_and_secret(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.write(run_state())
    state.write_env("http://x", "sk-1")
    state.write_key("sk-1")

    state.clear()
    state.clear()

    assert state.read() is None
    assert not state.env_path.exists()
    assert state.read_key() == "sk-1"


@pytest.mark.parametrize(("name", "content"), [("secret", b"zz\n"), ("secret", b"abcd\n"), ("state.json", b"{}")])
def test_a_spoilt_file_is_one_sentence_that_names_it(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    state = StateDir(tmp_path)

    with pytest.raises(ConfigError, match=name):
        state.secret() if name == "secret" else state.read()


def test_a_reused_pid_is_not_taken_for_the_run() -> None:
    state = run_state()

    assert state.is_alive
    assert not msgspec.structs.replace(state, pid_started=time.time() + 100).is_alive
