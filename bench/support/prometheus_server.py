"""A real Prometheus (Debian's package `prometheus`) that scrapes a platform with the project's rules, and what it says.

Its data lie in a folder that the caller gives and may delete.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.support.free_ports import free_port

START_S = 60.0
STOP_S = 20.0
QUERY_S = 30.0
JOB = "penstock"


class NoPrometheus(Exception):
    """There is no `prometheus` on the path."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def firing(self) -> dict[str, list[Mapping[str, str]]]:
        """Labels of each alert that fires now, by its name."""
        found: dict[str, list[Mapping[str, str]]] = {}
        for alert in self._get("/api/v1/alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def query(self, expression: str) -> list[Any]:
        """Samples of the expression now."""
        found: list[Any] = self._get("/api/v1/query", query=expression)["result"]
        return found

    def has_data(self, expression: str, start_s: float, end_s: float, step_s: float = 1.0) -> bool:
        """Whether the expression has had a sample between two times, unix seconds, looked at every step_s."""
        found = self._get(
            "/api/v1/query_range", query=expression, start=str(start_s), end=str(end_s), step=f"{step_s:g}"
        )
        return bool(found["result"])

    def rule_faults(self) -> list[str]:
        """Errors of the rules' latest evaluations."""
        groups = self._get("/api/v1/rules")["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}" for each in groups for rule in each["rules"] if "lastError" in rule
        ]

    def _get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}{path}", params=parameters, timeout=QUERY_S, trust_env=False, verify=False)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{parameters}: {answer.text[:500]}")
        return answer.json()["data"]


def find_prometheus() -> str:
    """Path of the program. Raises NoPrometheus."""
    found = shutil.which("prometheus")
    if found is None:
        raise NoPrometheus("there is no prometheus here: Debian's package prometheus has it")
    return found


@contextmanager
def running_prometheus(folder: Path, rules: str, target: str, interval_s: float) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` (host:port) and evaluates the rules (their file's text), both every
    interval_s. Raises NoPrometheus, and RuntimeError with its log if it ends or is not ready in time."""
    (folder / "rules.yaml").write_text(rules, encoding="utf-8")
    every = f"{round(1000 * interval_s)}ms"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [
        find_prometheus(),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, log)
        yield Prometheus(url)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready", timeout=1.0, trust_env=False, verify=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus is not ready:\n{log.read_text(errors='replace')[-2000:]}")
