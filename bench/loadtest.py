"""The load tester as an instrument: how light it is, and how far its figures are from what a fake server was programmed
to do.

    python -m bench.loadtest [--requests 100000] [--rate 320] [--accuracy-s 60]

Light: `penstock-loadtest run` on one core, the fake server on another, streams of 64 chunks. Memory is read while the
load runs, at shares of the requests that have ended. Accuracy: reported percentiles (ours) beside programmed ones
(rival), with and without a stall of 2 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from bench.support.accuracy import BEHAVIOUR, Measured, measure_accuracy, scenario, stalled
from bench.support.cpu import process_seconds
from bench.support.report import Row, write_report
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.process import FakeProcess, fake_server_process
from penstock_loadtest.scenario import Lengths

SERVER_CORE, TESTER_CORE = 0, 1
CHUNKS = 64
BEHAVIOUR_LIGHT = Behaviour(ttft_s=Lengths(constant=0.05), gap_s=Lengths(constant=0.01))
SHARES = (0.1, 0.5, 1.0)


class Sample(NamedTuple):
    ended: int
    rss_bytes: int
    cpu_s: float
    server_cpu_s: float
    at_s: float


class Light(NamedTuple):
    samples: list[Sample]
    summary: dict[str, Any]
    peak_bytes: int
    """Resident memory of the tester at its peak, over the whole run with its report."""


def run_tester(fake: FakeProcess, requests: int, rate: float, folder: Path) -> Light:
    """Run `penstock-loadtest run` from start to report, and measure what it takes."""
    load = {
        "duration_s": None,
        "requests": requests,
        "arrivals": {"process": "poisson", "rate": rate},
        "kinds": [{"prompts": {"tokens": {"constant": 64}}, "output_tokens": {"constant": CHUNKS}, "ignore_eos": True}],
    }
    (folder / "scenario.yaml").write_text(yaml.safe_dump(load), encoding="utf-8")
    out = folder / "run"
    command = [
        sys.executable,
        "-m",
        "penstock_loadtest.main",
        "run",
        str(folder / "scenario.yaml"),
        "--url",
        fake.url,
        "--out",
        str(out),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            os.sched_setaffinity(process.pid, {TESTER_CORE})
            samples = list(_samples(process, fake.pid, out / "records.jsonl"))
        finally:
            process.terminate()
            process.wait(60)
    if process.returncode or not (out / "summary.json").exists():
        raise RuntimeError(
            f"the tester ended with {process.returncode}:\n{(folder / 'log').read_text(errors='replace')[-3000:]}"
        )
    return Light(samples, json.loads((out / "summary.json").read_text()), max(sample.rss_bytes for sample in samples))


def _samples(process: "subprocess.Popen[bytes]", server_pid: int, records: Path) -> Iterator[Sample]:
    """Samples of CPU and memory, twice a second until the tester ends."""
    tester = psutil.Process(process.pid)
    ended = offset = 0
    while process.poll() is None:
        if records.exists():
            with records.open("rb") as file:
                file.seek(offset)
                while block := file.read(1 << 20):
                    ended, offset = ended + block.count(b"\n"), offset + len(block)
        try:
            yield Sample(
                ended,
                tester.memory_info().rss,
                process_seconds(process.pid),
                process_seconds(server_pid),
                time.perf_counter(),
            )
        except psutil.NoSuchProcess:
            return
        time.sleep(0.5)


def light_rows(light: Light, requests: int) -> list[Row]:
    """CPU and memory while requests ended; the last sample of that time stands for 100 %, before the summary and the
    plots are made."""
    loaded = [sample for sample in light.samples if 0 < sample.ended < requests] or light.samples
    span_s = loaded[-1].at_s - loaded[0].at_s
    at = [next((sample for sample in loaded if sample.ended >= share * requests), loaded[-1]) for share in SHARES]
    summary = light.summary
    return [
        Row(f"achieved rate, streams of {CHUNKS} chunks", summary["achieved_rate"], None, "requests/s"),
        Row("requests that did not finish", requests - summary["outcomes"]["finished"], None, "requests"),
        Row("lateness p99", 1e3 * summary["lateness"]["p99_s"], None, "ms"),
        Row("CPU of the tester, of one core", 100 * (loaded[-1].cpu_s - loaded[0].cpu_s) / span_s, None, "%"),
        Row(
            "CPU of the fake server, of one core",
            100 * (loaded[-1].server_cpu_s - loaded[0].server_cpu_s) / span_s,
            None,
            "%",
        ),
        *(
            Row(f"resident memory at {share:.0%} of {requests} requests", sample.rss_bytes / 2**20, None, "MiB")
            for share, sample in zip(SHARES, at, strict=True)
        ),
        Row("resident memory, most until the report is written", light.peak_bytes / 2**20, None, "MiB"),
    ]


def accuracy_rows(measured: Measured, case: str) -> list[Row]:
    rows = [
        Row(
            f"{each.name}, {case}: reported (ours), programmed (rival)",
            1e3 * each.reported_s,
            1e3 * each.programmed_s,
            "ms",
        )
        for each in measured.compared
    ]
    return [
        *rows,
        Row(
            f"worst difference, {case}, as a share of what is allowed (2 % or 1 ms)",
            100 * measured.worst.excess,
            None,
            "%",
        ),
    ]


def accuracy_note(measured: Measured, case: str) -> str:
    lateness_ms = 1e3 * (measured.summary.lateness.p99_s or 0.0)
    return (
        f"{case}: {measured.summary.requests} requests; p99 lateness of the tester {lateness_ms:.2f} ms, of the fake "
        "server's worst token of a request "
        f"{1e3 * measured.server_late_s:.2f} ms; worst figure: {measured.worst.name}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="of the run that measures lightness")
    parser.add_argument("--rate", type=float, default=320.0, help="requests a second of that run")
    parser.add_argument("--accuracy-s", type=float, default=60.0, help="duration of each accuracy run")
    args = parser.parse_args()
    rows: list[Row] = []
    notes: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        fake_server_process(BEHAVIOUR_LIGHT, core=SERVER_CORE) as fake,
    ):
        rows += light_rows(run_tester(fake, args.requests, args.rate, Path(folder)), args.requests)
    os.sched_setaffinity(0, {TESTER_CORE})
    cases = {"no stall": BEHAVIOUR, "stall of 2 s": stalled(BEHAVIOUR, from_s=args.accuracy_s / 2, for_s=2.0)}
    for case, behaviour in cases.items():
        measured = measure_accuracy(behaviour, scenario(40.0, args.accuracy_s), core=SERVER_CORE)
        rows += accuracy_rows(measured, case)
        notes.append(accuracy_note(measured, case))
    notes.append(f"offered: {args.rate:g} requests a second, Poisson; tester and fake server on a core each")
    write_report("loadtest", rows, notes=notes)


if __name__ == "__main__":
    main()
