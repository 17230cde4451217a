"""Record what a real gateway reports to the autoscaler while its pool is loaded: the material of test_actuator.

    python -m tests.e2e.record_reports [--out tests/e2e/reports.jsonl.gz]

Starts examples/autoscale/penstock.yaml, loads it with tests/e2e/step.yaml through `penstock-loadtest`
(SETTINGS: calm, a step, calm again), and reads the gateway's report from the platform's Redis as often as one is
written. Four minutes; a pool that plays a GPU, so any machine will do. What is written is `recorded.Line`s as JSON,
gzipped: numbers only, replicas by number.
"""

import argparse
import gzip
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import redis

from bench.autoscale_demo import EXAMPLE, POOL, SETTLE_S, Watch, load_began_s, run_load
from bench.support.platform_process import running_platform
from penstock.wire.scaling import GATEWAYS_KEY, REPORT_S, GatewayReport, decode_report, report_key
from tests.e2e.recorded import BEGIN_S, DURATION_S, LENGTH_S, RECORDING, Line

STEP = Path(__file__).with_name("step.yaml")
SETTINGS = (
    "arrivals.rate=0.3",
    "arrivals.to_rate=7",
    f"arrivals.at_s={BEGIN_S:g}",
    f"arrivals.length_s={LENGTH_S:g}",
    f"duration_s={DURATION_S:g}",
)


class Reader:
    """Every report of the one gateway, with the Unix time when it was read, taken by a thread of its own."""

    def __init__(self, url: str) -> None:
        self.reports: list[tuple[float, GatewayReport]] = []
        self._client = redis.Redis.from_url(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader")

    @contextmanager
    def running(self) -> Iterator["Reader"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()
            self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(REPORT_S / 4):
            report = self._latest()
            if report is not None and (not self.reports or report.number != self.reports[-1][1].number):
                self.reports.append((time.time(), report))

    def _latest(self) -> GatewayReport | None:
        for name in cast(set[bytes], self._client.smembers(GATEWAYS_KEY)):
            data = cast(bytes | None, self._client.get(report_key(name.decode())))
            if data is not None:
                return decode_report(data)
        return None


def lines(reports: list[tuple[float, GatewayReport]], began_s: float) -> Iterator[Line]:
    """Lines of the load's time. Replicas are numbered in the order in which they first appear, and the names of their
    runs are left out."""
    names: dict[str, str] = {}
    for unix_s, report in reports:
        rows = [row for row in report.replicas if row.pool == POOL]
        for row in rows:
            names.setdefault(row.replica_id, str(len(names)))
        if 0 <= unix_s - began_s < DURATION_S:
            loads = [
                msgspec.structs.replace(
                    row, replica_id=names[row.replica_id], load=msgspec.structs.replace(row.load, epoch="")
                )
                for row in rows
            ]
            (pool,) = (row for row in report.pools if row.pool == POOL)
            yield Line(
                round(unix_s - began_s, 2),
                msgspec.structs.replace(pool, oldest_wait_s=round(pool.oldest_wait_s, 3)),
                loads,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORDING)
    options = parser.parse_args()
    config = (EXAMPLE / "penstock.yaml").read_text(encoding="utf-8").replace("port: 8000", "port: {port}")
    with (
        tempfile.TemporaryDirectory(prefix="penstock-record-") as name,
        running_platform(Path(name), config) as platform,
    ):
        load = Path(name) / "load"
        with Watch(platform.url, POOL).running() as watch:
            watch.wait_for_replicas(1, SETTLE_S)
        with Reader(platform.redis_url).running() as reader:
            status = run_load(platform, STEP, SETTINGS, load)
        if status:
            sys.exit(f"the load ended with {status}: nothing is recorded")
        found = list(lines(reader.reports, load_began_s(load)))
    options.out.write_bytes(gzip.compress(b"".join(msgspec.json.encode(line) + b"\n" for line in found), mtime=0))
    sys.stderr.write(f"{len(found)} reports, {options.out.stat().st_size / 1000:.0f} KB in {options.out}\n")


if __name__ == "__main__":
    main()
