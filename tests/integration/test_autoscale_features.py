"""What else has a say in a pool's target, live: real Ray Serve, Redis, gateway, autoscaler and timed replicas."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest

from bench.autoscale_demo import Watch
from bench.support.platform_process import PlatformProcess, running_platform
from penstock.wire.explanation import PoolExplanation

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

SCALING = "window_s: 2.0, start_s: 3.0, scale_down_delay_s: 4.0"
ENGINE = "{{runner: timed, max_num_seqs: 2, timed: {{base_s: 0.1, num_blocks: 512}}}}"
CONFIG = f"""
gateway: {{{{port: {{port}}}}}}
pools:
- name: played
  served_names: [played]
  autoscale: {{{{max_replicas: 2, {SCALING}}}}}
  engine: {ENGINE}
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("p"), CONFIG) as running:
        yield running


def penstock(platform: PlatformProcess, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *words, "--state", str(platform.state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def explained(platform: PlatformProcess, pool: str) -> PoolExplanation:
    answer = penstock(platform, "autoscale", "explain", "--pool", pool, "--json")
    assert answer.returncode == 0, answer.stderr
    (found,) = msgspec.json.decode(answer.stdout, type=list[PoolExplanation])
    return found


def ask(platform: PlatformProcess, model: str, max_tokens: int = 16) -> int:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {platform.key}"}
    return httpx.post(
        f"{platform.url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False
    ).status_code


def test_explain_says_why_there_are_as_many_as_there_are(platform: PlatformProcess) -> None:
    with Watch(platform.url, "played").running() as watch, ThreadPoolExecutor(16) as callers:
        assert watch.wait_for_replicas(1, 30)
        answers = [callers.submit(ask, platform, "played") for _ in range(16)]
        assert watch.wait_until(lambda values: values.get("target") == 2, 30)
        busy = explained(platform, "played")
        said = penstock(platform, "autoscale", "explain").stdout
        assert all(answer.result() == 200 for answer in answers)
        assert watch.wait_until(lambda values: values.get("target") == 1, 60)
    rested = explained(platform, "played")
    refused = penstock(platform, "autoscale", "explain", "--pool", "other")

    assert (busy.target, busy.most, busy.changes[-1].target) == (2, 2, 2)
    assert busy.changes[-1].reason in ("deadline", "demand")
    assert busy.capacity_rps is not None
    assert busy.num_gateways == 1
    assert "The target is 2" in said
    assert "It may have 1 (by its configuration) to 2 (by its configuration)." in said
    assert [(change.was, change.target, change.reason) for change in rested.changes][-1] == (2, 1, "idle")
    assert "no pool 'other' is scaled; these are: played" in refused.stderr
