"""`penstock up` as a person meets it: one command, an answer, Redis that comes back, Ctrl-C that leaves nothing. Timed
replicas."""

import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from bench.support.cpu import command_line, is_alive
from bench.support.free_ports import free_port
from bench.support.platform_process import STOP_S, penstock, read_env, start_up
from penstock.cli.up import announcement
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: timed, served_names: [timed], replicas: 2, engine: {{runner: timed, timed: {{base_s: 0.002}}}}}}
"""
START_S = 120.0
RESTART_S = 40.0
"""Promised for a start that has nothing left to install."""


class Platform:
    """A running `penstock up` and what its state folder says of it."""

    def __init__(self, folder: Path, temp: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.temp = temp
        self.port = free_port()
        self.output = folder / "up.log"
        self.process = start_up(folder, CONFIG.format(port=self.port), temp=temp)

    def wait_until_ready(self) -> float:
        """Returns how long it took, in seconds."""
        began = time.monotonic()
        wait_for(
            lambda: "Ctrl-C stops it." in self.output.read_text(encoding="utf-8") or self.process.poll() is not None,
            within_s=START_S,
        )
        assert self.process.poll() is None, self.output.read_text(encoding="utf-8")
        return time.monotonic() - began

    @property
    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    @property
    def redis(self) -> psutil.Process | None:
        return next(
            (process for process in self.processes if name_of(process).startswith(("redis-server", "valkey-server"))),
            None,
        )

    @property
    def env(self) -> dict[str, str]:
        return read_env(self.state)

    def ask(self) -> httpx.Response:
        return httpx.post(
            f"{self.env['OPENAI_BASE_URL']}/chat/completions",
            headers={"Authorization": f"Bearer {self.env['OPENAI_API_KEY']}"},
            json={"model": "timed", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
            timeout=30,
            trust_env=False,
        )

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(penstock(*arguments), capture_output=True, text=True, timeout=60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Platform]]:
    """Starts platforms in one state folder, with a private folder for temporary files; ends what a failed test left."""
    temp = Path(tempfile.mkdtemp(prefix="pt-", dir="/tmp"))
    started: list[Platform] = []

    def begin() -> Platform:
        started.append(Platform(tmp_path, temp))
        return started[-1]

    yield begin
    for platform in started:
        if platform.process.poll() is None:
            platform.stop(signal.SIGINT)
    temp.rmdir()


def name_of(process: psutil.Process) -> str:
    """Empty if it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def assert_nothing_is_left(platform: Platform, processes: list[psutil.Process]) -> None:
    assert [process for process in processes if is_alive(process)] == []
    assert list(platform.temp.iterdir()) == []
    assert {path.name for path in platform.state.iterdir()} <= {"lock", "key", "secret", "redis", "penstock.log"}
    assert not [path for path in platform.state.rglob("*") if path.is_socket()]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", platform.port))


def test_one_command_answers_survives_its_redis_and_leaves_nothing(
    start: Callable[[], Platform], record_property: Callable[[str, object], None]
) -> None:
    platform = start()
    platform.wait_until_ready()

    # no key in a file, the curl line that a terminal shows, and the status
    assert platform.ask().status_code == 200
    env = read_env(platform.state)
    printed = platform.output.read_text(encoding="utf-8")
    assert str(platform.state / "env") in printed
    assert env["OPENAI_API_KEY"] not in printed
    address = env["OPENAI_BASE_URL"].removesuffix("/v1")
    shown = announcement(address, "timed", platform.state / "env", env["OPENAI_API_KEY"], 1.0)
    curl = shown.split("  curl ")[1].split("\n\n")[0]
    answer = subprocess.run(["sh", "-c", f"curl -sS {curl}"], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(answer.stdout)["object"] == "chat.completion"
    status = run("status", "--state", str(platform.state), "--json")
    assert status.returncode == 0
    assert [(pool["name"], pool["replicas_ready"]) for pool in json.loads(status.stdout)["pools"]] == [("timed", 2)]

    # a second start, in this folder and on this port
    again = run("up", "--config", str(platform.folder / "penstock.yaml"), "--state", str(platform.state))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "already running" in again.stderr
    elsewhere = run("up", "--config", str(platform.folder / "penstock.yaml"), "--state", str(platform.folder / "other"))
    assert (elsewhere.returncode, elsewhere.stderr.count("\n")) == (2, 1)
    assert f"can't listen on 127.0.0.1:{platform.port}" in elsewhere.stderr

    # Redis killed
    redis = platform.redis
    assert redis is not None
    redis.kill()
    assert platform.ask().status_code == 200, "a known key goes on without Redis"
    wait_for(lambda: (found := platform.redis) is not None and found.pid != redis.pid, within_s=5)

    # Ctrl-C
    key, processes = platform.env["OPENAI_API_KEY"], platform.processes
    assert platform.stop(signal.SIGINT) == 0
    assert_nothing_is_left(platform, processes)
    assert run("status", "--state", str(platform.state)).returncode == 1

    # the second start has the same key, and SIGTERM is as good as Ctrl-C
    second = start()
    took_s = second.wait_until_ready()
    record_property("second_start_s", round(took_s, 1))
    assert second.env["OPENAI_API_KEY"] == key
    assert second.ask().status_code == 200
    assert took_s <= RESTART_S
    processes = second.processes
    assert second.stop(signal.SIGTERM) == 0
    assert_nothing_is_left(second, processes)


@pytest.mark.slow
def test_whatever_is_killed_the_rest_goes_too_and_the_next_start_is_clean(start: Callable[[], Platform]) -> None:
    first = start()
    first.wait_until_ready()
    processes, redis = first.processes, first.redis
    assert redis is not None

    # penstock up itself, by SIGKILL: it can end nothing
    first.process.kill()
    first.process.wait()
    ray = [process for process in processes if process.pid not in (first.process.pid, redis.pid)]
    wait_for(lambda: not any(is_alive(process) for process in ray), within_s=90)
    assert run("status", "--state", str(first.state)).returncode == 1

    # the next start removes what was left; then Ray's driver is killed
    second = start()
    second.wait_until_ready()
    assert not is_alive(redis)
    assert len(list(second.temp.iterdir())) == 1
    assert second.ask().status_code == 200
    processes = second.processes
    next(process for process in processes if "penstock.cli.driver" in command_line(process)).kill()
    assert second.process.wait(STOP_S) == 1
    assert "Ray's driver process ended by itself with status -9" in second.output.read_text(encoding="utf-8")
    assert_nothing_is_left(second, processes)


@pytest.mark.parametrize("milestone", ["... Ray", "ok  Ray"])
def test_interrupted_while_starting_it_leaves_nothing(start: Callable[[], Platform], milestone: str) -> None:
    platform = start()
    wait_for(lambda: milestone in platform.output.read_text(encoding="utf-8"), within_s=START_S)
    wait_for(lambda: len(platform.processes) > 3, within_s=START_S)
    processes = platform.processes

    assert platform.stop(signal.SIGTERM) == 0

    assert_nothing_is_left(platform, processes)


def test_a_mistake_in_the_configuration_is_one_sentence_and_nothing_starts(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text("pools: [{name: a, replcas: 2}]", encoding="utf-8")

    refused = run("up", "--config", str(path), "--state", str(tmp_path / "state"))

    assert refused.returncode == 2
    assert refused.stderr == f"penstock: {path}: pools[0].replcas is not a known setting (did you mean replicas?).\n"
    assert not (tmp_path / "state").exists()
