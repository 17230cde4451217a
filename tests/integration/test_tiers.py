"""Tiers: a timed edge pool at its knee and dead, an external provider behind it (a second real server on loopback,
which counts), and a tenant whose requests never leave."""

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from bench.support.platform_process import PlatformProcess, running_platform
from penstock.tenancy.tenants import Settings
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.integration.new_tenants import new_key
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

TARGET_S = 0.7
PREFILL_TOKEN_S = 0.002
WORDS = 60
"""Words of a prompt; a token each at least, so that its prefill takes a good part of the target."""
AT_ONCE = 16
Record = Callable[[str, object], None]
"""pytest's `record_property`: a figure for the report (`--junitxml`)."""
KEY = "a-secret-of-the-provider"
CONFIG = f"""
gateway: {{{{port: {{port}}, ttft_target_s: {TARGET_S}}}}}
pools:
- name: edge
  model: demo
  served_names: [chat]
  tier: edge
  engine: {{{{runner: timed, timed: {{{{base_s: 0.01, prefill_token_s: {PREFILL_TOKEN_S}, max_model_len: 2048}}}}}}}}
providers:
- {{{{name: upstream, base_url: "URL", model: large, served_names: [chat], \
api_key_env: TEST_TIERS_KEY, ttft_s: 0.05, extra_fields: [ignore_eos]}}}}
"""


@dataclass
class World:
    platform: PlatformProcess
    client: httpx.Client
    provider: FakeServer
    leaving: str
    """Key of a tenant whose policy is edge_first."""
    staying: str
    """Key of a tenant whose policy is never_leave."""

    @property
    def num_left(self) -> int:
        """Requests that the provider has got."""
        return len(self.provider.truths)

    @property
    def num_edge_replicas(self) -> float:
        return self.platform.metric("penstock_replicas", pool="edge")

    def post(self, key: str, name: str = "", stay: str | None = None, **fields: Any) -> httpx.Response:
        content = " ".join([name, *["word"] * WORDS])
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "ignore_eos": True,
            **fields,
        }
        stays = {} if stay is None else {"x-penstock-stay": stay}
        return self.client.post("/v1/chat/completions", json=body, headers=bearer(key) | stays)

    def receipt(self, key: str, request_id: str) -> httpx.Response:
        return self.client.get(f"/v1/receipts/{request_id}", headers=bearer(key))

    def at_once(self, key: str, count: int = AT_ONCE, stay: str | None = None) -> list[httpx.Response]:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(lambda number: self.post(key, f"{key[-4:]} {number}", stay), range(count)))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def listening(behaviour: Behaviour) -> Iterator[FakeServer]:
    """A fake server on an event loop in a thread of its own."""
    ready, found = threading.Event(), []

    async def main() -> None:
        async with FakeServer(behaviour) as server:
            stop = asyncio.Event()
            found.append((server, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    server, loop, stop = found[0]
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    behaviour = Behaviour(
        models=["large"], keys={KEY: "penstock"}, ttft_s=Lengths(constant=0.05), gap_s=Lengths(constant=0.01)
    )
    with listening(behaviour) as provider, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_TIERS_KEY", KEY)
        with running_platform(tmp_path_factory.mktemp("platform"), CONFIG.replace("URL", provider.url)) as platform:
            leaving = new_key(platform, "leaving", Settings(tier_policy="edge_first"))
            staying = new_key(platform, "staying", Settings(tier_policy="never_leave"))
            with httpx.Client(base_url=platform.url, timeout=60, trust_env=False) as client:
                found = World(platform, client, provider, leaving, staying)
                wait_for(lambda: found.num_edge_replicas == 1, within_s=10)
                yield found


def tier(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-penstock-tier"], answer.headers["x-penstock-tier-reason"]


def test_below_its_knee_the_edge_answers(world: World) -> None:
    before = world.num_left
    answer = world.post(world.leaving)

    assert tier(answer) == ("edge", "preferred")
    assert world.num_left == before


def test_at_its_knee_the_edge_spills_and_the_receipt_says_why(world: World, record_property: Record) -> None:
    before = world.num_left
    answers = world.at_once(world.leaving)

    tiers = Counter(tier(answer) for answer in answers)
    record_property(
        "of_16_at_once", f"{tiers['edge', 'preferred']} at the edge, {tiers['cloud', 'predicted_ttft']} spilled"
    )
    assert tiers["edge", "preferred"] >= 2
    assert tiers["cloud", "predicted_ttft"] >= 2
    assert tiers["edge", "preferred"] + tiers["cloud", "predicted_ttft"] == AT_ONCE, tiers
    assert world.num_left - before == tiers["cloud", "predicted_ttft"]
    for answer in answers:
        (choice,) = world.receipt(world.leaving, answer.headers["x-penstock-request-id"]).json()["choices"]
        assert (choice["tier"], choice["tier_reason"]) == tier(answer)
        assert choice["attempts"] == 1
        if choice["tier"] == "cloud":
            edge, upstream = choice["considered"]
            assert (edge["places"], upstream["places"]) == (["edge"], ["upstream"])
            assert edge["predicted_ttft_s"] > TARGET_S > upstream["predicted_ttft_s"]
            assert choice["scores"]["upstream"] == upstream["predicted_ttft_s"]
        else:
            assert choice["predicted_ttft_s"] <= TARGET_S
    assert (
        world.platform.metric("penstock_tier_decisions_total", pool="upstream", reason="predicted_ttft", tier="cloud")
        >= tiers["cloud", "predicted_ttft"]
    )


def test_a_receipt_is_its_tenants_own(world: World) -> None:
    answer = world.post(world.leaving)
    request_id = answer.headers["x-penstock-request-id"]

    assert world.receipt(world.leaving, request_id).json()["id"] == request_id
    assert world.receipt(world.leaving, answer.json()["id"]).json()["id"] == request_id
    assert world.receipt(world.staying, request_id).status_code == 404
    assert world.receipt(world.leaving, "0" * 24).status_code == 404


def test_a_tenant_that_never_leaves_waits_at_the_knee(world: World) -> None:
    before = world.num_left
    answers = world.at_once(world.staying, AT_ONCE // 2)

    assert {tier(answer) for answer in answers} == {("edge", "only_tier")}
    assert world.num_left == before


def test_requests_that_stay_wait_at_the_knee_though_their_tenant_may_leave(world: World) -> None:
    before = world.num_left
    answers = world.at_once(world.leaving, AT_ONCE // 2, stay="edge")

    assert {tier(answer) for answer in answers} == {("edge", "only_tier")}
    assert {answer.headers["x-penstock-stay"] for answer in answers} == {"edge"}
    assert world.post(world.leaving, stay="cloud").status_code == 400
    assert world.num_left == before


def test_with_the_edge_killed_the_provider_answers_and_who_never_leaves_waits_for_the_edge(
    world: World, record_property: Record
) -> None:
    before = world.num_left
    (replica,) = world.platform.replicas
    with ThreadPoolExecutor(8) as threads:
        leaving = [threads.submit(world.post, world.leaving, f"leaving {number}", max_tokens=48) for number in range(4)]
        staying = [threads.submit(world.post, world.staying, f"staying {number}", max_tokens=48) for number in range(4)]
        wait_for(lambda: world.platform.metric("penstock_running_sequences", pool="edge") >= 2, within_s=10)
        os.kill(replica, signal.SIGKILL)
        wait_for(lambda: world.num_edge_replicas == 0, within_s=10)
        answer = world.post(world.leaving, "arriving 0", stream=True, stream_options={"include_usage": True})

    assert tier(answer) == ("cloud", "tier_down")
    assert answer.headers["x-penstock-replica"] == "upstream"
    assert_is_a_stream_of_ours(answer, prompt_tokens=world.provider.truths[-1].prompt_tokens)
    assert {truth.tenant for truth in world.provider.truths} == {"penstock"}, "it got its own key"
    under_way, stayed = [future.result() for future in leaving], [future.result() for future in staying]
    num_provided = 1 + Counter(tier(answer)[0] for answer in under_way)["cloud"]
    assert {tier(answer) for answer in stayed} == {("edge", "only_tier")}
    assert world.num_left - before == num_provided, "none of those that stay"
    assert {answer.json()["usage"]["completion_tokens"] for answer in (*under_way, *stayed)} == {48}
    record_property(
        "around_the_edges_death",
        f"9 requests, none failed; {num_provided} answered by the provider, of 4 that never leave none",
    )


def assert_is_a_stream_of_ours(answer: httpx.Response, prompt_tokens: int) -> None:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert {(chunk["id"], chunk["model"]) for chunk in chunks} == {
        (f"chatcmpl-{answer.headers['x-penstock-request-id']}", "chat")
    }
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (prompt_tokens, 8)


def test_the_providers_key_is_in_no_log_and_no_metric(world: World) -> None:
    text = world.platform.metrics()
    logs = b"".join(path.read_bytes() for path in world.platform.state.rglob("*") if path.is_file())

    assert 'penstock_provider_requests_total{outcome="finished",provider="upstream"}' in text
    assert KEY not in text
    assert KEY.encode() not in logs
