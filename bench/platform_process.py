"""A platform for a benchmark: `penstock up` in a process of its own, its parts found by what they call themselves."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.cpu import descendants

START_S = 180


@dataclass(frozen=True, slots=True)
class PlatformProcess:
    url: str
    """Without /v1."""
    key: str
    pid: int

    def _named(self, *parts: str) -> list[int]:
        return [p.pid for p in descendants(self.pid) if any(part in _title(p) for part in parts)]

    @property
    def gateways(self) -> list[int]:
        return self._named("ServeReplica:gateway")

    @property
    def replicas(self) -> list[int]:
        return [pid for pid in self._named("ServeReplica:") if pid not in self.gateways]

    @property
    def redis(self) -> list[int]:
        return self._named("redis-server", "valkey-server")

    @property
    def daemons(self) -> list[int]:
        """Everything else: Ray's own processes and the supervisor."""
        ours = {*self.gateways, *self.replicas, *self.redis}
        return [p.pid for p in descendants(self.pid) if p.pid not in ours]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def running_platform(folder: Path, config: str) -> Iterator[PlatformProcess]:
    """Start the platform from a config text in which {port} stands for the gateway's; stop it at the end. Raises RuntimeError with the log's tail."""
    port = free_port()
    (folder / "penstock.yaml").write_text(config.format(port=port))
    state, log = folder / "state", folder / "up.log"
    command = [sys.executable, "-m", "penstock.cli.main", "up", "--config", str(folder / "penstock.yaml"), "--state", str(state)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        env = _wait_until_ready(process, state / "env", log)
        url = env["OPENAI_BASE_URL"].removesuffix("/v1")
        yield PlatformProcess(url, env["OPENAI_API_KEY"], process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _wait_until_ready(process: "subprocess.Popen[bytes]", env_file: Path, log: Path) -> dict[str, str]:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"penstock up ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        if env_file.exists():
            env = dict(line.removeprefix("export ").split("=", 1) for line in env_file.read_text().splitlines() if "=" in line)
            env = {name: value.strip("\"'") for name, value in env.items()}
            if _is_ready(env["OPENAI_BASE_URL"].removesuffix("/v1")):
                return env
        time.sleep(0.5)
    raise RuntimeError(f"penstock up was not ready within {START_S} s:\n{log.read_text()[-3000:]}")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
