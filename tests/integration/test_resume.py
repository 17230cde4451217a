"""A real model's answer goes on after its replica was killed in the middle: the same tokens, to the last one.

In exact mode: recomputing the KV of what is out already takes other batches than the first time, and only then are its
bits the same.
"""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import pytest

from bench.support.platform_process import PlatformProcess, running_platform
from tests.integration.replica_processes import kill_replica

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: demo, model: demo, served_names: [demo], replicas: 2, engine: {{exact: true}}}}
"""
REQUEST = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Write a short story about a river, a mill and the miller's daughter."}],
    "stream": True,
    "temperature": 0.8,
    "seed": 11,
    "top_p": 0.95,
    "frequency_penalty": 0.7,
    "min_tokens": 100,
    "max_tokens": 120,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
}
KILLED_AFTER = 15
"""Tokens."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


def answer(platform: PlatformProcess, *, is_disturbed: bool) -> list[dict[str, Any]]:
    """The choices of all chunks; disturbed: the replica that answers is killed in the middle."""
    choices: list[dict[str, Any]] = []
    headers = {"authorization": f"Bearer {platform.key}"}
    with httpx.stream(
        "POST", f"{platform.url}/v1/chat/completions", json=REQUEST, headers=headers, timeout=120, trust_env=False
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices += json.loads(line.removeprefix("data: "))["choices"]
            if is_disturbed and len(token_ids(choices)) >= KILLED_AFTER:
                kill_replica(platform, response.headers["x-penstock-replica"])
                is_disturbed = False
    assert not is_disturbed
    return choices


def token_ids(choices: list[dict[str, Any]]) -> list[int]:
    return list(chain.from_iterable(choice["token_ids"] for choice in choices))


def text(choices: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def logprobs(choices: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable((choice["logprobs"] or {}).get("content") or [] for choice in choices))


def test_a_seeded_penalised_answer_is_the_same_after_its_replica_was_killed(platform: PlatformProcess) -> None:
    expected = answer(platform, is_disturbed=False)

    found = answer(platform, is_disturbed=True)

    assert platform.metric("penstock_route_attempts_total", reason="resume") == 1
    assert len(token_ids(expected)) >= REQUEST["min_tokens"] > 2 * KILLED_AFTER
    assert token_ids(found) == token_ids(expected)
    assert text(found) == text(expected)
    assert found[-1]["finish_reason"] == expected[-1]["finish_reason"]
    assert len(logprobs(expected)) == len(token_ids(expected))
    assert logprobs(found) == logprobs(expected)
