"""A scaled pool under a step of load, seen from outside: `make demo-autoscale`.

    python -m bench.autoscale [--out demo-autoscale] [--picture docs/autoscale.png] [--set arrivals.to_rate=10]

Starts examples/autoscale/penstock.yaml, loads it with examples/autoscale/load.yaml through `penstock-loadtest` (its report stays in OUT/load), asks
/metrics for replicas, target and queue twice a second, and draws them over the offered load and TTFT. Prints what the autoscaler did. The exit
status is 1 unless the pool went from 1 replica to 3 and back, every request finished, and the ledger balances.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench.platform_process import PlatformProcess, running_platform

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "autoscale"
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
"""For the second replica to go after the load."""


class Seen(NamedTuple):
    unix_s: float
    values: dict[str, float]
    """By the words of SHOWN."""


class Watch:
    """Samples of one pool's gauges, taken by a thread of its own."""

    def __init__(self, url: str, pool: str) -> None:
        self.samples: list[Seen] = []
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
        deadline = time.monotonic() + within_s
        while not self.samples or self.samples[-1].values.get("replicas") != count:
            if time.monotonic() > deadline:
                return False
            time.sleep(PERIOD_S)
        return True

    def _run(self) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while not self._stop.wait(PERIOD_S):
                try:
                    self.samples.append(Seen(time.time(), gauges(client.get(self._url).text, self._pool)))
                except httpx.HTTPError:
                    continue


def gauges(page: str, pool: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples if family.name in SHOWN else ():
            if sample.labels.get("pool") == pool:
                found[SHOWN[family.name]] = found.get(SHOWN[family.name], 0.0) + sample.value
    return found


def run_load(platform: PlatformProcess, scenario: Path, settings: Sequence[str], out: Path) -> int:
    """`penstock-loadtest run`; its exit status."""
    changed = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "penstock_loadtest.main", "run", str(scenario), "--url", f"{platform.url}/v1", "--out", str(out), *changed]
    return subprocess.run(command, env={"OPENAI_API_KEY": platform.key, "PATH": "/usr/bin:/bin"}, check=False).returncode


def steps(values: Iterable[float]) -> list[int]:
    """The values without repeats."""
    found: list[int] = []
    for value in values:
        if not found or found[-1] != int(value):
            found.append(int(value))
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def draw(load: Path, watch: Watch, picture: Path) -> None:
    """Replicas, queue and TTFT over time."""
    from matplotlib.figure import Figure  # half a second that only this needs

    begin_s = (load / "observed.jsonl").stat().st_mtime - read_lines(load / "observed.jsonl")[-1]["t_s"]
    at = np.array([seen.unix_s - begin_s for seen in watch.samples])
    shown = {word: np.array([seen.values.get(word, np.nan) for seen in watch.samples]) for word in SHOWN.values()}
    records = [row for row in read_lines(load / "records.jsonl") if row["model"] == POOL]
    intended = np.array([row["intended_s"] for row in records])
    ttft = np.array([row.get("first_s", np.nan) for row in records]) - intended
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
    queue.fill_between(at, shown["queued"] + shown["admitted"], step="post", color="#b93a1e", alpha=0.6, label="waiting, in the gateway or on a replica")
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
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _percentiles(at: "np.ndarray[Any, Any]", values: "np.ndarray[Any, Any]", edges: "np.ndarray[Any, Any]") -> tuple[list[float], list[float], list[float]]:
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
        why = f"{line['reason']}; demand {line['demand']:.2f}, {line['queued']} queued, predicted wait {line['predicted_wait_s'] or 0:.2f} s"
        print(f"{line['unix_s'] - begin:7.1f} s  {line['pool']}: {line['was']} -> {line['target']} ({line['outcome']}{victims}); {states}; {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-autoscale"))
    parser.add_argument("--picture", type=Path, default=Path("docs/autoscale.png"))
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a setting of the load, as in penstock-loadtest")
    options = parser.parse_args()
    config = (EXAMPLE / "penstock.yaml").read_text(encoding="utf-8").replace("port: 8000", "port: {port}")
    load = options.out / f"load-{time.strftime('%Y%m%d-%H%M%S')}"
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder, running_platform(Path(folder), config) as platform:
        print(f"the platform answers on {platform.url}; the load takes about three minutes", flush=True)
        with Watch(platform.url, POOL).running() as watch:
            status = run_load(platform, EXAMPLE / "load.yaml", options.settings, load)
            is_back = watch.wait_for_replicas(1, SETTLE_S)
        journal = read_lines(platform.state / "autoscale.jsonl")
    (load / "autoscale.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal), encoding="utf-8")
    draw(load, watch, options.picture)
    tell(journal)
    counts = steps(seen.values["replicas"] for seen in watch.samples if "replicas" in seen.values)
    unfinished = [row["outcome"] for row in read_lines(load / "records.jsonl") if row.get("outcome", "unfinished") != "finished"]
    print(f"replicas {' -> '.join(map(str, counts))}; {len(unfinished)} requests did not finish; the books {'balance' if status == 0 else 'DO NOT balance'}")
    print(f"{load / 'report.html'}\n{options.picture}")
    if status or unfinished or not is_back or max(counts) != MOST or counts[0] != 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
