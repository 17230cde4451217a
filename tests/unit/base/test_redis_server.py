import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.support.cpu import is_alive
from penstock.base.errors import ConfigError
from penstock.base.redis_server import EmbeddedRedis, find_executable


def ask(server: EmbeddedRedis, command: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(server.url.removeprefix("unix://"))
        connection.sendall(command.encode() + b"\r\n")
        return connection.recv(65536)


def answer_of_another_process(server: EmbeddedRedis, killed: int, command: str, *, within_s: float) -> bytes:
    """The first reply of a server that is not the killed one and has loaded its data."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if server.pid != killed:
            try:
                reply = ask(server, command)
            except OSError:
                reply = b"-"
            if not reply.startswith(b"-"):
                return reply
        time.sleep(0.02)
    raise AssertionError(f"no answer within {within_s} s")


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> EmbeddedRedis:
    return EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir)


def test_keys_survive_a_stop_and_a_start(server: EmbeddedRedis, tmp_path: Path, socket_dir: Path) -> None:
    server.start()
    try:
        assert ask(server, "SET answer 42") == b"+OK\r\n"
    finally:
        server.stop()
    again = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir)
    again.start()
    try:
        assert ask(again, "GET answer") == b"$2\r\n42\r\n"
    finally:
        again.stop()


def test_a_killed_server_is_back_within_five_seconds_with_its_keys(server: EmbeddedRedis) -> None:
    server.start()
    try:
        ask(server, "SET answer 42")
        # The append-only file is flushed once a second by Redis; the write itself happens before the reply.
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)

        assert answer_of_another_process(server, first, "GET answer", within_s=5) == b"$2\r\n42\r\n"
    finally:
        server.stop()


def test_stop_leaves_no_process_and_no_socket(server: EmbeddedRedis, socket_dir: Path) -> None:
    server.start()
    pid = server.pid
    assert pid is not None

    server.stop()
    server.stop()

    assert not psutil.pid_exists(pid)
    assert list(socket_dir.iterdir()) == []
    assert server.pid is None


def test_a_full_server_refuses_writes_and_only_its_user_reaches_it(server: EmbeddedRedis, socket_dir: Path) -> None:
    server.start()
    try:
        assert b"noeviction" in ask(server, "CONFIG GET maxmemory-policy")
        assert b"268435456" in ask(server, "CONFIG GET maxmemory")
        assert stat.S_IMODE((socket_dir / "redis.sock").stat().st_mode) == 0o700
        assert b"\r\n0\r\n" in ask(server, "CONFIG GET port")
    finally:
        server.stop()


def test_the_server_of_a_killed_owner_is_ended_before_its_data_is_opened_again(
    server: EmbeddedRedis, tmp_path: Path, socket_dir: Path
) -> None:
    abandon = (
        "import os; from pathlib import Path; from penstock.base.redis_server import *\n"
        f"data, sockets = Path({str(tmp_path / 'redis')!r}), Path({str(socket_dir / 'old')!r})\n"
        "s = EmbeddedRedis(executable=find_executable(), data_dir=data, socket_dir=sockets)\n"
        "s.start(); print(s.pid, flush=True); os._exit(0)"
    )
    left_over = int(subprocess.run([sys.executable, "-c", abandon], capture_output=True, check=True, timeout=30).stdout)
    assert psutil.pid_exists(left_over)

    server.start()
    server.stop()

    assert not is_alive(left_over)


def test_a_server_that_cannot_start_is_one_sentence(tmp_path: Path, socket_dir: Path) -> None:
    server = EmbeddedRedis(executable=Path("/bin/false"), data_dir=tmp_path / "redis", socket_dir=socket_dir)

    with pytest.raises(ConfigError, match=r"The embedded Redis \(/bin/false\) did not start: it left no log\."):
        server.start()

    assert server.pid is None


def test_a_socket_path_too_long_for_the_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a unix socket"):
        EmbeddedRedis(executable=Path("/bin/false"), data_dir=tmp_path, socket_dir=tmp_path / ("x" * 100))
