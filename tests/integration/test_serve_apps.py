"""Gateway and pool as Ray Serve runs them: real Ray, Redis, token streams and HTTP, two timed replicas.

Most of it is about what happens when a process is killed. Not here: a replica's graceful end, which only Serve can
begin (tests/unit/workers and tests/unit/router play it), and the real model (test_demo, test_resume).
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

from bench.support.platform_process import PlatformProcess, running_platform
from tests.integration.replica_processes import has_log_of, kill_replica
from tests.integration.waiting import wait_for
from tests.real_time import real_time

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: timed, served_names: [timed], replicas: 2, \
engine: {{runner: timed, timed: {{base_s: 0.01, kv_token_s: 0.00002}}}}}}
"""
SLOW_CONTEXT, SLOW_STEP_S = 7500, 0.16
"""Tokens of a context so long that a step takes that many seconds: 0.01 and 0.00002 a token."""
BLOCK_SIZE = 16
LAG_S = 0.25
"""What a replica's report may take to /metrics: it waits up to 0.04 s for tokens to go along with, a page may be kept
for 0.1 s, the rest is a busy machine's."""
WITHIN_S = 10.0
"""Far beyond what takes milliseconds."""
RECOVERY_S = 30.0
"""Far beyond what it takes; where a time is promised, the test says so itself."""
BACK_S = 5.0
"""Promised for a killed gateway and a killed Redis."""

Record = Callable[[str, object], None]
"""pytest's `record_property`: a figure for the report (`--junitxml`)."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        wait_for(lambda: num_replicas(running) == 2, within_s=RECOVERY_S)
        yield running


def client(platform: PlatformProcess) -> httpx.Client:
    return httpx.Client(
        base_url=platform.url, headers={"authorization": f"Bearer {platform.key}"}, timeout=30, trust_env=False
    )


def body(max_tokens: int, content: str = "What is the capital of France?", **changes: Any) -> dict[str, Any]:
    question = {"role": "user", "content": content}
    return {
        "model": "timed",
        "messages": [question],
        "max_tokens": max_tokens,
        "seed": 7,
        "return_token_ids": True,
    } | changes


def ask(
    platform: PlatformProcess, max_tokens: int = 4, content: str = "What is the capital of France?"
) -> httpx.Response:
    with client(platform) as http:
        return http.post("/v1/chat/completions", json=body(max_tokens, content))


def long_prompt(name: str, tokens: int = 400) -> str:
    """New from its first word on, about that many tokens."""
    return f"{name} {time.time_ns()}: " + "water and power " * (tokens // 3)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-penstock-cached-tokens"])


def is_answering(platform: PlatformProcess) -> bool:
    try:
        return ask(platform).status_code == 200
    except httpx.TransportError:
        return False


def token_ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"] if answer["choices"] else []
    return found


def num_replicas(platform: PlatformProcess) -> int:
    """Number of replicas that the gateway is connected to; 0 also while it does not answer."""
    try:
        return int(platform.metric("penstock_replicas"))
    except httpx.TransportError:
        return 0


def prime(platform: PlatformProcess, content: str) -> str:
    """Have one replica cache a prompt, see that the gateway knows, and say which it is."""
    first = ask(platform, content=content)
    replica = str(first.headers["x-penstock-replica"])
    assert cached(first) < 100

    def is_found() -> bool:
        again = ask(platform, content=content)
        return again.headers["x-penstock-replica"] == replica and cached(again) > 300

    wait_for(is_found, within_s=WITHIN_S)
    wait_for(lambda: platform.metric("penstock_running_sequences") == 0, within_s=WITHIN_S)
    return replica


def copies(platform: PlatformProcess) -> dict[str, int]:
    """Replica id to number of blocks, of every whole copy that the index's Redis holds; empty while that is away."""
    found = {}
    try:
        with redis.Redis.from_url(platform.redis_url) as store:
            for meta in store.scan_iter("penstock:prefix:*:meta"):
                replica, count = store.hmget(meta, ["replica", "count"])
                if count is not None and int(count) == store.scard(meta.removesuffix(b":meta") + b":blocks"):
                    found[replica.decode()] = int(count)
    except redis.ConnectionError:
        return {}
    return found


def stream_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def has_redis(platform: PlatformProcess) -> bool:
    try:
        with redis.Redis.from_url(platform.redis_url) as store:
            return bool(store.ping())
    except redis.ConnectionError:  # not there, or still loading what it has on disk
        return False


def test_an_answer_streams_chunk_by_chunk(platform: PlatformProcess) -> None:
    with client(platform) as http, http.stream("POST", "/v1/chat/completions", json=body(100, stream=True)) as response:
        chunks = [(time.monotonic(), chunk) for chunk in stream_of(response)]

    assert response.status_code == 200
    assert sum(len(token_ids(chunk)) for _, chunk in chunks) == 100
    assert chunks[-1][0] - chunks[0][0] > 0.1, "100 steps of 10 ms do not come in one piece"


def test_a_stream_survives_the_death_of_its_replica_to_the_token(platform: PlatformProcess) -> None:
    expected = token_ids(ask(platform, 150).json())

    with client(platform) as http, http.stream("POST", "/v1/chat/completions", json=body(150, stream=True)) as response:
        chunks = stream_of(response)
        found: list[int] = []
        while len(found) < 20:
            found += token_ids(next(chunks))
        kill_replica(platform, response.headers["x-penstock-replica"])
        for chunk in chunks:
            found += token_ids(chunk)

    assert found == expected
    wait_for(lambda: num_replicas(platform) == 2, within_s=RECOVERY_S)


@real_time
def test_a_client_that_hangs_up_frees_its_kv_within_one_step(
    platform: PlatformProcess, record_property: Record
) -> None:
    question = body(100, long_prompt("Hang up", SLOW_CONTEXT), stream=True)
    wait_for(lambda: platform.metric("penstock_running_sequences") == 0, within_s=WITHIN_S)
    free = platform.metric("penstock_kv_blocks_free")
    with client(platform) as http, http.stream("POST", "/v1/chat/completions", json=question) as response:
        assert response.status_code == 200
        chunks = stream_of(response)
        arrivals: list[float] = []
        while len(arrivals) < 4:
            arrivals += [time.monotonic()] if token_ids(next(chunks)) else []
        assert platform.metric("penstock_kv_blocks_free") < free
        hung_up = time.monotonic()

    wait_for(lambda: platform.metric("penstock_kv_blocks_free") == free, within_s=WITHIN_S, every_s=0.002)
    freed_s = time.monotonic() - hung_up
    record_property("kv_freed_s", round(freed_s, 3))
    assert arrivals[-1] - arrivals[0] > 3 * 0.8 * SLOW_STEP_S, "the steps are as slow as this test needs them"
    assert freed_s <= SLOW_STEP_S + LAG_S


def test_after_an_idle_replica_is_killed_requests_go_on_and_its_index_entries_are_not_used(
    platform: PlatformProcess, record_property: Record
) -> None:
    prompt = long_prompt("Idle")
    victim = prime(platform, prompt)
    blocks = platform.metric("penstock_index_blocks")
    kill_replica(platform, victim)
    killed_at = time.monotonic()

    answers = [ask(platform) for _ in range(10)]  # at once: some may meet the dead one first
    wait_for(lambda: platform.metric("penstock_index_blocks") <= blocks - 400 // BLOCK_SIZE, within_s=WITHIN_S)
    predicted = platform.metric("penstock_prefix_predicted_tokens_total")
    answers.append(first := ask(platform, content=prompt))
    assert platform.metric("penstock_prefix_predicted_tokens_total") - predicted < 100, (
        "what the dead one held is not counted on"
    )
    assert cached(first) < 100, "the prompt is new to the other replica, but for what every chat begins with"
    answers += [ask(platform, content=prompt) for _ in range(10)]

    assert {answer.status_code for answer in answers} == {200}
    assert victim not in {answer.headers["x-penstock-replica"] for answer in answers}
    wait_for(lambda: num_replicas(platform) == 2, within_s=RECOVERY_S)
    record_property("replica_replaced_s", round(time.monotonic() - killed_at, 2))
    assert len(platform.replicas) == 2


def test_redis_killed_requests_go_on_it_is_back_and_the_index_heals(
    platform: PlatformProcess, record_property: Record
) -> None:
    before, meanwhile = long_prompt("Before"), long_prompt("Meanwhile")
    prime(platform, before)
    wait_for(lambda: len(copies(platform)) >= 2, within_s=RECOVERY_S)

    # away for three times as long as a key is known without asking (gateway.key_cache_s)
    killed: list[int] = []
    away_until = time.monotonic() + 3.0
    while time.monotonic() < away_until:
        for pid in platform.redis:
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            killed.append(pid)
        assert cached(ask(platform, content=before)) > 300
        assert ask(platform, content=meanwhile).status_code == 200
    wait_for(lambda: has_redis(platform), within_s=BACK_S - (time.monotonic() - killed_at))
    record_property("redis_back_s", round(time.monotonic() - killed_at, 2))
    assert len(set(killed)) > 1, "it was brought back, and killed again"

    # the new Redis holds what the replicas hold
    def is_healed() -> bool:
        found = copies(platform)
        living = {
            replica: count
            for replica, count in found.items()
            if any(has_log_of(pid, replica) for pid in platform.replicas)
        }
        return len(living) == 2 and sum(living.values()) == platform.metric("penstock_index_blocks")

    wait_for(is_healed, within_s=10.0)
    record_property("index_healed_s", round(time.monotonic() - killed_at, 2))

    # and a gateway that starts afresh finds both prompts
    (gateway,) = platform.gateways
    os.kill(gateway, signal.SIGKILL)
    wait_for(lambda: num_replicas(platform) == 2, within_s=RECOVERY_S)
    assert min(cached(ask(platform, content=prompt)) for prompt in (before, meanwhile)) > 300
    assert platform.metric("penstock_prefix_predicted_tokens_total") > 600


@real_time
def test_a_killed_gateway_answers_again_within_five_seconds_on_the_same_port(
    platform: PlatformProcess, record_property: Record
) -> None:
    (gateway,) = platform.gateways
    with (
        client(platform) as http,
        http.stream("POST", "/v1/chat/completions", json=body(2000, stream=True)) as response,
    ):
        events = stream_of(response)  # held: an iterator that is dropped closes the connection
        next(events)
        os.kill(gateway, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for(lambda: is_answering(platform), within_s=BACK_S)
        record_property("gateway_back_s", round(time.monotonic() - killed_at, 2))

    assert platform.gateways != [gateway]
    wait_for(lambda: num_replicas(platform) == 2, within_s=RECOVERY_S)


def test_a_dead_gateways_sequences_are_off_the_replicas(platform: PlatformProcess) -> None:
    (gateway,) = platform.gateways
    with (
        client(platform) as http,
        http.stream("POST", "/v1/chat/completions", json=body(4000, stream=True)) as response,
    ):
        events = stream_of(response)  # held: an iterator that is dropped closes the connection
        next(events)
        os.kill(gateway, signal.SIGKILL)
    wait_for(lambda: num_replicas(platform) == 2, within_s=RECOVERY_S)

    wait_for(lambda: platform.metric("penstock_running_sequences") == 0, within_s=WITHIN_S)


def test_discovery_goes_on_after_serves_controller_was_killed(platform: PlatformProcess) -> None:
    (controller,) = platform.controllers
    os.kill(controller, signal.SIGKILL)
    victim = platform.replicas[0]
    os.kill(victim, signal.SIGKILL)

    assert is_answering(platform)
    wait_for(lambda: num_replicas(platform) == 2 and victim not in platform.replicas, within_s=RECOVERY_S)
    assert is_answering(platform)
