"""A plan's load, simulated: the pool that it proposes, as modelled replicas under the platform's own queue and routing.

The step times are the plan's own, so this tests its queueing, not its roofline: percentiles, bursts of a trace, waits.
"""

import tempfile
from pathlib import Path

import msgspec

from penstock.base.errors import ConfigError
from penstock.cli.plan.make import Plan
from penstock.cli.plan.traces import find_format
from penstock.perf.planning.roofline import StepTimes
from penstock.router.config import GatewayConfig
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.results import Simulated, simulate
from penstock.workers.config import EngineConfig, TimedConfig
from penstock.workers.engine.timed import StepTable
from penstock_loadtest.errors import LoadtestError
from penstock_loadtest.scenario import Scenario, load_scenario

DURATION_S = 120
ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL_TOKENS = (0, 64, 256, 1024, 4096, 8192)
KV_TOKENS = (0, 4096, 32768, 262144, 2097152)


def simulate_plan(plan: Plan, trace: Path | None, out: Path, duration_s: float = DURATION_S) -> Simulated:
    """Play the load against as many replicas as the plan proposes. out: the folder of the run. Raises ConfigError."""
    best = plan.best
    if best is None or best.times is None or best.bounds is None or best.replicas is None or best.full is None:
        raise ConfigError("nothing serves this load, so there is nothing to simulate")
    with tempfile.TemporaryDirectory() as folder:
        table, load = Path(folder) / "steps.json", Path(folder) / "load.yaml"
        table.write_bytes(msgspec.json.encode(make_table(best.times, plan.found.shape.name)))
        load.write_bytes(msgspec.yaml.encode(make_scenario(plan, trace, duration_s, best.full.rate_rps)))
        engine = EngineConfig(
            runner="timed",
            max_num_seqs=best.bounds.max_rows,
            max_batched_tokens=best.bounds.max_batched_tokens,
            timed=TimedConfig(
                table=str(table),
                num_blocks=best.bounds.kv_tokens // 16,
                max_model_len=plan.question.context_tokens,
            ),
        )
        pool = SimulatedPool("planned", "cloud", best.replicas, None, engine)
        try:
            scenario: Scenario = load_scenario(load, [])
            return simulate(scenario, [pool], GatewayConfig(), SimulationConfig(), out, plots=False)
        except LoadtestError as error:
            raise ConfigError(str(error)) from error


def make_table(times: StepTimes, name: str) -> StepTable:
    """Step times on a grid, as a timed runner reads them; attention to a prompt's own tokens is in the grid."""
    pairs = 1000.0
    per_pair = times(rows=0, prefill_tokens=1, query_context=2 * pairs, kv_tokens=0)
    per_pair -= times(rows=0, prefill_tokens=1, query_context=pairs, kv_tokens=0)
    seconds = [
        [
            [
                times(rows=rows, prefill_tokens=tokens, query_context=tokens * tokens / 2, kv_tokens=kv * min(1, rows))
                if rows + tokens
                else 0.0
                for kv in KV_TOKENS
            ]
            for tokens in PREFILL_TOKENS
        ]
        for rows in ROWS
    ]
    return StepTable(
        list(ROWS), list(PREFILL_TOKENS), list(KV_TOKENS), seconds, per_pair / pairs, 0.0, f"penstock plan, {name}"
    )


def make_scenario(plan: Plan, trace: Path | None, duration_s: float, full_rps: float) -> dict[str, object]:
    """The load for the load tester: the trace itself, or Poisson arrivals of equal requests."""
    load, targets = plan.question.load, plan.question.targets
    kind: dict[str, object] = {"endpoint": "completions", "ignore_eos": True}
    scenario: dict[str, object] = {"duration_s": duration_s, "drain_s": 600, "timeout_s": 600}
    limits = {name: value for name, value in targets._asdict().items() if value < 1e9}
    if limits:
        scenario["targets"] = limits
    if trace is not None:
        longest = plan.question.context_tokens // 2
        cut = {"max_prompt_tokens": longest, "max_output_tokens": longest}
        scenario["trace"] = {"format": find_format(trace), "path": str(trace.absolute()), "end_s": duration_s, **cut}
        return {**scenario, "kinds": [kind]}
    prompt = round(load.prompt_tokens + load.cached_tokens)
    kind |= {
        "prompts": {"source": "tokens", "tokens": {"constant": prompt}},
        "output_tokens": {"constant": max(1, round(load.output_tokens))},
    }
    return {**scenario, "arrivals": {"process": "poisson", "rate": load.rate_rps or full_rps}, "kinds": [kind]}


def describe(found: Simulated, replicas: int) -> str:
    """What came of it, in a sentence."""
    summary = found.summary
    share = summary.goodput.share
    within = "" if share is None else f"{100 * share:.1f} % within the targets, "
    return (
        f"Simulated with {replicas} replica{'s' if replicas > 1 else ''}: {summary.requests} requests, {within}"
        f"TTFT p50 {_ms(summary.ttft_s.p50)}, p99 {_ms(summary.ttft_s.p99)}; "
        f"TPOT p50 {_ms(summary.tpot_s.p50)}, p99 {_ms(summary.tpot_s.p99)}."
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
