"""The `penstock-loadtest` command against a real fake server, both in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock_loadtest.fake.behaviour import Behaviour, Fault
from penstock_loadtest.fake.process import fake_server_process
from penstock_loadtest.results.records import read_records
from penstock_loadtest.scenario import Lengths

QUICK = Behaviour(ttft_s=Lengths(constant=0.02), gap_s=Lengths(constant=0.002))
SHORT = ["--duration", "0.5", "--rate", "40", "--set", "kinds.0.output_tokens.constant=8", "--set", "drain_s=10"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server_process(QUICK) as fake:
        yield fake.url


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")} | more


def loadtest(*arguments: object, at: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock_loadtest.main", *map(str, arguments)]
    return subprocess.run(
        command, cwd=at, env=environment(**more), capture_output=True, text=True, timeout=60, check=False
    )


def long_run(url: str, *settings: str) -> list[str]:
    """The command of a run that would take ten minutes, into the folder `out`."""
    command = [sys.executable, "-m", "penstock_loadtest.main", "run", "--url", url, "--out", "out"]
    command += ["--rate", "200", "--duration", "600"]
    return command + [word for setting in settings for word in ("--set", setting)]


def until(is_so: Callable[[], bool], running: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert running.poll() is None, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_run_leaves_a_table_and_a_report(url: str, tmp_path: Path) -> None:
    done = loadtest("run", "--url", url, *SHORT, "--name", "1: first try", at=tmp_path)

    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "loadtest-results").iterdir()
    assert folder.name.startswith("1--first-try-20")
    for word in ("TTFT", "p99", "goodput", "The ledger balances", "report.html"):
        assert word in done.stdout
    assert (folder / "report.html").stat().st_size > 10_000
    assert list((folder / "plots").glob("*.png"))
    assert json.loads((folder / "summary.json").read_text())["outcomes"]["finished"] == len(
        list(read_records(folder / "records.jsonl"))
    )
    assert done.stderr == ""


def test_an_example_runs_by_its_name(url: str, tmp_path: Path) -> None:
    done = loadtest(
        "run",
        "closed",
        "--url",
        url,
        "--duration",
        "0.5",
        "--set",
        "warmup_s=0",
        "--out",
        "out",
        "--no-plots",
        at=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "scenario.json").read_text())["loop"] == "closed"
    assert not (tmp_path / "out" / "report.html").exists()


def test_ctrl_c_still_writes_the_report(url: str, tmp_path: Path) -> None:
    command = long_run(url, "kinds.0.output_tokens={choices: [2, 5000]}", "kinds.0.ignore_eos=true")
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as running:
        until(lambda: size(tmp_path / "out" / "records.jsonl") > 0, running)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=60)

    folder = tmp_path / "out"
    records = list(read_records(folder / "records.jsonl"))
    cut = [record for record in records if record.outcome == "unfinished"]
    assert running.returncode == 130
    assert "Interrupted" in output
    assert (folder / "report.html").exists()
    assert json.loads((folder / "summary.json").read_text())["requests"] == len(records)
    assert json.loads((folder / "ledger.json").read_text())["is_balanced"]
    assert json.loads((folder / "run.json").read_text())["sent"] == len(records)
    assert cut
    assert all(record.is_cut for record in cut)


def test_of_a_killed_run_a_report_can_still_be_made(url: str, tmp_path: Path) -> None:
    command = long_run(url, "kinds.0.output_tokens.constant=4")
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as running:
        until(lambda: size(tmp_path / "out" / "records.jsonl") > 0, running)
        running.kill()

    done = loadtest("report", "out", at=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "out/report.html"
    assert (tmp_path / "out" / "report.html").exists()


def test_a_server_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    began = time.monotonic()
    done = loadtest("run", "--url", "http://127.0.0.1:9/v1", at=tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith("penstock-loadtest: 127.0.0.1:9 can't be reached")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - began < 15  # a second, and what starting takes on a busy machine
    assert list(tmp_path.iterdir()) == []


def test_a_scenario_that_is_wrong_is_told_with_its_key(url: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("arrivals: {rat: 4}\n")
    wrong_key = loadtest("run", "mine.yaml", "--url", url, at=tmp_path)
    no_such = loadtest("run", "yours", "--url", url, at=tmp_path)

    assert (wrong_key.returncode, no_such.returncode) == (2, 2)
    assert "mine.yaml: arrivals: " in wrong_key.stderr
    assert "`rat`" in wrong_key.stderr
    assert "mixed" in no_such.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_trace_line_that_cannot_be_read_is_told_with_file_and_line(url: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(
        '{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]}\n{"timestamp": tomorrow}\n'
    )
    (tmp_path / "replay.yaml").write_text("trace: {format: mooncake, path: trace.jsonl}\n")

    done = loadtest("run", "replay.yaml", "--url", url, at=tmp_path)

    assert done.returncode == 2
    assert "trace.jsonl, line 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_violates_the_ledger_exits_1(tmp_path: Path) -> None:
    with fake_server_process(
        Behaviour(ttft_s=QUICK.ttft_s, gap_s=QUICK.gap_s, faults=[Fault(kind="double_finish", numbers=[3])])
    ) as fake:
        done = loadtest("run", "--url", fake.url, *SHORT, "--no-plots", "--out", "out", at=tmp_path)

    assert done.returncode == 1
    assert "does not balance" in done.stdout


def test_url_and_keys_come_from_the_environment_and_no_file_shows_a_key(tmp_path: Path) -> None:
    tenants = "[{name: a, key_env: KEY_A}, {name: b}]"
    with fake_server_process(
        Behaviour(ttft_s=QUICK.ttft_s, gap_s=QUICK.gap_s, keys={"sk-first": "a", "sk-second": "b"})
    ) as fake:
        keys = {"OPENAI_BASE_URL": fake.url, "OPENAI_API_KEY": "sk-second", "KEY_A": "sk-first"}
        done = loadtest("run", *SHORT, "--set", f"tenants={tenants}", "--out", "out", at=tmp_path, **keys)
        truths = fake.stop()

    assert done.returncode == 0, done.stderr
    assert {truth.tenant for truth in truths} == {"a", "b"}
    written = (
        b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()) + done.stdout.encode()
    )
    assert b"sk-first" not in written
    assert b"sk-second" not in written


def test_the_version_is_told(tmp_path: Path) -> None:
    assert loadtest("--version", at=tmp_path).stdout.strip() == version("penstock")
