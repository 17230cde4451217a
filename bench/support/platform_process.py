"""A platform for a benchmark: `penstock up` in a process of its own, its parts found by what they call themselves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.support.cpu import command_line, descendants
from bench.support.free_ports import free_port
from penstock.cli.state import StateDir
from penstock.cli.tenant import redis_of

START_S = 180.0
STOP_S = 60.0
METRICS_S = 10.0


TIMED_PLATFORM = """
gateway: {{port: {port}GATEWAY}}
pools:
  - name: timed
    model: demo
    served_names: [sim]
    tier: edge
    replicas: 2
    engine: {{runner: timed, ENGINE}}
"""


def timed_platform(engine: str, gateway: str = "") -> str:
    """A configuration for `running_platform`: one pool of two timed replicas, served as `sim`. engine: its further
    settings, as in a YAML mapping; gateway: likewise, and what follows the gateway's port."""
    doubled = [text.replace("{", "{{").replace("}", "}}") for text in (engine, f", {gateway}" if gateway else "")]
    return TIMED_PLATFORM.replace("ENGINE", doubled[0]).replace("GATEWAY", doubled[1])


@dataclass(frozen=True, slots=True)
class PlatformProcess:
    url: str
    """Base address of the gateway, without /v1."""
    key: str
    pid: int
    state: Path
    """State folder of the platform."""

    def _named(self, *parts: str) -> list[int]:
        return [p.pid for p in descendants(self.pid) if any(part in _title(p) for part in parts)]

    @property
    def gateways(self) -> list[int]:
        return self._named("ServeReplica:gateway")

    @property
    def replicas(self) -> list[int]:
        return self._named("ServeReplica:pool-")

    @property
    def controllers(self) -> list[int]:
        """Ray Serve's own controller."""
        return self._named("ServeController")

    @property
    def autoscalers(self) -> list[int]:
        return self._named("ServeReplica:autoscaler")

    @property
    def redis(self) -> list[int]:
        return self._named("redis-server", "valkey-server")

    @property
    def redis_url(self) -> str:
        """Address of the embedded Redis, with the operator's user."""
        return redis_of(StateDir(self.state), None)

    def metrics(self) -> str:
        """The gateway's page /metrics. Raises httpx.HTTPError."""
        # no certificates: loading them takes longer than asking
        return httpx.get(f"{self.url}/metrics", timeout=METRICS_S, trust_env=False, verify=False).text

    def metric(self, name: str, **labels: str) -> float:
        """Value of a metric, summed over the samples with these labels; 0 where there is none. Raises
        httpx.HTTPError."""
        return read_metric(self.metrics(), name, **labels) or 0.0

    @property
    def daemons(self) -> list[int]:
        """Process ids of everything else: Ray's own processes and the supervisor."""
        ours = {*self.gateways, *self.replicas, *self.redis}
        return [p.pid for p in descendants(self.pid) if p.pid not in ours]


def _title(process: psutil.Process) -> str:
    return " ".join(command_line(process))


def read_metric(page: str, name: str, **labels: str) -> float | None:
    """Value of a metric on a page in Prometheus' text format: the sum of the samples with these labels; None where
    there is none."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    rows = [
        line
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(each in line for each in wanted)
    ]
    return sum(float(row.rpartition(" ")[2]) for row in rows) if rows else None


def penstock(*arguments: str) -> list[str]:
    """The command line of the `penstock` that belongs to this Python."""
    return [sys.executable, "-m", "penstock.cli.main", *arguments]


def start_up(
    folder: Path, config: str, *, temp: Path | None = None, checkout: Path | None = None
) -> "subprocess.Popen[bytes]":
    """Start `penstock up` in the background: configuration, state folder (`state`) and output (`up.log`) in `folder`,
    temporary files in `temp`, the code of the checkout `checkout` (None: this one).

    In a session of its own, so that a Ctrl-C in the terminal reaches it only through whoever started it.
    """
    (folder / "penstock.yaml").write_text(config, encoding="utf-8")
    environment = dict(os.environ)
    if temp is not None:
        environment["TMPDIR"] = str(temp)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout / ".src"), str(checkout)])
    with (folder / "up.log").open("wb") as out:
        return subprocess.Popen(
            penstock("up", "--config", str(folder / "penstock.yaml"), "--state", str(folder / "state")),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=checkout,
            start_new_session=True,
        )


def read_env(state: Path) -> dict[str, str]:
    """Variables that the state folder's `env` exports. Raises FileNotFoundError while nothing answers."""
    lines = (state / "env").read_text(encoding="utf-8").splitlines()
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


@contextmanager
def running_platform(
    folder: Path, config: str, *, start_s: float = START_S, checkout: Path | None = None
) -> Iterator[PlatformProcess]:
    """Start the platform from a config text in which {port} stands for the gateway's; stop it at the end. checkout: as
    in `start_up`. Raises RuntimeError with the log's tail."""
    process = start_up(folder, config.format(port=free_port()), checkout=checkout)
    try:
        env = _wait_until_ready(process, folder, start_s)
        yield PlatformProcess(
            env["OPENAI_BASE_URL"].removesuffix("/v1"), env["OPENAI_API_KEY"], process.pid, folder / "state"
        )
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)


def _wait_until_ready(process: "subprocess.Popen[bytes]", folder: Path, start_s: float) -> dict[str, str]:
    """Wait for the file `env`, which is written when /readyz has answered."""
    end = time.monotonic() + start_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"penstock up ended with {process.returncode}:\n{_tail(folder)}")
        if (folder / "state" / "env").exists():
            return read_env(folder / "state")
        time.sleep(0.1)
    raise RuntimeError(f"penstock up was not ready within {start_s} s:\n{_tail(folder)}")


def _tail(folder: Path) -> str:
    return (folder / "up.log").read_text(encoding="utf-8", errors="replace")[-3000:]
