"""Targets of seconds per token kept in a replica: what they cost in throughput, and what answers have without.

    python -m bench.tpot [--quick] [--only simulated|timed|engine]

One load, with `engine.keep_tpot` and without. Interactive requests come at 40 % of what the pool computes of them
alone, batch ones at another 90 %, which is 1.3 times what it holds; the interactive class has a target. Both capacities
are simulated, without targets. Steps take what the probe finds for the demo model on one core of this machine.
simulated: the simulator, long. timed: two platforms of two timed replicas each, which take turns. engine: two platforms
of one replica with the demo model itself, which take turns: a closed loop of 24 streams of the interactive class, and
the same beside a batch tenant's.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from bench.support.loopback import ChatClient, closed_loop
from bench.support.mixed_classes import BATCH, INTERACTIVE, Judged, Kind, draw_plan, find_capacity, play_plan
from bench.support.mixed_classes import simulate_plan as simulate
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.sim.config import SimulatedPool
from penstock.tenancy.tenants import Settings
from penstock.wire.frames import StepCosts
from penstock.wire.targets import ClassTargets, Target
from penstock.workers.config import EngineConfig, TimedConfig

TARGET = Target(ttft_s=2.0, tpot_s=0.06)
TARGETS = ClassTargets(interactive=TARGET)
INTERACTIVE_PART, OVERLOAD = 0.4, 1.3
"""Parts of the pool's capacity: of interactive requests, and of all."""
LEAD_S = 15.0
"""Time before measuring, until the batch backlog stands."""
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 24, 200, 48
"""The closed loop: streams, and tokens of a prompt and an answer."""
BATCH_STREAMS = 12
MAX_ROWS, BUDGET = 64, 512
NUM_BLOCKS = 4000
COST_NAMES = StepCosts.__struct_fields__[:5]
CONFIG = """
gateway: {{port: {port}}}
targets: {{interactive: {{ttft_s: TTFT, tpot_s: TPOT}}}}
pools:
  - name: paced
    model: demo
    served_names: [paced]
    replicas: REPLICAS
    engine: ENGINE
"""


def probe_costs() -> StepCosts:
    """What steps of the demo model take on one core. Raises RuntimeError where the probe fails."""
    settings = json.dumps({"threads": 1, "max_num_seqs": MAX_ROWS, "max_batched_tokens": BUDGET})
    command = [sys.executable, "-m", "bench.support.probed_costs", "demo", settings, "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the probe ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=StepCosts)


def read_costs(text: str) -> StepCosts:
    """Step costs of text like base_s=0.008,row_s=0.001. Raises ValueError."""
    return msgspec.convert(
        [float(dict(pair.split("=") for pair in text.split(",")).get(name, 0)) for name in COST_NAMES], StepCosts
    )


def timed_engine(costs: StepCosts, *, is_kept: bool) -> EngineConfig:
    """The engine of timed replicas with these costs."""
    timed = TimedConfig(
        base_s=costs.base_s,
        row_s=costs.row_s,
        prefill_token_s=costs.prefill_token_s,
        kv_token_s=costs.kv_token_s,
        num_blocks=NUM_BLOCKS,
    )
    return EngineConfig(
        runner="timed", max_num_seqs=MAX_ROWS, max_batched_tokens=BUDGET, keep_tpot=is_kept, timed=timed
    )


def make_pool(costs: StepCosts, *, is_kept: bool) -> SimulatedPool:
    return SimulatedPool("paced", "edge", 2, None, timed_engine(costs, is_kept=is_kept), TARGETS)


def find_rates(costs: StepCosts) -> dict[Kind, float]:
    """Requests a second of each kind, of which together come OVERLOAD times what the pool holds."""
    pool = make_pool(costs, is_kept=False)
    parts = {INTERACTIVE: INTERACTIVE_PART, BATCH: OVERLOAD - INTERACTIVE_PART}
    return {kind: part * find_capacity(kind, pool) for kind, part in parts.items()}


def run_simulated(costs: StepCosts, rates: Mapping[Kind, float], seconds: float) -> dict[bool, dict[str, Judged]]:
    """Judgements by class, with targets kept and without."""
    found: dict[bool, dict[str, Judged]] = {}
    for seed in range(3):
        plan = draw_plan(rates, LEAD_S + seconds, seed)
        for is_kept in (False, True):
            window = LEAD_S, LEAD_S + seconds
            judged = simulate(plan, make_pool(costs, is_kept=is_kept), window, TARGET, seed=seed)
            _add(found, is_kept, judged)
    return found


def run_timed(
    costs: StepCosts, rates: Mapping[Kind, float], seconds: float, rounds: int
) -> dict[bool, dict[str, Judged]]:
    """The same with platforms, which take turns."""
    found: dict[bool, dict[str, Judged]] = {}
    with ExitStack() as cleanup:
        loop = cleanup.enter_context(asyncio.Runner())
        clients = {}
        for is_kept in (False, True):
            engine = msgspec.json.encode(timed_engine(costs, is_kept=is_kept)).decode()
            platform = cleanup.enter_context(_platform(engine, 2))
            clients[is_kept] = loop.run(_make_clients(platform))
        for seed in range(rounds):
            plan = draw_plan(rates, LEAD_S + seconds, seed)
            for is_kept in (False, True):
                window = LEAD_S, LEAD_S + seconds
                _add(found, is_kept, loop.run(play_plan(plan, clients[is_kept], window, TARGET)))
                print(f"timed, kept: {is_kept}: {_brief(found[is_kept])}", file=sys.stderr, flush=True)
    return found


def run_engine(requests: int, rounds: int) -> dict[tuple[str, bool], Judged]:
    """The closed loop over the demo model, alone and beside batch streams; by that and by whether targets are kept."""
    found: dict[tuple[str, bool], Judged] = {}
    with ExitStack() as cleanup:
        loop = cleanup.enter_context(asyncio.Runner())
        clients = {}
        for is_kept in (False, True):
            engine = json.dumps({"max_num_seqs": MAX_ROWS, "max_batched_tokens": BUDGET, "keep_tpot": is_kept})
            platform = cleanup.enter_context(_platform(engine, 1))
            clients[is_kept] = loop.run(_make_clients(platform))
            loop.run(_run_closed(clients[is_kept], STREAMS, seed=99, num_batch=0))  # warm
        for seed in range(rounds):
            for name, num_batch in (("alone", 0), ("beside batch", BATCH_STREAMS)):
                for is_kept in (False, True):
                    more = loop.run(_run_closed(clients[is_kept], requests, seed=seed, num_batch=num_batch))
                    found.setdefault((name, is_kept), Judged(TARGET)).add(more)
                    brief = _brief({"interactive": found[name, is_kept]})
                    print(f"engine, {name}, kept: {is_kept}: {brief}", file=sys.stderr, flush=True)
    return found


async def _run_closed(clients: Mapping[str, ChatClient], requests: int, seed: int, num_batch: int) -> Judged:
    judged = Judged(TARGET)
    beside = asyncio.create_task(_stream_batch(clients["batch"], num_batch, seed)) if num_batch else None
    began_s = time.perf_counter()
    sizes = {"prompt_tokens": STREAM_PROMPT, "max_tokens": STREAM_TOKENS}
    answers = await closed_loop(clients["interactive"], streams=STREAMS, requests=requests, **sizes, seed=seed)
    judged.seconds = time.perf_counter() - began_s
    for answer in answers:
        judged.judge(answer.ttft_s, answer.arrivals)
        judged.tokens += len(answer.arrivals)
    if beside is not None:
        beside.cancel()
        judged.tokens += await beside
    return judged


async def _stream_batch(client: ChatClient, count: int, seed: int) -> int:
    """Streams of the batch class until it is cancelled. Returns how many tokens their whole answers had."""
    tokens = 0

    async def stream(number: int) -> None:
        nonlocal tokens
        for turn in range(1000):
            try:
                answers = await closed_loop(
                    client,
                    streams=1,
                    requests=1,
                    prompt_tokens=BATCH.prompt_tokens[1] // 2,
                    max_tokens=BATCH.output_tokens[1],
                    seed=hash((seed, number, turn)),
                )
                tokens += sum(len(answer.arrivals) for answer in answers)
            except* RuntimeError:  # refused: interactive streams left no row for as long as a request may wait
                await asyncio.sleep(1.0)

    with suppress(asyncio.CancelledError):
        await asyncio.gather(*(stream(number) for number in range(count)))
    return tokens


@contextmanager
def _platform(engine: str, replicas: int) -> Iterator[PlatformProcess]:
    texts = {
        "TTFT": f"{TARGET.ttft_s:g}",
        "TPOT": f"{TARGET.tpot_s:g}",
        "REPLICAS": str(replicas),
        "ENGINE": engine.replace("{", "{{").replace("}", "}}"),
    }
    config = CONFIG
    for name, text in texts.items():
        config = config.replace(name, text)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), config) as platform,
    ):
        yield platform


async def _make_clients(platform: PlatformProcess) -> dict[str, ChatClient]:
    """Clients by class, each of a tenant of its own."""
    classes = [kind.service_class for kind in (INTERACTIVE, BATCH)]
    keys = await make_keys(platform, {name: Settings(service_class=name) for name in classes})
    return {name: ChatClient(platform.url, "paced", key, extra={"ignore_eos": True}) for name, key in keys.items()}


def _add(found: dict[bool, dict[str, Judged]], is_kept: bool, judged: Mapping[str, Judged]) -> None:
    for name, each in judged.items():
        found.setdefault(is_kept, {}).setdefault(name, Judged(each.target)).add(each)


def _brief(judged: Mapping[str, Judged]) -> str:
    first = judged["interactive"]
    tokens = sum(each.tokens_per_s for each in judged.values())
    return f"{100 * first.share:.1f} % in target {dict(first.outcomes)}, {tokens:.0f} tokens/s"


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def rows_of_mixed(part: str, found: Mapping[bool, Mapping[str, Judged]]) -> list[Row]:
    """Figures with targets kept, and as today, which is the rival."""
    kept, today = found[True], found[False]
    ours, theirs = kept["interactive"], today["interactive"]
    rows = [
        Row(f"{part}: interactive in target", 100 * ours.share, 100 * theirs.share, "%"),
        Row(f"{part}: interactive within TPOT", 100 * ours.tpot_share, 100 * theirs.tpot_share, "%"),
    ]
    rows += _rows_of_times(part, ours, theirs)
    total = [sum(each.tokens_per_s for each in judged.values()) for judged in (kept, today)]
    rows.append(Row(f"{part}: output of both classes", total[0], total[1], "tokens/s"))
    rows.append(Row(f"{part}: output of batch", kept["batch"].tokens_per_s, today["batch"].tokens_per_s, "tokens/s"))
    return rows


def rows_of_engine(found: Mapping[tuple[str, bool], Judged]) -> list[Row]:
    rows = []
    for name in ("alone", "beside batch"):
        part = f"demo model, {STREAMS} streams {name}"
        ours, theirs = found[name, True], found[name, False]
        rows += [
            Row(f"{part}: within TPOT", 100 * ours.tpot_share, 100 * theirs.tpot_share, "%"),
            *_rows_of_times(part, ours, theirs),
            Row(f"{part}: output of all", ours.tokens_per_s, theirs.tokens_per_s, "tokens/s"),
        ]
    return rows


def _rows_of_times(part: str, ours: Judged, theirs: Judged) -> list[Row]:
    rows = []
    for name, field, quantiles in (
        ("TPOT", "tpot_s", (0.5, 0.99)),
        ("inter-token", "gaps_s", (0.5, 0.9, 0.99)),
        ("TTFT", "ttft_s", (0.5, 0.9, 0.99)),
    ):
        for q in quantiles:
            values = [1e3 * quantile(getattr(each, field), q) for each in (ours, theirs)]
            rows.append(Row(f"{part}: {name} p{100 * q:g}", values[0], values[1], "ms"))
    return rows


def _count(part: str, found: Mapping[bool, Mapping[str, Judged]]) -> str:
    kept, today = (dict(found[is_kept]["interactive"].outcomes) for is_kept in (True, False))
    return f"{part}, interactive requests: {kept}, as today {today}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter; few requests make the shares coarse")
    parser.add_argument("--only", choices=("simulated", "timed", "engine"), help="one of the three parts")
    parser.add_argument(
        "--costs",
        type=read_costs,
        help="what steps take, like base_s=0.008,row_s=0.0013,prefill_token_s=0.0008, instead of what the probe finds: "
        "for a machine that is not at rest",
    )
    args = parser.parse_args()
    parts = (args.only,) if args.only else ("simulated", "timed", "engine")
    rows: list[Row] = []
    notes: list[str] = []
    if parts != ("engine",):
        costs = args.costs or probe_costs()
        rates = find_rates(costs)
        notes.append(
            "a step: "
            + ", ".join(f"{name} {value:.3g}" for name, value in msgspec.structs.asdict(costs).items() if value)
        )
        notes.append(
            "requests a second: " + ", ".join(f"{kind.service_class} {rate:.2f}" for kind, rate in rates.items())
        )
        print(*notes, sep="\n", file=sys.stderr, flush=True)
    if "simulated" in parts:
        simulated = run_simulated(costs, rates, 120.0 if args.quick else 600.0)
        rows += rows_of_mixed("simulated", simulated)
        notes.append(_count("simulated", simulated))
    if "timed" in parts:
        timed = run_timed(costs, rates, 30.0 if args.quick else 60.0, 1 if args.quick else 4)
        rows += rows_of_mixed("timed", timed)
        notes.append(_count("timed", timed))
    if "engine" in parts:
        rows += rows_of_engine(run_engine(48 if args.quick else 144, 1 if args.quick else 3))
    write_report("tpot", rows, notes=notes, variant="_".join(filter(None, ("quick" if args.quick else "", args.only))))


if __name__ == "__main__":
    main()
