"""A scaled pool under a step of load, seen from outside: `make demo-autoscale`.

    python -m bench.autoscale_demo [--record] [--out demo-autoscale] [--set arrivals.to_rate=10]

Starts examples/autoscale/penstock.yaml, loads it with examples/autoscale/load.yaml through `penstock-loadtest`, asks
/metrics for replicas, target and queue twice a second, and draws them over the offered load and TTFT. Prints what the
autoscaler did. Everything stays in OUT/load-TIME; `--record` also writes docs/autoscale.png and
bench/autoscale_demo.json.
The exit status is 1 unless the pool went from 1 replica up to 3 and down to 1, without a detour, every request
finished, and the ledger balances; what is wrong is said.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench.support.platform_process import PlatformProcess, read_metric, running_platform
from bench.support.report import FOLDER, Row, write_report

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "autoscale"
PICTURE = ROOT / "docs" / "autoscale.png"
POOL = "played"
PERIOD_S = 0.5
SHOWN = {
    "penstock_replicas": "replicas",
    "penstock_autoscale_target": "target",
    "penstock_queue_length": "queued",
    "penstock_waiting_sequences": "admitted",
    "penstock_running_sequences": "running",
}
MOST = 3
SETTLE_S = 60.0
"""Seconds that the last superfluous replica gets to go after the load."""
TTFT_TARGET_S = 1.0
"""Target of the time to first token in both files of the example."""


class Sample(NamedTuple):
    unix_s: float
    values: dict[str, float]
    """Value of each gauge, by its label in SHOWN."""


class Watch:
    """Samples of one pool's gauges, taken by a thread of its own."""

    def __init__(self, url: str, pool: str) -> None:
        self.samples: list[Sample] = []
        self._url = f"{url}/metrics"
        self._pool = pool
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    @contextmanager
    def running(self) -> Iterator["Watch"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def wait_for_replicas(self, count: int, within_s: float) -> bool:
        return self.wait_until(lambda values: values.get("replicas") == count, within_s)

    def wait_until(self, is_so: Callable[[dict[str, float]], bool], within_s: float) -> bool:
        """Wait until the latest sample satisfies `is_so`; False when that took longer than `within_s`."""
        deadline = time.monotonic() + within_s
        while not self.samples or not is_so(self.samples[-1].values):
            if time.monotonic() > deadline:
                return False
            time.sleep(PERIOD_S)
        return True

    def _run(self) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while not self._stop.wait(PERIOD_S):
                try:
                    self.samples.append(Sample(time.time(), gauges(client.get(self._url).text, self._pool)))
                except httpx.HTTPError:
                    continue


def gauges(page: str, pool: str) -> dict[str, float]:
    found = {word: read_metric(page, name, pool=pool) for name, word in SHOWN.items()}
    return {word: value for word, value in found.items() if value is not None}


def run_load(platform: PlatformProcess, scenario: Path, settings: Sequence[str], out: Path) -> int:
    """Run `penstock-loadtest run`; returns its exit status."""
    changed = [word for setting in settings for word in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "penstock_loadtest.main",
        "run",
        str(scenario),
        "--url",
        f"{platform.url}/v1",
        "--out",
        str(out),
        *changed,
    ]
    return subprocess.run(
        command, env={"OPENAI_API_KEY": platform.key, "PATH": "/usr/bin:/bin"}, check=False
    ).returncode


def steps(values: Iterable[float]) -> list[int]:
    """The values without repeats."""
    found: list[int] = []
    for value in values:
        if not found or found[-1] != int(value):
            found.append(int(value))
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def wrongs(counts: Sequence[int], outcomes: Iterable[str], is_balanced: bool) -> list[str]:
    """Sentences about what went wrong in a run; none where all is well. counts: replicas over time, without repeats.
    outcomes: of every request."""
    peak = counts.index(MOST) if MOST in counts else None
    is_hill = (
        peak is not None
        and counts[0] == counts[-1] == 1
        and list(counts) == sorted(set(counts[:peak])) + sorted(set(counts[peak:]), reverse=True)
    )
    lost = [outcome for outcome in outcomes if outcome != "finished"]
    found = (
        []
        if is_hill
        else [f"replicas went {' -> '.join(map(str, counts)) or 'nowhere'}, not from 1 up to {MOST} and down to 1"]
    )
    if lost:
        found.append(f"{len(lost)} requests did not finish: {', '.join(sorted(set(lost)))}")
    return found if is_balanced else [*found, "the ledger of penstock-loadtest does not balance"]


class Course(NamedTuple):
    """A run in figures; times are seconds since the load began."""

    at: "np.ndarray[Any, Any]"
    """Seconds at which the gauges were read."""
    shown: dict[str, "np.ndarray[Any, Any]"]
    """Values of each gauge at those seconds, by its label in SHOWN."""
    intended: "np.ndarray[Any, Any]"
    """Seconds at which requests were to be sent."""
    ttft: "np.ndarray[Any, Any]"


def load_began_s(load: Path) -> float:
    """Unix time at which the load in the folder `load` began."""
    return (load / "observed.jsonl").stat().st_mtime - float(
        read_lines(load / "observed.jsonl")[-1]["t_s"]
    )  # its last line was written at once


def course(load: Path, watch: Watch) -> Course:
    begin_s = load_began_s(load)
    records = [row for row in read_lines(load / "records.jsonl") if row["model"] == POOL]
    intended = np.array([row["intended_s"] for row in records])
    return Course(
        at=np.array([sample.unix_s - begin_s for sample in watch.samples]),
        shown={
            word: np.array([sample.values.get(word, np.nan) for sample in watch.samples]) for word in SHOWN.values()
        },
        intended=intended,
        ttft=np.array([row.get("first_s", np.nan) for row in records]) - intended,
    )


def figures(run: Course, begin_s: float, length_s: float) -> list[Row]:
    """Figures of a run before, during and behind the step of load. begin_s, length_s: of that step."""
    is_step = (run.intended >= begin_s) & (run.intended < begin_s + length_s)
    up_s = run.at[run.shown["replicas"] >= MOST][:1]
    down_s = run.at[(run.at > begin_s + length_s) & (run.shown["replicas"] == 1)][:1]
    return [
        Row("requests", len(run.ttft), None, ""),
        Row(
            f"step to {MOST} replicas that serve", round(float(up_s[0] - begin_s), 1) if len(up_s) else None, None, "s"
        ),
        Row(
            "end of the step to 1 replica",
            round(float(down_s[0] - begin_s - length_s), 1) if len(down_s) else None,
            None,
            "s",
        ),
        *[
            Row(f"TTFT {name}, p{percent}", _percentile(part, percent), None, "s")
            for name, part in _parts(run, is_step)
            for percent in (50, 99)
        ],
        Row(
            f"first tokens within {TTFT_TARGET_S:g} s",
            round(float(np.mean(run.ttft <= TTFT_TARGET_S)), 4),
            None,
            "share",
        ),
    ]


def _parts(run: Course, is_step: "np.ndarray[Any, Any]") -> "list[tuple[str, np.ndarray[Any, Any]]]":
    return [("in the step", run.ttft[is_step]), ("outside of it", run.ttft[~is_step])]


def _percentile(values: "np.ndarray[Any, Any]", percent: int) -> float | None:
    return round(float(np.nanpercentile(values, percent)), 3) if len(values) else None


def draw(run: Course, picture: Path) -> None:
    """Draw replicas, queue and TTFT over time into the file `picture`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (half a second that only this needs)

    at, shown, intended, ttft = run
    edges = np.arange(0.0, at.max() + 2.0, 2.0)

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    rate, replicas, queue, first = figure.subplots(4, 1, sharex=True, height_ratios=[1, 1.2, 1, 1.4])
    rate.stairs(np.histogram(intended, edges)[0] / 2.0, edges, fill=True, color="#a3acb5")
    rate.set_ylabel("requests/s")
    replicas.step(at, shown["target"], where="post", color="#e08e0b", linestyle="--", label="target of the autoscaler")
    replicas.step(at, shown["replicas"], where="post", color="#1f6fb5", linewidth=2.2, label="replicas that serve")
    replicas.set_yticks(range(MOST + 2))
    replicas.set_ylabel("replicas")
    replicas.legend(loc="upper right", frameon=False)
    queue.fill_between(
        at,
        shown["queued"] + shown["admitted"],
        step="post",
        color="#b93a1e",
        alpha=0.6,
        label="waiting, in the gateway or on a replica",
    )
    queue.step(at, shown["running"], where="post", color="#16806a", label="running on replicas")
    queue.set_ylabel("requests")
    queue.legend(loc="upper right", frameon=False)
    first.plot(intended, ttft, ".", color="#86bce4", markersize=3, label="one request")
    middle, p50, p99 = _percentiles(intended, ttft, edges)
    first.plot(middle, p50, color="#1f6fb5", label="p50")
    first.plot(middle, p99, color="#0b3660", label="p99 of 2 s")
    first.set_yscale("log")
    first.set_ylabel("TTFT, s")
    first.set_xlabel("seconds since the load began")
    first.set_xlim(0, edges[-1])
    first.legend(loc="upper right", frameon=False)
    for part in (rate, replicas, queue, first):
        part.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A timed pool under a step of load: 1, 3 and 1 replicas")
    figure.savefig(picture, dpi=110)


def _percentiles(
    at: "np.ndarray[Any, Any]", values: "np.ndarray[Any, Any]", edges: "np.ndarray[Any, Any]"
) -> tuple[list[float], list[float], list[float]]:
    middle, p50, p99 = [], [], []
    for begin, end in itertools.pairwise(edges):
        inside = values[(at >= begin) & (at < end) & ~np.isnan(values)]
        if len(inside):
            middle.append((begin + end) / 2)
            p50.append(float(np.percentile(inside, 50)))
            p99.append(float(np.percentile(inside, 99)))
    return middle, p50, p99


def tell(journal: list[dict[str, Any]]) -> None:
    begin = journal[0]["unix_s"] if journal else 0.0
    for line in journal:
        victims = f", {', '.join(line['victims'])} drains" if line["victims"] else ""
        states = f"{len(line['running'])} running, {line['starting']} starting, {line['stopping']} stopping"
        wait = "endless" if line["predicted_wait_s"] is None else f"{line['predicted_wait_s']:.2f} s"
        why = f"{line['reason']}; demand {line['demand']:.2f} replicas, {line['queued']} queued, predicted wait {wait}"
        print(
            f"{line['unix_s'] - begin:7.1f} s  {line['pool']}: {line['was']} -> {line['target']} "
            f"({line['outcome']}{victims}); {states}; {why}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-autoscale"))
    parser.add_argument("--record", action="store_true", help="write docs/autoscale.png and bench/autoscale_demo.json")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the load, as in penstock-loadtest",
    )
    options = parser.parse_args()
    config = (EXAMPLE / "penstock.yaml").read_text(encoding="utf-8").replace("port: 8000", "port: {port}")
    load = options.out / f"load-{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder,
        running_platform(Path(folder), config) as platform,
    ):
        print(f"the platform answers on {platform.url}; the load takes about three minutes", flush=True)
        with Watch(platform.url, POOL).running() as watch:
            watch.wait_for_replicas(1, SETTLE_S)
            status = run_load(platform, EXAMPLE / "load.yaml", options.settings, load)
            watch.wait_for_replicas(1, SETTLE_S)
        journal = read_lines(platform.state / "autoscale.jsonl")
    if not (load / "summary.json").exists():
        sys.exit("the load did not run to its end")
    (load / "autoscale.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal), encoding="utf-8")
    tell(journal)
    counts = steps(sample.values["replicas"] for sample in watch.samples if "replicas" in sample.values)
    outcomes = [row.get("outcome", "unfinished") for row in read_lines(load / "records.jsonl")]
    wrong = wrongs(counts, outcomes, is_balanced=status == 0)
    conclude(course(load, watch), load, is_record=options.record and not wrong)
    print(
        f"replicas {' -> '.join(map(str, counts))}; {outcomes.count('finished')} of {len(outcomes)} requests "
        f"finished; {load / 'report.html'}"
    )
    sys.exit("\n".join(wrong) or None)


def conclude(run: Course, load: Path, *, is_record: bool) -> None:
    """Make the picture and the figures; only a run that went as it should is recorded."""
    arrivals = json.loads((load / "scenario.json").read_text(encoding="utf-8"))["arrivals"]
    draw(run, load / "autoscale.png")
    write_report(
        "autoscale_demo", figures(run, arrivals["at_s"], arrivals["length_s"]), folder=FOLDER if is_record else load
    )
    if is_record:
        shutil.copy(load / "autoscale.png", PICTURE)
    print(PICTURE if is_record else load / "autoscale.png")


if __name__ == "__main__":
    main()
