"""Faults about a live autoscaler: killed in mid-scale beside a clock that is 5 s off, then all reports frozen. The load
stays the same throughout."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import redis
from msgspec import structs

from bench.autoscale_demo import Watch, read_lines
from bench.support.platform_process import PlatformProcess, running_platform
from penstock.autoscale.records.record import decode, encode
from penstock.autoscale.records.store import record_key

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

DELAY_S = 6.0
CONFIG = f"""
gateway: {{{{port: {{port}}}}}}
pools:
- name: played
  served_names: [played]
  autoscale: {{{{max_replicas: 6, window_s: 3.0, start_s: 3.0, scale_down_delay_s: {DELAY_S}, ttft_target_s: 0.5}}}}
  engine: {{{{runner: timed, max_num_seqs: 4, timed: {{{{base_s: 0.03, prefill_token_s: 0.0001, num_blocks: 512}}}}}}}}
"""
BODY = {"model": "played", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
NUM_CALLERS = 6
"""Rows of one and a half replicas: at 65 % of use they need three."""
KNOWN = ("steady", "cooling", "idle")
"""Reasons of an autoscaler that knows the load."""
OFF_S = 5.0
HELD_S = 4.0
WITHIN_S = 40.0


@contextmanager
def steady_load(platform: PlatformProcess) -> Iterator[list["Future[int]"]]:
    """Callers that ask for one answer after the other until the block ends; each tells how many it got."""
    stop = Event()

    def ask() -> int:
        count, headers = 0, {"authorization": f"Bearer {platform.key}"}
        with httpx.Client(base_url=platform.url, headers=headers, timeout=60, trust_env=False) as client:
            while not stop.is_set():
                client.post("/v1/completions", json=BODY).raise_for_status()
                count += 1
        return count

    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        try:
            yield [callers.submit(ask) for _ in range(NUM_CALLERS)]
        finally:
            stop.set()


def wait_for_line(journal: Path, is_it: Any, first: int = 0) -> int:
    """The number of the journal's first such line from number `first` on."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        for number, line in enumerate(read_lines(journal) if journal.exists() else []):
            if number >= first and is_it(line):
                return number
        time.sleep(0.1)
    raise AssertionError(f"no such line within {WITHIN_S} s: {read_lines(journal)}")


def write_clock_off(platform: PlatformProcess) -> None:
    """Makes the pool's record one of a machine whose clock is OFF_S ahead."""
    with redis.Redis.from_url(platform.redis_url) as client:
        record = decode(client.get(record_key("played")) or b"")  # type: ignore[arg-type]  # it is no coroutine here
        written = structs.replace(record, written_unix_s=record.written_unix_s + OFF_S)
        client.set(record_key("played"), encode(written))


def test_the_target_holds_through_a_restart_in_mid_scale_a_wrong_clock_and_frozen_reports(tmp_path: Path) -> None:
    with running_platform(tmp_path, CONFIG) as platform, Watch(platform.url, "played").running() as watch:
        journal = platform.state / "autoscale.jsonl"
        assert watch.wait_for_replicas(1, 30)
        with steady_load(platform) as callers:
            # killed in mid-scale, its record as if by another clock
            wait_for_line(journal, lambda line: line["outcome"] == "applied" and line["target"] > line["was"])
            (autoscaler,) = platform.autoscalers
            os.kill(autoscaler, signal.SIGSTOP)
            write_clock_off(platform)
            os.kill(autoscaler, signal.SIGKILL)
            killed = len(read_lines(journal))
            asked = read_lines(journal)[-1]["target"]
            settled = wait_for_line(journal, lambda line: line["reason"] in KNOWN, killed)
            # all reports frozen
            (gateway,) = platform.gateways
            os.kill(gateway, signal.SIGSTOP)
            try:
                stale = wait_for_line(journal, lambda line: line["reason"] == "stale", settled)
                time.sleep(HELD_S)  # nothing may happen: there is no event to wait for
                held = read_lines(journal)[stale:]
            finally:
                os.kill(gateway, signal.SIGCONT)
            wait_for_line(journal, lambda line: line["reason"] != "stale", stale)
            began_s = time.monotonic()
            assert watch.wait_until(lambda _: time.monotonic() - began_s > 2 * HELD_S, WITHIN_S)
        answers = [caller.result() for caller in callers]
        lines = read_lines(journal)

    assert min(answers) > 5, "nothing failed"
    asked_at = lines[killed - 1]["unix_s"]
    soon = [line["target"] for line in lines[killed : settled + 1] if line["unix_s"] - asked_at < DELAY_S]
    assert min(soon, default=asked) >= asked, "what was asked for is not taken back at once"
    assert {line["target"] for line in held} == {held[0]["was"]}
    targets = [line["target"] for line in lines]
    assert max(targets[settled:]) <= max(targets[: settled + 1]), "no more than before the reports stopped"
    signs = [later > earlier for earlier, later in pairwise(targets) if later != earlier]
    assert sum(one != other for one, other in pairwise(signs)) <= 2
