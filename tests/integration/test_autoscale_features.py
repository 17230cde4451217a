"""What else has a say in a pool's target, live: real Ray Serve, Redis, gateway, autoscaler and timed replicas."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import msgspec
import pytest

from bench.autoscale_demo import Watch
from bench.support.platform_process import PlatformProcess, running_platform
from penstock.wire.explanation import PoolExplanation
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

SCALING = "window_s: 2.0, start_s: 3.0, scale_down_delay_s: 4.0"
ENGINE = "{{runner: timed, max_num_seqs: 2, timed: {{base_s: 0.1, num_blocks: 512}}}}"
CONFIG = f"""
gateway: {{{{port: {{port}}, queue_timeout_s: 120.0}}}}
pools:
- name: played
  served_names: [played]
  autoscale: {{{{max_replicas: 2, {SCALING}}}}}
  engine: {ENGINE}
- name: first
  served_names: [first]
  autoscale: {{{{max_replicas: 2, priority: 1, gpus: 1, {SCALING}}}}}
  engine: {ENGINE}
- name: second
  served_names: [second]
  autoscale: {{{{max_replicas: 2, gpus: 1, {SCALING}}}}}
  engine: {ENGINE}
- name: scheduled
  served_names: [scheduled]
  autoscale: {{{{max_replicas: 2, {SCALING}, schedules: [WINDOW]}}}}
  engine: {ENGINE}
- name: ready
  served_names: [ready]
  autoscale: {{{{max_replicas: 2, standby: 1, {SCALING}}}}}
  engine: {ENGINE}
autoscale_budget: {{{{gpus: 3}}}}
"""
WINDOW_S = 900


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    """A platform whose scheduled window began before it did, and lasts longer than the tests."""
    now = datetime.now(UTC)
    begin, end = (f"{now + timedelta(seconds=each):%Y-%m-%d %H:%M}" for each in (-60, WINDOW_S))
    window = f'{{{{start: "{begin}", end: "{end}", min_replicas: 2}}}}'
    with running_platform(tmp_path_factory.mktemp("p"), CONFIG.replace("WINDOW", window)) as running:
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
        busy = wait_for(lambda: (found := explained(platform, "played")).reason != "stale" and found, within_s=10)
        said = penstock(platform, "autoscale", "explain").stdout
        assert all(answer.result() == 200 for answer in answers)
        assert watch.wait_until(lambda values: values.get("target") == 1, 60)
    rested = explained(platform, "played")
    refused = penstock(platform, "autoscale", "explain", "--pool", "other")

    assert (busy.target, busy.most, busy.changes[-1].target) == (2, 2, 2)
    assert busy.changes[-1].reason in ("deadline", "demand")
    assert busy.capacity_rps is not None
    assert busy.num_gateways == 1
    assert busy.start_phases.weights_s is not None
    assert busy.start_phases.warm_up_s is not None
    assert "The target is 2" in said
    assert "It may have 1 (by its configuration) to 2 (by its configuration)." in said
    assert [(change.was, change.target, change.reason) for change in rested.changes][-1] == (2, 1, "idle")
    assert "no pool 'other' is scaled; these are: played" in refused.stderr


def test_a_schedule_brings_the_replicas_of_its_window(platform: PlatformProcess) -> None:
    with Watch(platform.url, "scheduled").running() as watch:
        assert watch.wait_for_replicas(2, 60)
    found = explained(platform, "scheduled")

    assert (found.target, found.least, found.least_reason) == (2, 2, "schedule")
    assert {(change.was, change.target, change.reason) for change in found.changes} == {(1, 2, "schedule")}
    assert found.windows[0].least == 2


def test_a_standby_is_there_before_anybody_asks(platform: PlatformProcess) -> None:
    with Watch(platform.url, "ready").running() as watch:
        assert watch.wait_for_replicas(2, 60)
    found = explained(platform, "ready")

    assert (found.target, found.needed, found.standby, found.num_present) == (2, 0, 1, 0)
    assert ask(platform, "ready") == 200


def test_a_pool_of_lower_priority_gives_way_and_the_budget_holds(platform: PlatformProcess) -> None:
    with (
        Watch(platform.url, "first").running() as first,
        Watch(platform.url, "second").running() as second,
        ThreadPoolExecutor(64) as callers,
    ):
        low = [callers.submit(ask, platform, "second", 64) for _ in range(32)]
        assert second.wait_until(lambda values: values.get("replicas") == 2, 60)
        high = [callers.submit(ask, platform, "first", 64) for _ in range(16)]
        assert first.wait_until(lambda values: values.get("replicas") == 2, 90)
        assert second.wait_until(lambda values: values.get("target") == 1, 10), "it has given way"
        statuses = {answer.result() for answer in low + high}
    lowered, raised = explained(platform, "second"), explained(platform, "first")

    assert statuses == {200}, "who gives way finishes what it has"
    assert (2, 1, "budget") in [(change.was, change.target, change.reason) for change in lowered.changes]
    targets = {"first": 1, "second": 1}
    for change, pool in sorted(
        [*((change, "second") for change in lowered.changes), *((change, "first") for change in raised.changes)],
        key=lambda each: each[0].unix_s,
    ):
        targets[pool] = change.target
        assert sum(targets.values()) <= 3
