"""Gateway and pool as Ray Serve runs them: real Ray, Redis, gRPC and HTTP, two timed replicas; what happens when a process is killed."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from bench.cpu import descendants
from bench.platform_process import PlatformProcess, running_platform

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: timed, served_names: [timed], replicas: 2, engine: {{runner: timed, timed: {{base_s: 0.01}}}}}}
"""
RECOVERY_S = 30.0
"""Far beyond what it takes; where a time is promised, the test says so itself."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        wait_for(lambda: num_replicas(running) == 2)
        yield running


def wait_for(condition: Callable[[], Any], within_s: float = RECOVERY_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


def client(platform: PlatformProcess) -> httpx.Client:
    return httpx.Client(base_url=platform.url, headers={"authorization": f"Bearer {platform.key}"}, timeout=30, trust_env=False)


def body(max_tokens: int, **changes: Any) -> dict[str, Any]:
    question = {"role": "user", "content": "What is the capital of France?"}
    return {"model": "timed", "messages": [question], "max_tokens": max_tokens, "seed": 7, "return_token_ids": True} | changes


def ask(platform: PlatformProcess, max_tokens: int = 4) -> httpx.Response:
    with client(platform) as http:
        return http.post("/v1/chat/completions", json=body(max_tokens))


def is_answering(platform: PlatformProcess) -> bool:
    try:
        return ask(platform).status_code == 200
    except httpx.TransportError:
        return False


def token_ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"] if answer["choices"] else []
    return found


def num_replicas(platform: PlatformProcess) -> int:
    """That the gateway is connected to; 0 also while it does not answer."""
    try:
        lines = httpx.get(f"{platform.url}/metrics", timeout=5, trust_env=False).text.splitlines()
    except httpx.TransportError:
        return 0
    return next((int(float(line.split()[-1])) for line in lines if line.startswith("penstock_replicas{")), 0)


def stream_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def pid_of(platform: PlatformProcess, replica_id: str) -> int:
    """Of the process behind a replica id: Serve names its log after it."""
    for pid in platform.replicas:
        if any(replica_id in file.path for file in psutil.Process(pid).open_files()):
            return pid
    raise LookupError(replica_id)


def test_an_answer_streams_chunk_by_chunk(platform: PlatformProcess) -> None:
    with client(platform) as http, http.stream("POST", "/v1/chat/completions", json=body(20, stream=True)) as response:
        chunks = [(time.monotonic(), chunk) for chunk in stream_of(response)]

    assert response.status_code == 200
    assert sum(len(token_ids(chunk)) for _, chunk in chunks) == 20
    assert chunks[-1][0] - chunks[0][0] > 0.1, "20 steps of 10 ms do not come in one piece"


def test_a_stream_survives_the_death_of_its_replica_to_the_token(platform: PlatformProcess) -> None:
    expected = token_ids(ask(platform, 300).json())

    with client(platform) as http, http.stream("POST", "/v1/chat/completions", json=body(300, stream=True)) as response:
        chunks = stream_of(response)
        found: list[int] = []
        while len(found) < 20:
            found += token_ids(next(chunks))
        os.kill(pid_of(platform, response.headers["x-penstock-replica"]), signal.SIGKILL)
        for chunk in chunks:
            found += token_ids(chunk)

    assert found == expected
    wait_for(lambda: num_replicas(platform) == 2)


def test_after_an_idle_replica_is_killed_requests_go_on_and_it_is_replaced(platform: PlatformProcess) -> None:
    os.kill(platform.replicas[0], signal.SIGKILL)

    answers = [ask(platform) for _ in range(20)]

    assert {answer.status_code for answer in answers} == {200}
    wait_for(lambda: num_replicas(platform) == 2)
    assert len(platform.replicas) == 2


def test_a_killed_gateway_answers_again_within_five_seconds_on_the_same_port(platform: PlatformProcess) -> None:
    (gateway,) = platform.gateways
    with client(platform) as http, http.stream("POST", "/v1/chat/completions", json=body(2000, stream=True)) as response:
        next(stream_of(response))
        os.kill(gateway, signal.SIGKILL)
        wait_for(lambda: is_answering(platform), within_s=5.0)

    assert platform.gateways != [gateway]
    wait_for(lambda: num_replicas(platform) == 2)


def test_a_dead_gateways_sequences_are_off_the_replicas(platform: PlatformProcess) -> None:
    (gateway,) = platform.gateways
    with client(platform) as http, http.stream("POST", "/v1/chat/completions", json=body(4000, stream=True)) as response:
        next(stream_of(response))
        os.kill(gateway, signal.SIGKILL)
    wait_for(lambda: num_replicas(platform) == 2)

    def is_idle() -> bool:
        lines = httpx.get(f"{platform.url}/metrics", timeout=5, trust_env=False).text.splitlines()
        return 'penstock_running_sequences{pool="timed"} 0.0' in lines

    wait_for(is_idle, within_s=5.0)


def test_discovery_goes_on_after_serves_controller_was_killed(platform: PlatformProcess) -> None:
    (controller,) = [process.pid for process in descendants(platform.pid) if "ServeController" in " ".join(process.cmdline())]
    os.kill(controller, signal.SIGKILL)
    victim = platform.replicas[0]
    os.kill(victim, signal.SIGKILL)

    assert is_answering(platform)
    wait_for(lambda: num_replicas(platform) == 2 and victim not in platform.replicas)
    assert is_answering(platform)
