"""The load tester beside a public one (aiperf): the same load, in turn, against the fake server and against the
platform.

    PENSTOCK_BENCH_TESTER=PYTHON PENSTOCK_BENCH_TOKENIZER=FOLDER python -m bench.testers [--against fake|platform|both]
    [--pairs 12]

PENSTOCK_BENCH_TESTER: a Python that has aiperf (a virtual environment of its own, `pip install aiperf==0.13.0`);
PENSTOCK_BENCH_TOKENIZER: a folder with the demo model's tokenizer as transformers reads it (tokenizer.json,
tokenizer_config.json, config.json).

Both testers run as commands of their own and send the same bodies; the fake server answers a prompt with the same
latencies whoever sends it, the platform gets prompts that it has not seen. Of each pair (order ABBA) the ratio ours /
theirs is taken of the medians of TTFT (from sending) and TPOT, and of the output tokens per second between the first
sending and the last token. Fails (status 1) when the 95 % interval of a ratio over all pairs is not within the bounds.
On a machine with two cores, 12 pairs take 12 minutes against the fake server and 13 against the platform; nothing else
may run.
"""

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.support.loopback import WORDS
from bench.support.platform_process import running_platform
from bench.support.report import Row, write_report
from bench.support.rival_tester import EXPORT, Load, Seen, configuration, read_export
from penstock_loadtest.results.intervals import Estimate, estimate_ratio
from penstock_loadtest.results.records import Record, read_records, write_json
from penstock_loadtest.scenario import load_scenario
from penstock_loadtest.workload.plan import draw_plan

MODEL = "demo"
FAKE = {
    "models": [MODEL],
    "drawn_by": "prompt",  # both testers send the same prompts, so they are served the same latencies
    "ttft_s": {"lognormal": [0.15, 0.4]},
    "gap_s": {"lognormal": [0.02, 0.03]},
}
PLATFORM = """
gateway: {{port: {port}}}
pools:
  - {{name: demo, model: demo, served_names: [demo], tier: edge, replicas: 2}}
"""
FAKE_LOADS = [
    Load("8 requests/s", requests=72, output_tokens=64, rate=8.0),
    Load("8 at a time", requests=56, output_tokens=64, at_once=8),
]
PLATFORM_LOADS = [Load("0.5 requests/s", requests=12, output_tokens=32, prompt_words=150, rate=0.5)]
"""An answer ends before the next begins: aiperf's work behind an answer would take a core from the next one's
prefill."""
FIELDS = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
"""Fields of every request, so that both testers send the same."""
RUN_S = 300.0


class Server(NamedTuple):
    name: str
    url: str
    """Address of the API, with /v1."""
    key: str
    bounds: tuple[float, float]
    """Least and largest ratio that every interval must lie within."""
    keeps_prompts: bool
    """Whether a prompt that it has seen is answered sooner: then no run repeats another's."""


class Figures(NamedTuple):
    """What a tester found in one run."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    cpu_ms: float
    """The tester's own, start and report by request, start included."""


FIGURES: dict[str, tuple[Callable[[Figures], float], str]] = {
    "TTFT p50": (lambda f: f.ttft_ms, "ms"),
    "TPOT p50": (lambda f: f.tpot_ms, "ms"),
    "throughput": (lambda f: f.tokens_per_s, "tokens/s"),
}


class Comparison(NamedTuple):
    """Runs of both, by pair."""

    server: Server
    load: Load
    ours: list[Figures]
    theirs: list[Figures]

    def ratio(self, figure: Callable[[Figures], float]) -> Estimate:
        """Quotient ours / theirs over the pairs, with its interval."""
        return estimate_ratio(
            [(figure(theirs), figure(ours)) for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        )


def prompts(seed: str, count: int, words: int) -> list[str]:
    """Texts of the same number of tokens (each word is one), different from their first words on."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def scenario(load: Load, prompts: Path) -> dict[str, object]:
    """The load as a scenario of ours."""
    pace: dict[str, object] = {"loop": "closed", "concurrency": load.at_once}
    if load.rate is not None:
        pace = {"loop": "open", "arrivals": {"process": "constant", "rate": load.rate}}
    kind = {
        "prompts": {"source": "corpus", "path": str(prompts)},
        "output_tokens": {"constant": load.output_tokens},
        "ignore_eos": True,
    }
    return {"name": "testers", "duration_s": None, "requests": load.requests, "kinds": [kind], **pace}


def seen(record: Record) -> Seen:
    """A record of our tester in the rival's terms. Raises RuntimeError when the request did not finish."""
    if record.outcome != "finished" or record.sent_s is None or record.first_s is None or record.tpot_s is None:
        raise RuntimeError(f"request {record.index} is {record.outcome}: {record.error}")
    return Seen(record.sent_s, record.chunk_s[-1], record.first_s - record.sent_s, record.tpot_s, record.tokens)


def figures(requests: Sequence[Seen], load: Load, cpu_s: float) -> Figures:
    """Raises RuntimeError unless all requests are there with all their tokens."""
    lengths = {request.tokens for request in requests}
    if len(requests) != load.requests or lengths != {load.output_tokens}:
        raise RuntimeError(
            f"{len(requests)} requests of {lengths} tokens were measured, not {load.requests} of {load.output_tokens}"
        )
    window_s = max(r.last_s for r in requests) - min(r.sent_s for r in requests)
    return Figures(
        ttft_ms=1e3 * statistics.median(r.ttft_s for r in requests),
        tpot_ms=1e3 * statistics.median(r.tpot_s for r in requests),
        tokens_per_s=sum(r.tokens for r in requests) / window_s,
        cpu_ms=1e3 * cpu_s / len(requests),
    )


def run(command: Sequence[str], key: str, log: Path) -> float:
    """CPU seconds of a command and what it started. Raises RuntimeError with the log's tail when it fails or takes
    longer than RUN_S."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OPENAI_API_KEY": key},
            start_new_session=True,
        ) as process,
    ):
        try:
            status = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it started
    if status:
        raise RuntimeError(
            f"{command[0]} ended with {status}:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Testers:
    """Runs either tester against one server, each run in a folder of its own."""

    def __init__(self, server: Server, folder: Path, rival: str, tokenizer: Path) -> None:
        self._server, self._folder, self._rival, self._tokenizer = server, folder, rival, tokenizer
        self._number = 0

    def ours(self, load: Load, seed: str) -> Figures:
        folder = self._prepare(load, seed)
        command = [sys.executable, "-m", "penstock_loadtest.main", "run", str(folder / "scenario.yaml"), "--no-plots"]
        cpu_s = run(
            [*command, "--url", self._server.url, "--out", str(folder / "run")], self._server.key, folder / "log"
        )
        return figures([seen(record) for record in read_records(folder / "run" / "records.jsonl")], load, cpu_s)

    def theirs(self, load: Load, seed: str) -> Figures:
        folder = self._prepare(load, seed)
        texts = folder / "in-order.jsonl"
        write_texts(texts, (str(planned.prompt) for planned in draw_plan(load_scenario(folder / "scenario.yaml", []))))
        settings = configuration(
            load,
            url=self._server.url,
            model=MODEL,
            prompts=texts,
            tokenizer=self._tokenizer,
            folder=folder / "run",
            fields=FIELDS,
        )
        write_json(folder / "aiperf.yaml", settings)
        cpu_s = run(
            [self._rival, "-m", "aiperf", "profile", "--config", str(folder / "aiperf.yaml")],
            self._server.key,
            folder / "log",
        )
        return figures(read_export(folder / "run" / EXPORT), load, cpu_s)

    def _prepare(self, load: Load, seed: str) -> Path:
        """A new folder with the scenario. What we plan from it, the rival sends in the same order: the last requests'
        lengths tell in the throughput."""
        self._number += 1
        folder = self._folder / f"{self._server.name.replace(' ', '-')}-{self._number}"
        folder.mkdir()
        write_texts(folder / "prompts.jsonl", prompts(seed, load.requests, load.prompt_words))
        write_json(folder / "scenario.yaml", scenario(load, folder / "prompts.jsonl"))
        return folder


def write_texts(path: Path, texts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def compare(testers: Testers, server: Server, load: Load, pairs: int) -> Comparison:
    """Pairs of runs, ours first in every other one."""
    comparison = Comparison(server, load, [], [])
    sides = [(testers.ours, comparison.ours, "ours"), (testers.theirs, comparison.theirs, "theirs")]
    for pair in range(pairs):
        for measure, found, side in sides if pair % 2 == 0 else sides[::-1]:
            found.append(measure(load, f"{load.name} {pair} {side if server.keeps_prompts else ''}"))
        print(
            f"{server.name}, {load.name}, {pair + 1} of {pairs}: ours {_short(comparison.ours[-1])}, aiperf "
            f"{_short(comparison.theirs[-1])}",
            file=sys.stderr,
        )
    return comparison


def _short(found: Figures) -> str:
    return (
        f"{found.ttft_ms:.2f} ms, {found.tpot_ms:.3f} ms, {found.tokens_per_s:.2f}/s, CPU {found.cpu_ms:.0f} ms a "
        "request"
    )


def rows(comparison: Comparison) -> list[Row]:
    where = f"{comparison.server.name}, {comparison.load.name}"
    low, high = comparison.server.bounds
    found: list[Row] = []
    for name, (figure, unit) in FIGURES.items():
        ratio = comparison.ratio(figure)
        found += [
            Row(f"{where}: {name}", _median(comparison.ours, figure), _median(comparison.theirs, figure), unit),
            Row(f"{where}: {name}, ratio by pairs", ratio.value, None, ""),
            Row(f"{where}: {name}, lower end of its 95 % interval (at least {low})", ratio.low, None, ""),
            Row(f"{where}: {name}, upper end of its 95 % interval (at most {high})", ratio.high, None, ""),
        ]
    cpu = [_median(side, lambda f: f.cpu_ms) for side in (comparison.ours, comparison.theirs)]
    return [*found, Row(f"{where}: CPU of the tester by request, its start and summary included", cpu[0], cpu[1], "ms")]


def _median(runs: list[Figures], figure: Callable[[Figures], float]) -> float:
    return statistics.median(figure(run) for run in runs)


def is_within(ratio: Estimate, bounds: tuple[float, float]) -> bool:
    """There is an interval, and it lies within the bounds."""
    return ratio.low is not None and ratio.high is not None and bounds[0] <= ratio.low and ratio.high <= bounds[1]


@contextmanager
def fake_server(folder: Path) -> Iterator[Server]:
    """The fake server in a process of its own."""
    write_json(folder / "fake.yaml", FAKE)
    command = [sys.executable, "-m", "penstock_loadtest.fake.server", "--config", str(folder / "fake.yaml")]
    with (
        (folder / "fake.log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the fake server did not start:\n{(folder / 'fake.log').read_text()[-3000:]}")
            yield Server("fake server", url, "none", (0.95, 1.05), keeps_prompts=False)
        finally:
            process.terminate()


@contextmanager
def platform(folder: Path) -> Iterator[Server]:
    """`penstock up` with the demo model on two replicas."""
    with running_platform(folder, PLATFORM) as process:
        yield Server("platform", f"{process.url}/v1", process.key, (0.93, 1.07), keeps_prompts=True)


SERVERS = {"fake": (fake_server, FAKE_LOADS), "platform": (platform, PLATFORM_LOADS)}


def measure(against: str, pairs: int, requests: int | None, rival: str, tokenizer: Path) -> list[Comparison]:
    """Every load of a server, after a short one of ours that is not counted."""
    start, loads = SERVERS[against]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, start(Path(folder)) as server:
        testers = Testers(server, Path(folder), rival, tokenizer)
        testers.ours(loads[0]._replace(requests=8), "warm up")
        return [
            compare(testers, server, load if requests is None else load._replace(requests=requests), pairs)
            for load in loads
        ]


def named(variable: str) -> str:
    """An environment variable that must be set. Raises SystemExit."""
    value = os.environ.get(variable)
    if not value:
        sys.exit(f"{variable} is not set: bench/testers.py says what it names.")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=[*SERVERS, "both"], default="both")
    parser.add_argument(
        "--pairs", type=int, default=12, help="runs of each tester with each load; fewer than 6 have no interval"
    )
    parser.add_argument("--requests", type=int, help="of a run (default: the load's own)")
    args = parser.parse_args()
    rival, tokenizer = named("PENSTOCK_BENCH_TESTER"), Path(named("PENSTOCK_BENCH_TOKENIZER"))
    servers = list(SERVERS) if args.against == "both" else [args.against]
    comparisons = [c for against in servers for c in measure(against, args.pairs, args.requests, rival, tokenizer)]
    verdicts = [
        is_within(comparison.ratio(figure), comparison.server.bounds)
        for comparison in comparisons
        for figure, _ in FIGURES.values()
    ]
    found = [row for comparison in comparisons for row in rows(comparison)]
    found.append(Row("intervals within their bounds (all of them)", sum(verdicts), len(verdicts), "intervals"))
    write_report(
        "testers",
        found,
        notes=[
            f"the rival is aiperf {version(rival)}; {args.pairs} pairs of each load, order ABBA",
            *map(describe, comparisons),
        ],
    )
    sys.exit(0 if all(verdicts) else 1)


def version(rival: str) -> str:
    """Version of aiperf under the Python `rival`."""
    return subprocess.run(
        [rival, "-c", "from importlib.metadata import version; print(version('aiperf'))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def describe(comparison: Comparison) -> str:
    load = comparison.load
    return (
        f"{comparison.server.name}, {load.name}: runs of {load.requests} chats of {load.prompt_words} words, "
        f"{load.output_tokens} tokens each"
    )


if __name__ == "__main__":
    main()
