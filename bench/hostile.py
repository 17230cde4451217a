"""Hostile tenants and strangers beside innocent ones: does anybody notice? Attacks on the real platform, over two timed
replicas.

    python -m bench.hostile [--only NAME ...] [--seconds 15] [--tree CHECKOUT] [--list | --markdown]

One tenant has 16 streams, another sends 2 new requests a second. Beside them an attacker, a process of its own with a
bounded share of a core, makes one attack after the other: with the key of a tenant of 60 requests a minute, or without
one. Before each attack the innocent are measured alone. An attack is withstood when no request of the innocent fails,
their gaps' p99 and the new requests' p99 to the first token are at most twice those without it or 50 ms, no gap is
above 250 ms, the gateway's memory stays within 256 MiB of its start and is back within 64 MiB 30 s later, and the
attacker was refused or cut and caused no error of the server's. Where all that it sends is within its limits (`Attack.
is_allowed`), it need not be refused: it gets its share.

--tree measures the platform of another checkout with the same attacks, for the column `before` of bench/hostile.json;
each run replaces the attacks that it made in its own column, and leaves everything else.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from bench.support.cpu import process_seconds
from bench.support.hostile_attacks import ATTACKS, Attack
from bench.support.hostile_client import LEFT, Outcome, Target
from bench.support.hostile_load import InnocentLoad, Observations, Seen
from bench.support.platform_process import PlatformProcess, penstock, running_platform, timed_platform
from bench.support.report import FOLDER, commit, hardware

MODEL = "sim"
CONFIG = (
    timed_platform(
        "max_num_seqs: 64, max_batched_tokens: 512, timed: {base_s: 0.020, row_s: 0.00005, prefill_token_s: 0.00002, "
        "num_blocks: 8192, max_model_len: 8192}"
    )
    + 'telemetry: {{otlp_endpoint: "http://127.0.0.1:9", sample_ratio: 0.0}}\n'
)
STREAM_TENANT, NEW_TENANT = "streams", "newcomers"
ATTACKER_LIMIT = 60
"""Requests a minute of the attackers that have a key."""
QUIET_S = 5.0
"""Time before each attack in which the innocent are measured alone, seconds."""
SETTLE_S = 30.0
"""Time after an attack at whose end the gateway's memory is compared, seconds."""
FLOOR_S, MOST_GAP_S = 0.050, 0.250
PEAK_BYTES, LEFT_BYTES = 256 * 2**20, 64 * 2**20
SAMPLE_S = 0.05
Column = Literal["now", "before"]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The innocent in one span of time. Times in milliseconds; None where nothing was seen."""

    gap_p50_ms: float | None
    gap_p99_ms: float | None
    gap_max_ms: float | None
    ttft_p99_ms: float | None
    num_gaps: int
    num_new: int
    failures: tuple[str, ...]
    client_lag_ms: float
    """Longest pause of the measuring client itself."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One attack on one tree."""

    quiet: Figures
    attacked: Figures
    start_bytes: int
    """Memory of the gateway before the attack."""
    peak_bytes: int
    """Most memory of the gateway from then on."""
    left_bytes: int
    """Memory of the gateway 30 s after the attack."""
    replica_growth_bytes: int
    """Most memory that one replica gained."""
    gateway_cpu_s: float
    attacker: Outcome
    is_gateway_alive: bool
    commit: str
    seconds: float

    def faults(self, *, is_allowed: bool = False) -> list[str]:
        """Ways in which the attack was not withstood, each as a few words; none if it was. is_allowed: the attacker
        need not be refused."""
        quiet, attacked = self.quiet, self.attacked
        refused = [code for code in self.attacker.tally if is_refusal(code)]
        broken = [code for code in self.attacker.tally if code.startswith("5") and code != "503"]
        checks = {
            f"{len(attacked.failures)} requests failed": not attacked.failures,
            "gap p99": is_within(attacked.gap_p99_ms, quiet.gap_p99_ms),
            "gap max": attacked.gap_max_ms is not None and attacked.gap_max_ms <= 1e3 * MOST_GAP_S,
            "TTFT p99": is_within(attacked.ttft_p99_ms, quiet.ttft_p99_ms),
            "memory": self.peak_bytes - self.start_bytes <= PEAK_BYTES,
            "memory 30 s later": self.left_bytes - self.start_bytes <= LEFT_BYTES,
            "the gateway died": self.is_gateway_alive,
            "the attacker was not refused": is_allowed or bool(refused) or LEFT in self.attacker.tally,
            f"the attacker got {', '.join(broken)}": not broken,
        }
        return [fault for fault, is_fine in checks.items() if not is_fine]


class Record(msgspec.Struct, kw_only=True):
    """The content of bench/hostile.json: each attack's result on both trees, and the verdict on the present one."""

    name: str = "hostile"
    time: str = ""
    commit: str = ""
    hardware: dict[str, str | int] = {}
    command: str = ""
    attacks: dict[str, dict[Column, Result]] = {}
    faults: dict[str, list[str]] = {}
    """Faults of the present tree by attack; an empty list: the attack is withstood."""


def is_refusal(code: str) -> bool:
    return code in ("cut", "refused", "503") or code.startswith("4")


def is_within(value_ms: float | None, quiet_ms: float | None) -> bool:
    """Whether a figure is at most twice that without the attack, or 50 ms."""
    return value_ms is not None and value_ms <= max(2 * (quiet_ms or 0.0), 1e3 * FLOOR_S)


def quantile(values: Sequence[float], q: float) -> float | None:
    """A quantile of values; None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def figures(seen: Observations, begin_s: float, end_s: float) -> Figures:
    """What was seen in a span of time, by time.perf_counter; a gap or a failed request counts if any of it lies in the
    span, a new request if it was due there."""

    def in_ms(spans: Iterable[Seen]) -> list[float]:
        return [1e3 * span.seconds for span in spans]

    def round_ms(value: float | None) -> float | None:
        return None if value is None else round(value, 1)

    gaps = in_ms(gap for gap in seen.gaps if gap.touches(begin_s, end_s))
    waits = in_ms(wait for wait in seen.waits if begin_s <= wait.began_s < end_s)
    lags = in_ms(lag for lag in seen.lags if lag.touches(begin_s, end_s))
    return Figures(
        gap_p50_ms=round_ms(quantile(gaps, 0.5)),
        gap_p99_ms=round_ms(quantile(gaps, 0.99)),
        gap_max_ms=round_ms(quantile(gaps, 1)),
        ttft_p99_ms=round_ms(quantile(waits, 0.99)),
        num_gaps=len(gaps),
        num_new=len(waits),
        failures=tuple(failure.what for failure in seen.failures if failure.span.touches(begin_s, end_s)),
        client_lag_ms=round(max(lags, default=0.0), 1),
    )


# processes


def memory(pid: int) -> int:
    """Resident bytes of a process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def stream_ports(platform: PlatformProcess) -> tuple[int, ...]:
    """Ports of replicas to which gateways are connected."""
    listening: set[int] = set()
    for pid in platform.replicas:
        listening |= {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"}
    reached = {c.raddr.port for pid in platform.gateways for c in psutil.Process(pid).net_connections("tcp") if c.raddr}
    return tuple(sorted(listening & reached))


class MemoryWatch:
    """Most memory of the gateway and of each replica since the start of the watch."""

    def __init__(self, gateway: int, replicas: Sequence[int]) -> None:
        self.gateway = gateway
        self.start = memory(gateway)
        self.peak = self.start
        self._replicas = {pid: memory(pid) for pid in replicas}
        self.replica_growth = 0

    async def run(self) -> None:
        while True:
            self.peak = max(self.peak, memory(self.gateway))
            for pid, start in self._replicas.items():
                self.replica_growth = max(self.replica_growth, memory(pid) - start)
            await asyncio.sleep(SAMPLE_S)


# tenants


def tenant_of(attack: str) -> str:
    """Each attack has a tenant of its own, whose limits nothing has used yet."""
    return f"attacker-{attack}"


def new_keys(names: Iterable[str]) -> dict[str, str]:
    return {name: f"sk-penstock-{os.urandom(24).hex()}" for name in names}


async def make_tenants(platform: PlatformProcess, keys: dict[str, str]) -> None:
    """Tenants with these keys: without limits the innocent, of 60 requests a minute the others."""
    none = {"requests_per_minute": 0, "tokens_per_minute": 0, "max_parallel": 0}
    tenants = [
        {"name": name, "keys": [key]}
        | (none if name in (STREAM_TENANT, NEW_TENANT) else {"requests_per_minute": ATTACKER_LIMIT})
        for name, key in keys.items()
    ]
    path = platform.state / "tenants.json"
    path.write_text(json.dumps({"tenants": tenants}), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *penstock("tenant", "apply", str(path), "--state", str(platform.state))
    )
    if await process.wait():
        raise RuntimeError("the tenants could not be made")


# measuring


class Bench:
    """The innocent, and one attack after the other."""

    def __init__(self, platform: PlatformProcess, keys: dict[str, str], seconds: float, tree_commit: str) -> None:
        self._platform, self._keys, self._seconds, self._commit = platform, keys, seconds, tree_commit
        self._load = InnocentLoad(platform.url, MODEL, keys[STREAM_TENANT], keys[NEW_TENANT])

    async def run(self, names: Sequence[str], on_result: Callable[[str, Result], None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(self._load.run())
            await asyncio.sleep(QUIET_S)  # connections are made, code is warm
            for name in names:
                on_result(name, await self._measure(name))
            load.cancel()

    async def _measure(self, name: str) -> Result:
        process = await self._attacker(name)
        quiet_s = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        gateway = self._platform.gateways[0]
        watch = MemoryWatch(gateway, self._platform.replicas)
        watching = asyncio.create_task(watch.run())
        cpu_s, begin_s = process_seconds(gateway), time.perf_counter()
        outcome = await self._attack(process)
        end_s = time.perf_counter()
        cpu_s = process_seconds(gateway) - cpu_s
        await asyncio.sleep(SETTLE_S)
        watching.cancel()
        return Result(
            quiet=figures(self._load.seen, quiet_s, begin_s),
            attacked=figures(self._load.seen, begin_s, end_s),
            start_bytes=watch.start,
            peak_bytes=watch.peak,
            left_bytes=memory(gateway),
            replica_growth_bytes=watch.replica_growth,
            gateway_cpu_s=round(cpu_s, 3),
            attacker=outcome,
            is_gateway_alive=memory(gateway) > 0,
            commit=self._commit,
            seconds=round(end_s - begin_s, 1),
        )

    async def _attacker(self, name: str) -> asyncio.subprocess.Process:
        """A process that is ready to attack."""
        url = urlsplit(self._platform.url)
        target = Target(
            host=url.hostname or "127.0.0.1",
            port=url.port or 80,
            key=self._keys.get(tenant_of(name), ""),
            model=MODEL,
            stream_ports=stream_ports(self._platform),
            seconds=self._seconds,
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.support.hostile_attacks", name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(target) + b"\n")
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the attacker {name} did not start")
        return process

    async def _attack(self, process: asyncio.subprocess.Process) -> Outcome:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"go\n")
        try:
            async with asyncio.timeout(self._seconds + 30):
                outcome = msgspec.json.decode(await process.stdout.read(), type=Outcome)
                await process.wait()
                return outcome
        finally:
            with suppress(ProcessLookupError):
                process.kill()


# results


def faults_of(name: str, result: Result) -> list[str]:
    return result.faults(is_allowed=ATTACKS[name].is_allowed)


def read_record(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record) if path.exists() else Record()


def write_record(path: Path, record: Record) -> None:
    record.time = datetime.now(UTC).isoformat(timespec="seconds")
    record.commit = commit()
    record.hardware = hardware()
    record.command = "python -m bench.hostile"
    record.attacks = {name: record.attacks[name] for name in ATTACKS if name in record.attacks}
    record.faults = {name: faults_of(name, sides["now"]) for name, sides in record.attacks.items() if "now" in sides}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def print_record(record: Record, names: Iterable[str]) -> None:
    """The table: both columns of each attack, `before / now`."""
    table = Table(title="hostile: before / now, beside 16 streams and 2 new requests a second")
    for heading in ("attack", "gap p99 ms", "max ms", "TTFT p99 ms", "failed", "memory MiB", "30 s later", "attacker"):
        table.add_column(heading, justify="left" if heading in ("attack", "attacker") else "right")
    table.add_column("faults")
    for name in names:
        sides = record.attacks.get(name, {})
        pair = [sides.get("before"), sides.get("now")]
        last = pair[1] or pair[0]
        if last is None:
            continue
        table.add_row(
            name,
            _both(pair, lambda r: _ms(r.attacked.gap_p99_ms)),
            _both(pair, lambda r: _ms(r.attacked.gap_max_ms)),
            _both(pair, lambda r: _ms(r.attacked.ttft_p99_ms)),
            _both(pair, lambda r: str(len(r.attacked.failures))),
            _both(pair, lambda r: _mib(r.peak_bytes - r.start_bytes)),
            _both(pair, lambda r: _mib(r.left_bytes - r.start_bytes)),
            ", ".join(f"{count} {code}" for code, count in sorted(last.attacker.tally.items()))
            + f", {last.attacker.cpu_s / last.attacker.seconds:.2f} cores",
            "; ".join(faults_of(name, last)) or "none",
        )
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


def print_markdown(record: Record) -> None:
    """The table of BENCHMARKS.md: both columns of each attack, `before / now`, or the one that was measured."""
    print("| attack | gap p99, max | TTFT p99 | failed | memory, 30 s later | the attacker got | withstood |")
    print("|---|---|---|---|---|---|---|")
    for name, sides in record.attacks.items():
        pair = [sides[column] for column in ("before", "now") if column in sides]
        last = pair[-1]
        tally = sorted(last.attacker.tally.items(), key=lambda each: -each[1])
        cells = (
            f"{name}: {ATTACKS[name].what}",
            _both(pair, lambda r: f"{_ms(r.attacked.gap_p99_ms)}, {_ms(r.attacked.gap_max_ms)}"),
            _both(pair, lambda r: _ms(r.attacked.ttft_p99_ms)),
            _both(pair, lambda r: str(len(r.attacked.failures))),
            _both(pair, lambda r: f"{_mib(r.peak_bytes - r.start_bytes)}, {_mib(r.left_bytes - r.start_bytes)}"),
            ", ".join(f"{count} {code}" for code, count in tally),
            _both(pair, lambda r, name=name: "no" if faults_of(name, r) else "yes"),  # type: ignore[misc]
        )
        print(f"| {' | '.join(cells)} |")


def _both(pair: Sequence[Result | None], shown: Callable[[Result], str]) -> str:
    return " / ".join("-" if result is None else shown(result) for result in pair)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f}"


def chosen(only: Sequence[str]) -> dict[str, Attack]:
    """The attacks of these names; all without a name. Raises SystemExit for a name that is none."""
    unknown = [name for name in only if name not in ATTACKS]
    if unknown:
        raise SystemExit(f"there is no attack {', '.join(unknown)}; there are: {', '.join(ATTACKS)}")
    return {name: attack for name, attack in ATTACKS.items() if not only or name in only}


def commit_of(tree: Path) -> str:
    """Hash of the commit that is checked out there; `unknown` where git knows none."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def switch_tree(tree: Path) -> None:
    """Begin again with the platform of another checkout, and this one's bench."""
    if not (tree / ".src" / "penstock").exists():
        raise SystemExit(f"{tree} is no checkout: it has no .src/penstock")
    here = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tree.resolve()}/.src:{here}", "PENSTOCK_BENCH_TREE": str(tree)}
    os.execve(sys.executable, [sys.executable, "-m", "bench.hostile", *sys.argv[1:]], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these attacks alone")
    parser.add_argument(
        "--seconds",
        type=float,
        default=15.0,
        help="length of an attack, longer than the time that a gateway waits for a head",
    )
    parser.add_argument("--tree", type=Path, help="checkout whose platform is measured, as `before`")
    parser.add_argument("--list", action="store_true", help="list the attacks")
    parser.add_argument("--markdown", action="store_true", help="print the record's table, and measure nothing")
    parser.add_argument("--output", type=Path, default=FOLDER / "hostile.json", help=argparse.SUPPRESS)
    args = parser.parse_args()
    attacks = chosen(args.only)
    if args.list:
        for name, attack in attacks.items():
            print(f"{name:20} {'' if attack.has_key else 'without a key: '}{attack.what}")
        return
    if args.markdown:
        print_markdown(read_record(args.output))
        return
    if args.tree is not None and "PENSTOCK_BENCH_TREE" not in os.environ:
        switch_tree(args.tree)
    column: Column = "now" if args.tree is None else "before"
    tree_commit = commit() if args.tree is None else commit_of(args.tree)
    record = read_record(args.output)

    def keep(name: str, result: Result) -> None:
        record.attacks.setdefault(name, {})[column] = result
        write_record(args.output, record)
        print(f"{name}: {'; '.join(faults_of(name, result)) or 'withstood'}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), CONFIG) as platform,
    ):
        keys = new_keys([STREAM_TENANT, NEW_TENANT, *(tenant_of(name) for name in attacks if attacks[name].has_key)])

        async def run() -> None:
            await make_tenants(platform, keys)
            await Bench(platform, keys, args.seconds, tree_commit).run(list(attacks), keep)

        asyncio.run(run())
    print_record(record, attacks)


if __name__ == "__main__":
    main()
