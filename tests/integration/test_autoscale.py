"""A scaled pool under load: real Ray Serve, Redis, gateway and timed replicas, loaded from outside by penstock-loadtest.

The demo (`make demo-autoscale`) is the same at a laptop's pace; here steps and horizons are shorter.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.autoscale import Watch, read_lines, steps
from bench.platform_process import PlatformProcess, running_platform
from penstock.base.environment import serve_environment

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
    "duration_s": 26,
    "drain_s": 30,
    "arrivals": {"process": "spike", "rate": 0.6, "to_rate": 8, "at_s": 3, "length_s": 9},
    "kinds": [
        {
            "endpoint": "completions",
            "prompts": {"tokens": {"uniform": [32, 96]}, "shared_prefix_tokens": 32, "prefix_groups": 2},
            "output_tokens": {"uniform": [24, 48]},
            "ignore_eos": True,
        }
    ],
}
DOWN_S = 30.0
"""For the second replica to go, after the load."""

Record = Callable[[str, object], None]


def run_load(platform: PlatformProcess, folder: Path) -> int:
    (folder / "load.yaml").write_text(yaml.safe_dump(LOAD), encoding="utf-8")
    command = [sys.executable, "-m", "penstock_loadtest.main", "run", str(folder / "load.yaml"), "--url", f"{platform.url}/v1", "--out", str(folder / "out")]
    return subprocess.run(command, env=os.environ | {"OPENAI_API_KEY": platform.key}, stdout=subprocess.DEVNULL, timeout=120, check=False).returncode


def test_a_pool_goes_from_one_replica_to_three_and_back_and_nothing_fails(tmp_path: Path, record_property: Record) -> None:
    with running_platform(tmp_path, CONFIG) as platform:
        with Watch(platform.url, "played").running() as watch:
            assert watch.wait_for_replicas(1, 30)
            assert run_load(platform, tmp_path) == 0, "the ledger balances"
            assert watch.wait_for_replicas(1, DOWN_S)
        page = httpx.get(f"{platform.url}/metrics", trust_env=False).text
        journal = read_lines(platform.state / "autoscale.jsonl")

    counts = steps(seen.values["replicas"] for seen in watch.samples if "replicas" in seen.values)
    assert (counts[0], max(counts), counts[-1]) == (1, 3, 1)
    records = read_lines(tmp_path / "out" / "records.jsonl")
    assert len(records) > 50
    assert {row.get("outcome", "unfinished") for row in records} == {"finished"}
    assert len({row["replica"] for row in records}) == 3, "each of them answered"
    record_property("replicas", counts)

    applied = [line for line in journal if line["outcome"] == "applied"]
    assert [(line["was"], line["target"]) for line in applied][-2:] == [(3, 2), (2, 1)]
    assert applied[0]["reason"] in ("deadline", "demand")
    assert {line["reason"] for line in applied[-2:]} == {"idle"}
    victims = [victim for line in applied for victim in line["victims"]]
    ever = {replica for line in journal for replica in line["running"]}
    assert len(ever) == 3, "Serve replaced none: the survivors survived, and the victims were not started anew"
    assert set(journal[-1]["running"]) == ever - set(victims)
    raised_s = applied[0]["unix_s"]
    served_s = next(line["unix_s"] for line in journal if len(line["running"]) == 3)
    record_property("up_s", round(served_s - raised_s, 1))

    assert 'penstock_autoscale_target{pool="played"} 1.0' in page
    assert 'penstock_autoscale_decisions_total{pool="played",reason="idle"} 2.0' in page


def test_serve_stops_the_victim_we_name_and_no_other(socket_dir: Path) -> None:
    environment = os.environ | serve_environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tests.integration.serve_pool", str(socket_dir / "ray")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(next(line for line in finished.stdout.splitlines() if line.startswith("{")))  # Ray writes there too
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
