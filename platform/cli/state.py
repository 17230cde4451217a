"""The state folder of a platform on one machine (`.penstock`): who runs here, its key, its Redis data.

Layout: `lock` (held by the running `penstock up`), `state.json` (what runs, for `penstock status`), `env` (shell
syntax, for scripts), `key` (the demo tenant's API key), `secret` (the cluster's, from which keys, salts and all other
secrets derive), `redis/` (append-only file, users and log), `penstock.log`, `autoscale.jsonl` (what the autoscaler did,
where a pool is scaled). Everything is readable by its owner only.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
import psutil

from penstock.base.errors import ConfigError
from penstock.base.subsecrets import format_replica_secrets, replica_secrets

TEMP_PREFIX = "penstock-"
SECRET_BYTES = 32


class PoolState(msgspec.Struct, frozen=True):
    name: str
    model: str
    served_names: tuple[str, ...]
    tier: str
    runner: str
    replicas: int


class RunState(msgspec.Struct, frozen=True):
    """A running `penstock up`, as it describes itself for `penstock status`."""

    pid: int
    pid_started: float
    """Unix time at which that process began: pids are used again."""
    version: str
    config: str
    gateway: str
    """Base address, without a trailing slash."""
    redis: str
    """Address without credentials."""
    temp_dir: str
    pools: tuple[PoolState, ...]
    admin: str | None = None
    """Base address of the pages for operators, where the gateway has another port for them."""
    shown: tuple[str, str] | None = None
    """Paths of the certificate and key that the gateway is shown, where it asks for some: its own."""

    @property
    def is_alive(self) -> bool:
        try:
            return abs(psutil.Process(self.pid).create_time() - self.pid_started) < 1.0
        except psutil.NoSuchProcess:
            return False


class StateDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.redis_dir = path / "redis"
        self.log_path = path / "penstock.log"
        self.journal_path = path / "autoscale.jsonl"
        self.env_path = path / "env"
        self._state_path = path / "state.json"
        self._key_path = path / "key"
        self._secret_path = path / "secret"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and holds its lock. Raises ConfigError when another `penstock up` has it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"The state folder {self.path} can't be used: {error.strerror}.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            state = self.read()
            who = f"process {state.pid}, {state.gateway}" if state is not None else "starting"
            raise ConfigError(
                f"Penstock is already running with the state folder {self.path} ({who}); stop it, or name another "
                "folder with --state."
            ) from error
        try:
            self._remove_leftovers()
            yield
        finally:
            os.close(descriptor)

    def write(self, state: RunState) -> None:
        write_private(self._state_path, msgspec.json.format(msgspec.json.encode(state)))

    def read(self) -> RunState | None:
        """None where nothing was started, or it was stopped. Raises ConfigError on a file that is not ours."""
        try:
            return msgspec.json.decode(self._state_path.read_bytes(), type=RunState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{self._state_path} can't be read: {error}.") from error

    def open_log(self) -> TextIO:
        """penstock.log, begun anew, as is the autoscaler's: each is about one run."""
        self.journal_path.unlink(missing_ok=True)
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        return open(descriptor, "w", encoding="utf-8", buffering=1)

    def clear(self) -> None:
        """Nothing runs here any more; key and data stay."""
        self._state_path.unlink(missing_ok=True)
        self.env_path.unlink(missing_ok=True)

    def write_env(self, base_url: str, api_key: str) -> None:
        write_private(self.env_path, f"export OPENAI_BASE_URL={base_url}\nexport OPENAI_API_KEY={api_key}\n".encode())

    def read_key(self) -> str | None:
        try:
            return self._key_path.read_text(encoding="ascii").strip() or None
        except FileNotFoundError:
            return None

    def write_key(self, api_key: str) -> None:
        write_private(self._key_path, api_key.encode() + b"\n")

    def secret(self) -> bytes:
        """The cluster secret, 32 bytes; made once. Raises ConfigError on a file that holds something else."""
        if not self._secret_path.exists():
            write_private(self._secret_path, secrets.token_hex(32).encode() + b"\n")
        try:
            found = bytes.fromhex(self._secret_path.read_text(encoding="ascii"))
        except ValueError as error:
            raise ConfigError(
                f"{self._secret_path} does not hold a secret in hex digits; delete it to have a new one made."
            ) from error
        if len(found) != SECRET_BYTES:
            raise ConfigError(
                f"{self._secret_path} must hold {SECRET_BYTES} bytes in hex digits, not {len(found)}; delete it to "
                "have a new one made."
            )
        return found

    def write_replica_secrets(self, folder: Path) -> Path:
        """Write what replicas have of the cluster secret into a private folder; returns the file's path."""
        path = folder / "replica-secrets"
        write_private(path, format_replica_secrets(replica_secrets(self.secret())).encode())
        return path

    def _remove_leftovers(self) -> None:
        """Remove what a killed `penstock up` could not remove itself. Its processes are ended by their own means."""
        state = self.read()
        if state is None:
            return
        left = Path(state.temp_dir)
        if left.name.startswith(TEMP_PREFIX) and left.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(left, ignore_errors=True)
        self.clear()


def write_private(path: Path, content: bytes) -> None:
    """Replaces the file at once, readable by its owner only."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)
