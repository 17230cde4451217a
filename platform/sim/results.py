"""What a simulation leaves: the folder of a run of the load tester, with its records, summary and report, and
`simulation.json` with what only a simulation knows.

    scenario.json, target.json, records.jsonl, observed.jsonl, run.json, summary.json, ledger.json, plots/, report.html
    autoscale.jsonl   the autoscaler's decisions, as production writes them
    simulation.json   replica-seconds, decisions by reason, every replica's life
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.autoscale.journal import Journal
from penstock.base.errors import ConfigError
from penstock.router.config import GatewayConfig
from penstock.sim.config import SimulatedPool, SimulationConfig, check_pool
from penstock.sim.content import SegmentMaker
from penstock.sim.fleet import ReplicaLife
from penstock.sim.request import SimulatedRequest
from penstock.sim.simulation import Simulation
from penstock.wire.errors import Overloaded, RateLimited
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.report.page import write_report
from penstock_loadtest.results.ledger import check_ledger
from penstock_loadtest.results.records import Outcome, Record, RecordWriter, read_records, write_json
from penstock_loadtest.results.series import Observed
from penstock_loadtest.results.summary import Summary, summarize
from penstock_loadtest.scenario import Scenario, to_tree
from penstock_loadtest.workload.plan import draw_plan


class SimulationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a simulation that its records don't hold. Times are seconds of the simulation."""

    ended_s: float
    replica_seconds: dict[str, float]
    """Seconds for which replicas were paid for, from asked for to gone, by pool."""
    max_replicas: dict[str, int]
    """Most replicas at once that were paid for, by pool."""
    sources: dict[str, str]
    """Where the step times are from, by pool, as their tables say."""
    settings: SimulationConfig
    replicas: list[ReplicaLife]


class Simulated(NamedTuple):
    folder: Path
    summary: Summary
    facts: SimulationFacts


def simulate(
    scenario: Scenario,
    pools: list[SimulatedPool],
    gateway: GatewayConfig,
    config: SimulationConfig,
    folder: Path,
    *,
    plots: bool = True,
) -> Simulated:
    """Run the load and leave everything in the folder. plots: whether report.html is made. Raises ConfigError and
    ScenarioInvalid for what can't be simulated, TraceInvalid, and ConfigError for a folder that holds a run already."""
    _check(scenario, pools, folder)
    model = ", ".join(pool.name for pool in pools)
    observed: list[Observed] = []
    folder.mkdir(parents=True, exist_ok=True)
    with RecordWriter(folder / "records.jsonl", flush_every=1 << 20) as records:
        simulation = Simulation(
            pools,
            gateway,
            config,
            lambda request: records.write(make_record(request, model)),
            observed.append,
            Journal(folder / "autoscale.jsonl"),
            has_tenants=len(scenario.tenants) > 1,
        )
        simulation.run(draw_plan(scenario, SegmentMaker), scenario.timeout_s, scenario.drain_s)
        if not records.count:
            raise ScenarioInvalid("Nothing was sent: no request of the scenario is due within its duration.")
    facts = _facts(simulation, config, pools)
    _write_notes(folder, scenario, model, observed, facts)
    summary = summarize(read_records(folder / "records.jsonl"), scenario)
    write_json(folder / "summary.json", summary)
    write_json(folder / "ledger.json", check_ledger(read_records(folder / "records.jsonl"), [], exact=True))
    if plots:
        write_report(folder)
    return Simulated(folder, summary, facts)


def make_record(request: SimulatedRequest, model: str) -> Record:
    """The load tester's record of a request that is over."""
    planned, seq = request.planned, request.seq
    times: list[float] = np.round(request.token_times_s, 6).tolist()
    outcome, status = _outcome(request)
    return Record(
        index=planned.index,
        intended_s=round(request.at_s, 6),
        sent_s=round(request.at_s, 6),
        first_s=times[0] if times and planned.stream else None,
        end_s=None if request.end_s is None else round(request.end_s, 6),
        chunk_s=times if planned.stream else times[-1:],
        chunk_tokens=[1] * len(times) if planned.stream else [len(times)] * bool(times),
        outcome=outcome,
        status=status,
        error=None if request.error is None else str(request.error),
        finish_reason="length" if outcome == "finished" else None,
        prompt_tokens=None if seq is None else request.num_prompt_tokens,
        cached_tokens=None if seq is None else seq.num_cached_tokens,
        tokens=len(times),
        tokens_from="ids",
        metered_tokens=len(times) if outcome == "finished" else None,
        wanted_tokens=planned.max_tokens,
        is_whole=not planned.stream,
        tenant=planned.tenant,
        kind=planned.kind,
        model=planned.model or model,
        endpoint=planned.endpoint,
        session=planned.session,
        turn=planned.turn,
        tier=request.tier,
        tier_reason=request.tier_reason,
        replica=request.replica,
        predicted_ttft_s=request.predicted_ttft_s,
    )


def _outcome(request: SimulatedRequest) -> tuple[Outcome, int | None]:
    """The outcome and the HTTP status that a gateway would have answered with."""
    error = request.error
    if isinstance(error, RateLimited):
        return "shed", 429
    if isinstance(error, Overloaded):
        return "shed", 503
    if error is not None:
        return "failed", 400
    if request.is_cancelled:
        return "cancelled", 200
    return ("finished", 200) if request.is_finished else ("unfinished", None)


def _check(scenario: Scenario, pools: list[SimulatedPool], folder: Path) -> None:
    for pool in pools:
        check_pool(pool)
    if scenario.loop != "open":
        raise ScenarioInvalid(f"loop is {scenario.loop}; the simulator plays open loops.")
    if (folder / "records.jsonl").exists():
        raise ConfigError(f"{folder} holds a run already; name another folder")
    sizes = {pool.tier: pool.engine.block_size for pool in pools}
    if any(sizes[pool.tier] != pool.engine.block_size for pool in pools):
        raise ConfigError("pools of one tier must share engine.block_size, as they do where they share a served name")


def _facts(simulation: Simulation, config: SimulationConfig, pools: list[SimulatedPool]) -> SimulationFacts:
    lives = list(simulation.fleet.lives.values())
    seconds = {pool.name: 0.0 for pool in pools}
    for life in lives:
        seconds[life.pool] += life.seconds(simulation.now)
    return SimulationFacts(
        ended_s=round(simulation.now, 6),
        replica_seconds={name: round(value, 3) for name, value in seconds.items()},
        max_replicas={pool.name: _most_at_once([life for life in lives if life.pool == pool.name]) for pool in pools},
        sources=simulation.fleet.sources(),
        settings=config,
        replicas=lives,
    )


def _most_at_once(lives: list[ReplicaLife]) -> int:
    changes = sorted(_changes(lives))
    count = most = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most


def _changes(lives: list[ReplicaLife]) -> Iterator[tuple[float, int]]:
    for life in lives:
        yield life.asked_s, 1
        if life.ended_s is not None:
            yield life.ended_s, -1


def _write_notes(
    folder: Path, scenario: Scenario, model: str, observed: list[Observed], facts: SimulationFacts
) -> None:
    write_json(folder / "scenario.json", to_tree(scenario))
    target = {"url": "simulated", "model": model, "exact": True}
    target |= {"simulated": _describe_facts(facts), "command": _make_command(facts.settings)}
    write_json(folder / "target.json", target)
    write_json(folder / "run.json", {"ended": "", "is_interrupted": False, "turns_not_sent": 0, "plan_error": None})
    write_json(folder / "simulation.json", facts)
    encode = msgspec.json.Encoder().encode
    (folder / "observed.jsonl").write_bytes(b"".join(encode(each) + b"\n" for each in observed))


def _describe_facts(facts: SimulationFacts) -> str:
    """What stood for a server, for the reader of the report."""
    pools = "; ".join(
        f"{name}: at most {facts.max_replicas[name]} modelled replicas, {seconds / 3600:.2f} replica-hours, step "
        f"times: {facts.sources[name]}"
        for name, seconds in facts.replica_seconds.items()
    )
    return f"No server answered. {pools}."


def _make_command(settings: SimulationConfig) -> str:
    """The command that plays scenario.yaml again on the same penstock.yaml."""
    default = SimulationConfig()
    options = {
        "--seed": (settings.seed, default.seed),
        "--start": (settings.start_s, default.start_s),
        "--start-jitter": (settings.start_jitter, default.start_jitter),
        "--model-error": (settings.model_error, default.model_error),
    }
    changed = [f"{name} {value:g}" for name, (value, usual) in options.items() if value is not None and value != usual]
    if settings.tier_policy is not default.tier_policy:
        changed.append(f"--tier-policy {settings.tier_policy}")
    if settings.faults:
        changed.append("--faults faults.yaml")
    return " ".join(["penstock simulate scenario.yaml --config penstock.yaml --out FOLDER", *changed])
