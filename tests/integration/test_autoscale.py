"""A scaled pool under load: real Ray Serve, Redis, gateway and timed replicas, loaded from outside by
penstock-loadtest.

The demo (`make demo-autoscale`) is a trace of bursts at a laptop's pace; here is one step, with shorter horizons.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from bench.autoscale_demo import Watch, read_lines, steps
from bench.support.platform_process import PlatformProcess, running_platform
from penstock.base.environment import serve_environment
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- name: played
  served_names: [played]
  autoscale: {{max_replicas: 3, window_s: 3.0, start_s: 3.0, scale_down_delay_s: 3.0}}
  engine: {{runner: timed, max_num_seqs: 4, timed: {{base_s: 0.03, prefill_token_s: 0.0001, num_blocks: 512}}}}
"""
"""A replica takes about 3.5 of the load's requests a second: 4 rows, 36 steps of 30 ms."""
LOAD: dict[str, Any] = {
    "duration_s": 12,
    "drain_s": 30,
    "arrivals": {"process": "step", "rate": 0.6, "to_rate": 8, "at_s": 2},
    "kinds": [
        {
            "endpoint": "completions",
            "prompts": {"tokens": {"uniform": [32, 96]}, "shared_prefix_tokens": 32, "prefix_groups": 2},
            "output_tokens": {"uniform": [24, 48]},
            "ignore_eos": True,
        }
    ],
}
UP_S, DOWN_S = 60.0, 60.0
LONG = {"model": "played", "prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}
"""Three seconds of an answer: as long as a scale-down takes to be decided on."""

Record = Callable[[str, object], None]


@contextmanager
def load(platform: PlatformProcess, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`penstock-loadtest run` under way; ended with the block, where it has not ended by itself."""
    (folder / "load.yaml").write_text(yaml.safe_dump(LOAD), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "penstock_loadtest.main",
        "run",
        str(folder / "load.yaml"),
        "--url",
        f"{platform.url}/v1",
        "--out",
        str(folder / "out"),
    ]
    process = subprocess.Popen(
        [*command, "--no-plots"], env=os.environ | {"OPENAI_API_KEY": platform.key}, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Answered(NamedTuple):
    began_s: float
    ended_s: float
    """Unix times."""
    replica: str
    num_tokens: int
    attempts: int


@contextmanager
def long_answers(platform: PlatformProcess, num_callers: int = 2) -> Iterator[list["Future[list[Answered]]"]]:
    """Callers that ask for one long answer after the other; each finishes its last one when the block ends."""
    stop = Event()

    def ask() -> list[Answered]:
        found = []
        with httpx.Client(
            base_url=platform.url, headers={"authorization": f"Bearer {platform.key}"}, timeout=60, trust_env=False
        ) as client:
            while not stop.is_set():
                began_s = time.time()
                answer = client.post("/v1/completions", json=LONG).raise_for_status()
                ended_s, headers = time.time(), answer.headers
                receipt = client.get(f"/v1/receipts/{headers['x-penstock-request-id']}").json()["choices"][0]
                found.append(
                    Answered(
                        began_s,
                        ended_s,
                        receipt["replica"],
                        answer.json()["usage"]["completion_tokens"],
                        receipt["attempts"],
                    )
                )
        return found

    with ThreadPoolExecutor(num_callers) as callers:
        try:
            yield [callers.submit(ask) for _ in range(num_callers)]
        finally:
            stop.set()


def has_asked_for(platform: PlatformProcess, target: int) -> bool:
    journal = platform.state / "autoscale.jsonl"
    lines = read_lines(journal) if journal.exists() else []
    return any(line["outcome"] == "applied" and line["target"] == target for line in lines)


@pytest.mark.slow
def test_a_pool_goes_from_one_replica_to_three_and_back_and_nothing_fails(
    tmp_path: Path, record_property: Record
) -> None:
    """The autoscaler is killed as soon as it has asked for the third, and the victims have long answers to finish."""
    with running_platform(tmp_path, CONFIG) as platform:
        with Watch(platform.url, "played").running() as watch:
            assert watch.wait_for_replicas(1, 30)
            with load(platform, tmp_path) as loading:
                wait_for(lambda: has_asked_for(platform, 3), within_s=UP_S)
                (autoscaler,) = platform.autoscalers
                os.kill(autoscaler, signal.SIGKILL)
                assert watch.wait_for_replicas(3, UP_S)
                assert loading.wait(120) == 0, "the ledger balances"
            with long_answers(platform) as asking:
                assert watch.wait_for_replicas(1, DOWN_S)
            long = [answer for asked in asking for answer in asked.result()]
        key = {"authorization": f"Bearer {platform.key}"}
        last = httpx.post(
            f"{platform.url}/v1/completions", json=LONG | {"max_tokens": 1}, headers=key, timeout=60, trust_env=False
        )
        page = platform.metrics()
        journal = read_lines(platform.state / "autoscale.jsonl")

    counts = steps(seen.values["replicas"] for seen in watch.samples if "replicas" in seen.values)
    records = read_lines(tmp_path / "out" / "records.jsonl")
    assert counts in ([1, 3, 1], [1, 2, 3, 1], [1, 3, 2, 1], [1, 2, 3, 2, 1]), "up and down without a detour"
    assert {row.get("outcome") for row in records} == {"finished"}
    assert len(records) > 50
    assert len({row["replica"] for row in records} | {answer.replica for answer in long}) > 1, "new ones answered too"
    record_property("replicas", counts)

    applied = [line for line in journal if line["outcome"] == "applied"]
    lowered = [line for line in applied if line["victims"]]
    assert (lowered[0]["was"], lowered[-1]["target"]) == (3, 1)
    assert applied[0]["reason"] in ("deadline", "demand")
    assert {line["reason"] for line in lowered} == {"idle"}
    victims = [victim for line in applied for victim in line["victims"]]
    ever = {replica for line in journal for replica in line["running"]}
    assert len(ever) == 3, "Serve replaced none: the survivors survived, and the victims were not started anew"
    assert {last.headers["x-penstock-replica"]} == ever - set(victims)
    named_s = {victim: line["unix_s"] for line in applied for victim in line["victims"]}
    drained = [answer for answer in long if answer.began_s < named_s.get(answer.replica, 0.0) < answer.ended_s]
    assert drained, "a victim had an answer under way"
    assert {(answer.num_tokens, answer.attempts) for answer in long} == {(100, 1)}, "and finished it itself"
    record_property("drained", len(drained))
    raised_s = applied[0]["unix_s"]
    served_s = next(line["unix_s"] for line in journal if len(line["running"]) == 3)
    record_property("up_s", round(served_s - raised_s, 1))

    assert 'penstock_autoscale_target{pool="played"} 1.0' in page
    num_idle = sum(line["reason"] == "idle" for line in journal)
    counted = f'penstock_autoscale_decisions_total{{pool="played",reason="idle"}} {num_idle}.0'
    assert counted in page, "one step down or two"


def test_serve_stops_the_victim_we_name_and_no_other(socket_dir: Path) -> None:
    environment = (
        os.environ
        | serve_environment()
        | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    )
    command = [sys.executable, "-m", "tests.integration.serve_pool", str(socket_dir / "ray")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(
        next(line for line in finished.stdout.splitlines() if line.startswith("{"))
    )  # Ray writes there too
    oldest, *others = found["begin"]["running"]

    assert found["known"] == ["a"], "an application that Serve does not know is left out"
    assert found["refused"] == [False, False]
    assert found["untouched"], "what is refused changes nothing"
    assert found["done"]
    assert found["draining"] == {"target": 2, "running": others, "num_starting": 0, "num_stopping": 1}
    assert found["status"] == "RUNNING"
    assert found["seen"] == sorted(others), "nothing was started in its place"
    assert found["gone"] == {"target": 2, "running": others, "num_starting": 0, "num_stopping": 0}
    assert found["grown"]["running"][:2] == others
    assert oldest not in found["grown"]["running"]
