"""ladder, compare and overhead against fake servers whose knee, latencies and processes are known.

Bounds are wide, since a busy machine takes capacity from the fake server and time from the tester; what is off by
construction is off by more.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.client.target import Target
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.process import fake_server_process
from penstock_loadtest.results.cost import Path as Way
from penstock_loadtest.results.knee import Ladder, Rules
from penstock_loadtest.results.sides import Setting
from penstock_loadtest.scenario import Arrivals, Kind, Lengths, Prompts, Scenario, Targets
from penstock_loadtest.studies.compare import Contender, run_comparison
from penstock_loadtest.studies.ladder import StepLength, run_ladder
from penstock_loadtest.studies.overhead import Load, Meter, run_overhead
from penstock_loadtest.studies.process_tree import read_tree_cpu_s
from tests.real_time import real_time

pytestmark = pytest.mark.slow

TOKENS = 8
SLOTS, TTFT_S, GAP_S = 4, 0.041, 0.010
CAPACITY = SLOTS / (TTFT_S + (TOKENS - 1) * GAP_S)
"""Requests a second: each holds a slot until its last token. 36."""
QUEUED = Behaviour(slots=SLOTS, ttft_s=Lengths(constant=TTFT_S), gap_s=Lengths(constant=GAP_S))
KIND = Kind(prompts=Prompts(tokens=Lengths(constant=8)), output_tokens=Lengths(constant=TOKENS))
STEADY = Scenario(
    name="steady",
    arrivals=Arrivals(process="constant", rate=15),
    kinds=[KIND],
    targets=Targets(ttft_s=TTFT_S + 0.1, tpot_s=0.1),
    drain_s=5.0,
)


def target(url: str) -> Target:
    return find_destination(STEADY, url, None, {})


@real_time
def test_the_knee_of_a_server_with_a_known_capacity_is_found(tmp_path: Path) -> None:
    rules, step_length = (
        Rules(start_rate=15, max_rate=500, precision=0.2),
        StepLength(warmup_s=0.2, step_s=0.9, min_requests=1),
    )
    with fake_server_process(QUEUED) as fake:
        ladder = run_ladder(
            STEADY, target(fake.url), tmp_path, rules=rules, step_length=step_length, settle_s=0.1, console=None
        )

    assert ladder.is_confirmed, ladder.verdict
    assert ladder.knee == pytest.approx(CAPACITY, rel=0.25)
    assert ladder.missed is not None
    assert ladder.missed <= 1.7 * CAPACITY
    assert all(step.is_balanced for step in ladder.steps)
    assert all((tmp_path / step.folder / "records.jsonl").exists() for step in ladder.steps)


def test_ctrl_c_leaves_a_ladder_and_its_report_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text(
        f"arrivals: {{process: constant, rate: 15}}\nkinds: [{{output_tokens: {{constant: {TOKENS}}}}}]\n"
    )
    options = [
        "--step-s",
        "0.4",
        "--min-requests",
        "1",
        "--warmup-s",
        "0",
        "--settle-s",
        "0",
        "--max-rate",
        "30",
        "--out",
        str(tmp_path / "out"),
    ]
    path = tmp_path / "out" / "ladder.json"

    def steps() -> int:
        return len(json.loads(path.read_text())["steps"]) if path.exists() else 0

    with fake_server_process(QUEUED) as fake:
        command = [
            sys.executable,
            "-m",
            "penstock_loadtest.main",
            "ladder",
            str(tmp_path / "load.yaml"),
            "--url",
            fake.url,
            *options,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while not (path.parent / "step-01-15" / "records.jsonl").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        stopped_after = steps()
        again = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)

    assert process.returncode == 130, printed
    assert stopped_after < 2
    assert "Not finished after" in printed
    assert (path.parent / "report.html").exists()
    assert again.returncode == 0
    ladder = msgspec.convert(json.loads(path.read_text()), Ladder, strict=False)
    assert (ladder.is_complete, [step.rate for step in ladder.steps]) == (True, [15, 30])


@real_time
def test_a_fifth_more_time_to_first_token_is_found_and_equal_gaps_are_not_told_apart(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(
        STEADY, arrivals=Arrivals(process="constant", rate=40), duration_s=0.3, targets=Targets()
    )
    with (
        fake_server_process(Behaviour(ttft_s=Lengths(constant=0.1))) as one,
        fake_server_process(Behaviour(ttft_s=Lengths(constant=0.12))) as other,
    ):
        a, b = (
            Contender(Setting(name=name, url=fake.url, model="fake", overrides=[]), scenario, target(fake.url))
            for name, fake in (("one", one), ("other", other))
        )
        found = run_comparison(a, b, tmp_path, pairs=6, settle_s=0.0, console=None)
    rows = {row.figure: row for row in found.rows}

    assert rows["TTFT"].ratio.value == pytest.approx(1.2, abs=0.05)
    assert rows["TTFT"].is_distinguishable
    assert rows["TPOT"].ratio.value == pytest.approx(1.0, abs=0.05)
    assert rows["goodput"].a == rows["goodput"].b == 1.0


def test_the_cost_of_a_process_is_read_while_it_serves(tmp_path: Path) -> None:
    load = Load(lengths=[4, 64], concurrencies=[4], requests=16, prompt_tokens=8, rounds=1)
    quick = Behaviour(ttft_s=Lengths(constant=0.002), gap_s=Lengths(constant=0.002))
    with fake_server_process(quick) as platform, fake_server_process(quick) as engine:
        meter = Meter(lambda: read_tree_cpu_s([platform.pid]))
        targets: dict[Way, Target] = {"platform": target(platform.url), "direct": target(engine.url)}
        found = run_overhead(targets, load, meter, tmp_path, console=None)

    assert found.is_complete
    assert all(run.finished == run.requests == 16 for run in found.runs)
    assert [run.tokens for run in found.runs if run.path == "platform"] == [64, 1024]
    used = [run.cpu for run in found.runs if run.cpu]
    assert used[1].busy_s > used[1].idle_s
    assert found.fits[0].per_token_us > 0
    assert all(line.added_ttft_ms is not None and abs(line.added_ttft_ms.value or 99) < 20 for line in found.lines), (
        "the same server twice"
    )
