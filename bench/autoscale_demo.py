"""A scaled pool under a bursty trace, seen from outside: `make demo-autoscale`.

    python -m bench.autoscale_demo [--record] [--out demo-autoscale]

Starts examples/autoscale/penstock.yaml, replays the bursts of examples/autoscale/load.yaml through `penstock-loadtest`,
asks /metrics for replicas, target and queue twice a second, and says every five seconds where it is; then what the
autoscaler did. Everything stays in OUT/load-TIME: the load tester's report.html, and autoscale.png with the replicas
over time; `--record` also writes docs/autoscale.png and bench/autoscale_demo.json. Ctrl-C ends all of it.
The exit status is 1 where a bound is missed (`wrongs`), with a sentence that says which.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx

from bench.support.autoscale_course import MOST, Course, Sample, course, draw, figures
from bench.support.platform_process import PlatformProcess, read_metric, running_platform
from bench.support.report import FOLDER, write_report
from penstock.cli.config import load_platform
from penstock_loadtest.scenario import load_scenario
from penstock_loadtest.workload.traces import read_trace

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "autoscale"
PICTURE = ROOT / "docs" / "autoscale.png"
POOL = "played"
PERIOD_S = 0.5
LINE_S = 5.0
"""Seconds between two lines about where the demo is."""
SHOWN = {
    "penstock_replicas": "replicas",
    "penstock_autoscale_target": "target",
    "penstock_queue_length": "queued",
    "penstock_waiting_sequences": "admitted",
    "penstock_running_sequences": "running",
}
SETTLE_S = 60.0
"""Seconds that the last superfluous replica gets to go after the load."""
STOP_S = 30.0
"""Seconds that the load tester gets to write its report when it is interrupted."""
LEAST_BURSTS = 6
LEAST_DOWNS = 6
LEAST_DELAY_S = 10.0
LONGEST_S = 600.0
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class Watch:
    """Samples of one pool's gauges, taken by a thread of its own."""

    def __init__(self, url: str, pool: str, on_sample: Callable[[Sample], None] | None = None) -> None:
        self.samples: list[Sample] = []
        self._url = f"{url}/metrics"
        self._pool = pool
        self._on_sample = on_sample
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
                if self._on_sample is not None:
                    self._on_sample(self.samples[-1])


def gauges(page: str, pool: str) -> dict[str, float]:
    found = {word: read_metric(page, name, pool=pool) for name, word in SHOWN.items()}
    return {word: value for word, value in found.items() if value is not None}


class Progress:
    """Lines about where the demo is, one every LINE_S: time, what comes, replicas, what waits."""

    def __init__(self, load: Path, planned_s: Sequence[float], say: Callable[[str], None]) -> None:
        """load: the load tester's folder. planned_s: when requests are sent, seconds after the load's begin."""
        self._load = load
        self._planned_s = planned_s
        self._say = say
        self._began_s: float | None = None
        self._said_s = 0.0

    def __call__(self, sample: Sample) -> None:
        if sample.unix_s < self._said_s + LINE_S:
            return
        if self._began_s is None:
            if not (self._load / "observed.jsonl").exists():
                return
            self._began_s = sample.unix_s  # to a second: the file is made when the load begins
        self._said_s = sample.unix_s
        self._say(progress_line(sample.unix_s - self._began_s, self._planned_s, sample.values))


def progress_line(at_s: float, planned_s: Sequence[float], values: dict[str, float]) -> str:
    rps = sum(at_s - LINE_S < each <= at_s for each in planned_s) / LINE_S
    seen = {word: values.get(word, 0.0) for word in SHOWN.values()}
    waiting = seen["queued"] + seen["admitted"]
    return (
        f"{at_s:5.0f} s of {planned_s[-1]:.0f}  {rps:4.1f} requests/s  replicas: {seen['replicas']:.0f}, wanted "
        f"{seen['target']:.0f}  requests: {seen['running']:.0f} running, {waiting:.0f} waiting"
    )


def run_load(
    platform: PlatformProcess, scenario: Path, settings: Sequence[str], out: Path, log: IO[bytes] | None = None
) -> int:
    """Run `penstock-loadtest run`; returns its exit status. log: takes what it says; None: this process' own output.

    What interrupts this interrupts the load tester, which leaves a report of what it has.
    """
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
    process = subprocess.Popen(
        command,
        env={"OPENAI_API_KEY": platform.key, "PATH": "/usr/bin:/bin"},
        stdout=log,
        stderr=log,
        start_new_session=True,  # a terminal's Ctrl-C reaches it once, from here
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def steps(values: Iterable[float]) -> list[int]:
    """The values without repeats."""
    found: list[int] = []
    for value in values:
        if not found or found[-1] != int(value):
            found.append(int(value))
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that somebody may write to, but for one that is not whole yet."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Outcome(NamedTuple):
    """What a run is judged by."""

    counts: Sequence[int]
    """Replicas over time, without repeats."""
    num_bursts: int
    num_downs: int
    """Scale-downs that the autoscaler carried out."""
    delay_s: float
    """The pool's scale_down_delay_s."""
    took_s: float
    """Seconds of the whole demo."""
    outcomes: Sequence[str]
    """How every request ended."""
    is_balanced: bool
    """Whether the load tester's ledger is clean."""

    @property
    def num_returns(self) -> int:
        """How often the pool came back to one replica."""
        return sum(before > now == 1 for before, now in pairwise(self.counts))


def wrongs(found: Outcome) -> list[str]:
    """Sentences about the bounds that a run missed; none where all is well."""
    lost = sorted(outcome for outcome in found.outcomes if outcome != "finished")
    went = " -> ".join(map(str, found.counts)) or "nowhere"
    bounds = [
        (found.num_bursts >= LEAST_BURSTS, f"the load had {found.num_bursts} bursts, fewer than {LEAST_BURSTS}"),
        (
            max(found.counts, default=0) == MOST,
            f"the pool had {max(found.counts, default=0)} replicas at most, not {MOST}",
        ),
        (
            found.num_downs >= LEAST_DOWNS,
            f"the autoscaler carried out {found.num_downs} scale-downs, fewer than {LEAST_DOWNS}",
        ),
        (
            found.num_returns >= LEAST_DOWNS and found.counts[-1] == 1,
            f"the pool came back to 1 replica {found.num_returns} times, not after {LEAST_DOWNS} bursts and at the "
            f"end; it went {went}",
        ),
        (found.delay_s >= LEAST_DELAY_S, f"scale_down_delay_s is {found.delay_s:g}, below {LEAST_DELAY_S:g}"),
        (found.took_s <= LONGEST_S, f"it took {found.took_s:.0f} s, more than {LONGEST_S:.0f}"),
        (not lost, f"{len(lost)} requests did not finish: {', '.join(sorted(set(lost)))}"),
        (bool(found.outcomes), "no request was sent"),
        (found.is_balanced, "the ledger of penstock-loadtest does not balance"),
    ]
    return [sentence for is_kept, sentence in bounds if not is_kept]


def load_began_s(load: Path) -> float:
    """Unix time at which the load in the folder `load` began."""
    return (load / "observed.jsonl").stat().st_mtime - float(
        read_lines(load / "observed.jsonl")[-1]["t_s"]
    )  # its last line was written at once


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


class Played(NamedTuple):
    """A run that came to its end."""

    run: Course
    outcome: Outcome


def play(load: Path, began_s: float) -> Played:
    """Start the platform, replay the trace and leave what was recorded in the folder `load`. began_s: monotonic time at
    which the demo began. Raises SystemExit where the load did not run to its end."""
    config = (EXAMPLE / "penstock.yaml").read_text(encoding="utf-8").replace("port: 8000", "port: {port}")
    trace = load_scenario(EXAMPLE / "load.yaml", []).trace
    assert trace is not None
    planned_s = [row.at_s for row in read_trace(trace)]
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        log = Path(folder) / "loadtest.log"
        with running_platform(Path(folder), config) as platform:
            print(
                f"the platform answers on {platform.url}; the load takes {planned_s[-1] / 60:.0f} minutes, and Ctrl-C "
                "ends it",
                flush=True,
            )
            progress = Progress(load, planned_s, lambda line: print(line, flush=True))
            with Watch(platform.url, POOL, progress).running() as watch, log.open("wb") as out:
                watch.wait_for_replicas(1, SETTLE_S)
                status = run_load(platform, EXAMPLE / "load.yaml", [], load, out)
                watch.wait_for_replicas(1, SETTLE_S)
            journal = read_lines(platform.state / "autoscale.jsonl")
        if not (load / "summary.json").exists():
            sys.exit(f"the load did not run to its end: {log.read_text(encoding='utf-8')[-2000:]}")
        shutil.copy(log, load / "loadtest.log")
    (load / "autoscale.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal), encoding="utf-8")
    tell(journal)
    records = read_lines(load / "records.jsonl")
    run = course(load_began_s(load), watch.samples, [row for row in records if row["model"] == POOL])
    return Played(
        run,
        Outcome(
            counts=steps(sample.values["replicas"] for sample in watch.samples if "replicas" in sample.values),
            num_bursts=len(run.bursts),
            num_downs=sum(line["outcome"] == "applied" and line["target"] < line["was"] for line in journal),
            delay_s=delay_s(),
            took_s=time.monotonic() - began_s,
            outcomes=[row.get("outcome", "unfinished") for row in records],
            is_balanced=status == 0,
        ),
    )


def delay_s() -> float:
    """The scale_down_delay_s of the example's scaled pool."""
    (scaled,) = (pool.autoscale for pool in load_platform(EXAMPLE / "penstock.yaml").pools if pool.name == POOL)
    assert scaled is not None
    return scaled.scale_down_delay_s


def conclude(played: Played, load: Path, *, is_record: bool) -> None:
    """Make the picture and the figures; only a run that went as it should is recorded."""
    draw(played.run, load / "autoscale.png")
    rows = figures(played.run, played.outcome.num_downs, played.outcome.took_s)
    write_report("autoscale_demo", rows, folder=FOLDER if is_record else load)
    if is_record:
        shutil.copy(load / "autoscale.png", PICTURE)
    outcomes = played.outcome.outcomes
    print(
        f"replicas {' -> '.join(map(str, played.outcome.counts))}; {outcomes.count('finished')} of {len(outcomes)} "
        f"requests finished\n{load / 'report.html'}\n{PICTURE if is_record else load / 'autoscale.png'}"
    )


@contextmanager
def ending_once() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt, and what ends then ends undisturbed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        print("stopping", flush=True)
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-autoscale"))
    parser.add_argument("--record", action="store_true", help="write docs/autoscale.png and bench/autoscale_demo.json")
    options = parser.parse_args()
    load = options.out / f"load-{time.strftime('%Y%m%d-%H%M%S')}"
    began_s = time.monotonic()
    try:
        with ending_once():
            played = play(load, began_s)
    except KeyboardInterrupt:
        print(f"interrupted: nothing runs any more{f'; {load} has what there is' if load.exists() else ''}")
        sys.exit(INTERRUPTED)
    except RuntimeError as error:  # the platform did not start
        sys.exit(str(error))
    wrong = wrongs(played.outcome)
    conclude(played, load, is_record=options.record and not wrong)
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
