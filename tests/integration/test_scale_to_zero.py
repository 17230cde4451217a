"""A pool that goes to zero and comes back: real Ray Serve, Redis, gateway and timed replicas, and OpenAI's client."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from bench.autoscale_demo import Watch, read_lines
from bench.support.platform_process import PlatformProcess, running_platform
from penstock.router.completions.heartbeats import FIRST_S
from penstock.tenancy.tenants import Settings
from tests.integration.new_tenants import new_key
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

MAX_HELD = 2
TO_ZERO, BACK = (1, 0, "unused"), (0, 1, "arrival")
"""What an autoscaler does: number of replicas before and after, and why."""
CONFIG = f"""
gateway: {{{{port: {{port}}, max_held: {MAX_HELD}}}}}
pools:
- name: played
  served_names: [played]
  autoscale: {{{{min_replicas: 0, max_replicas: 1, idle_s: 6.0, window_s: 2.0, start_s: 3.0, scale_down_delay_s: 2.0}}}}
  engine: {{{{runner: timed, max_num_seqs: 4, timed: {{{{base_s: 0.03, prefill_token_s: 0.0001, num_blocks: 512}}}}}}}}
"""
BODY = {"model": "played", "prompt": "Once upon a time", "max_tokens": 8, "seed": 7, "ignore_eos": True}


def ask(platform: PlatformProcess, key: str | None = None, **changes: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key or platform.key}"}
    return httpx.post(
        f"{platform.url}/v1/completions", json={**BODY, **changes}, headers=headers, timeout=120, trust_env=False
    )


def stream_with_client(platform: PlatformProcess) -> tuple[str, float]:
    """Text of a stream that OpenAI's client reads, and seconds until its first token."""
    began_s = time.monotonic()
    client = openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0)
    text, first_s = "", 0.0
    with client.completions.create(
        model="played", prompt="Once upon a time", max_tokens=8, seed=7, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        for chunk in chunks:
            first_s = first_s or time.monotonic() - began_s
            text += chunk.choices[0].text
    return text, first_s


def applied(platform: PlatformProcess) -> list[tuple[int, int, str]]:
    lines = read_lines(platform.state / "autoscale.jsonl")
    return [(line["was"], line["target"], line["reason"]) for line in lines if line["outcome"] == "applied"]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_pool_goes_to_zero_holds_what_comes_and_is_back(tmp_path: Path) -> None:
    with running_platform(tmp_path, CONFIG) as platform, Watch(platform.url, "played").running() as watch:
        warm = ask(platform)  # held until there is one
        assert watch.wait_for_replicas(1, 30)
        other_key = new_key(platform, "other", Settings())
        assert watch.wait_for_replicas(0, 60), "nobody asks any more"
        assert httpx.get(f"{platform.url}/readyz", trust_env=False).status_code == 200
        wait_for(lambda: applied(platform)[-1:] == [TO_ZERO], within_s=10)

        (autoscaler,) = platform.autoscalers
        with ThreadPoolExecutor(4) as callers:
            with stopped(autoscaler):  # else a replica may be there before anybody could be refused
                raw = callers.submit(ask, platform, stream=True)
                whole = callers.submit(ask, platform)
                other = callers.submit(ask, platform, other_key, stream=True)
                assert watch.wait_until(lambda values: values.get("queued", 0) > MAX_HELD, 10), (
                    "the bound is each tenant's own"
                )
                refused = ask(platform)
                time.sleep(FIRST_S)
            answered, streamed, others = whole.result(), raw.result(), other.result()

        assert watch.wait_for_replicas(1, 10), "as its gauge says at the next sample"
        assert watch.wait_for_replicas(0, 60), "and again"
        text, first_s = stream_with_client(platform)
        assert watch.wait_for_replicas(1, 10), "likewise"
        assert watch.wait_for_replicas(0, 60)
        wait_for(lambda: applied(platform)[-1:] == [TO_ZERO], within_s=10)
        moves = applied(platform)

    assert warm.status_code == answered.status_code == streamed.status_code == 200
    assert answered.json()["choices"][0]["text"] == warm.json()["choices"][0]["text"]
    assert "x-penstock-replica" in answered.headers
    assert ": waiting for a replica to start, expected in " in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert refused.status_code == 429
    assert "wait for it already" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert others.status_code == 200
    assert ": waiting for a replica to start, expected in " in others.text
    assert others.text.endswith("data: [DONE]\n\n")
    assert text == warm.json()["choices"][0]["text"]
    assert first_s > 0.3, "there was no replica"
    assert moves[-5:] == [TO_ZERO, BACK, TO_ZERO, BACK, TO_ZERO]
