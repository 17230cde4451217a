"""Escalation on a real platform: two pools of the demo model, one rule that sends everything on and a tenant that may
not leave."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.tenants import make_keys
from penstock.tenancy.tenants import Settings

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}, ttft_target_s: 30.0}}
pools:
- {{name: edge, tier: edge, model: demo, served_names: [unsure], escalation: {{tokens: 4, min_mean_logprob: 0.0}},
   engine: {{threads: 1, kv_memory_bytes: 134217728}}}}
- {{name: sure-edge, tier: edge, model: demo, served_names: [sure], escalation: {{tokens: 4, min_mean_logprob: -99.0}},
   engine: {{threads: 1, kv_memory_bytes: 134217728}}}}
- {{name: cloud, tier: cloud, model: demo, served_names: [unsure, sure],
   engine: {{threads: 1, kv_memory_bytes: 134217728}}}}
"""
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PlatformProcess, dict[str, str]]]:
    tenants = {"leaves": Settings(tier_policy="edge_first"), "stays": Settings(tier_policy="never_leave")}
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as found:
        yield found, asyncio.run(make_keys(found, tenants))


def ask(platform: PlatformProcess, key: str, model: str) -> tuple[str, dict[str, object], dict[str, object]]:
    """Text, usage and escalation of one answer."""
    headers = {"authorization": f"Bearer {key}"}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name a river in Europe."}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    with httpx.Client(base_url=platform.url, timeout=100, trust_env=False, verify=False) as client:
        response = client.post("/v1/chat/completions", json=body, headers=headers)
        response.raise_for_status()
        receipt = client.get(f"/v1/receipts/{response.headers['x-penstock-request-id']}", headers=headers).json()
    answer = response.json()
    return answer["choices"][0]["message"]["content"], answer["usage"], receipt["choices"][0]["escalation"]


def test_what_is_sent_on_is_answered_by_the_cloud_and_what_stays_or_is_sure_is_not(
    platform: tuple[PlatformProcess, dict[str, str]],
) -> None:
    found, keys = platform
    sent = ask(found, keys["leaves"], "unsure")
    kept = ask(found, keys["leaves"], "sure")
    stayed = ask(found, keys["stays"], "unsure")

    assert (sent[2]["outcome"], kept[2]["outcome"], stayed[2]["outcome"]) == ("escalated", "kept", "not_allowed")
    assert sent[0] == kept[0] == stayed[0], "one model, greedily"
    assert (sent[2]["held_tokens"], kept[2]["held_tokens"], stayed[2]["held_tokens"]) == (4, 4, 0)
    assert sent[2]["mean_logprob"] == pytest.approx(kept[2]["mean_logprob"], abs=0.05)
    edge = sent[2]["edge"]
    assert isinstance(edge, dict)
    assert (edge["pool"], edge["completion_tokens"]) == ("edge", 4)
    for outcome, model in (("escalated", "unsure"), ("kept", "sure"), ("not_allowed", "unsure")):
        assert found.metric("penstock_escalations_total", model=model, outcome=outcome) == 1
