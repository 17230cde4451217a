"""Attainment and replica-hours of the autoscaler on Azure's traces of 2023, simulated, beside fixed numbers of
replicas.

    python -m bench.scaling_simulated --traces FOLDER [--trace conv] [--utilisation 0.7] [--delay 120] [--seeds 2]

FOLDER has AzureLLMInferenceTrace_conv.csv and _code.csv. Replicas of the class of an 8B model on an A10, assumed and
not measured: 2,500 prompt tokens a second, steps of 22 ms and 0.8 ms a row, 32 rows, 60 s to start (+- 30 %). In target
is a request whose first token came within 2 s and what its prompt takes alone, the others within 150 ms each. The first
five minutes do not count; replicas do from when they are asked for.
"""

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from penstock.autoscale.config import AutoscaleConfig
from penstock.router.config import GatewayConfig
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.results import Simulated, simulate
from penstock.workers.config import EngineConfig, TimedConfig
from penstock_loadtest.results.records import Record, read_records
from penstock_loadtest.scenario import Scenario, Trace

PROMPT_TOKENS_S = 2500.0
TTFT_S, TPOT_S = 2.0, 0.15
WARM_UP_S = 300.0
FIRST_REPLICAS = 8
STATIC = {"conv": (8, 10, 12, 14), "code": (8, 12, 16, 20)}
ENGINE = EngineConfig(
    runner="timed",
    max_num_seqs=32,
    max_batched_tokens=512,
    timed=TimedConfig(
        base_s=0.022, row_s=0.0008, prefill_token_s=1 / PROMPT_TOKENS_S, num_blocks=6000, max_model_len=16384
    ),
)


class Result(NamedTuple):
    attained: float
    hours: float
    most: int


def play(trace: Path, replicas: int, autoscale: AutoscaleConfig | None, seed: int) -> Result:
    """The figures of one run."""
    scenario = Scenario(duration_s=None, trace=Trace(format="azure", path=trace))
    pool = SimulatedPool("pool", "cloud", replicas, autoscale, ENGINE)
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(
            scenario, [pool], GatewayConfig(), SimulationConfig(seed=seed), Path(folder) / "run", plots=False
        )
        judged = [
            is_in_target(record)
            for record in read_records(found.folder / "records.jsonl")
            if record.intended_s >= WARM_UP_S
        ]
    return Result(sum(judged) / len(judged), count_hours(found), found.facts.max_replicas["pool"])


def is_in_target(record: Record) -> bool:
    if record.outcome != "finished" or record.ttft_s is None:
        return False
    is_soon = record.ttft_s <= TTFT_S + (record.prompt_tokens or 0) / PROMPT_TOKENS_S
    return is_soon and (record.tpot_s is None or record.tpot_s <= TPOT_S)


def count_hours(found: Simulated) -> float:
    """Replica-hours behind the warm-up."""
    ended_s = found.facts.ended_s
    ends = ((life.asked_s, ended_s if life.ended_s is None else life.ended_s) for life in found.facts.replicas)
    return sum(max(0.0, end_s - max(WARM_UP_S, asked_s)) for asked_s, end_s in ends) / 3600


def show(name: str, replicas: str, seed: int, result: Result) -> None:
    print(
        f"{name}, {replicas}, seed {seed}: {100 * result.attained:.2f} % in target, {result.hours:.2f} replica-hours, "
        f"at most {result.most}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--trace", choices=sorted(STATIC), action="append")
    parser.add_argument("--utilisation", type=float, default=AutoscaleConfig().target_utilisation)
    parser.add_argument("--delay", type=float, default=AutoscaleConfig().scale_down_delay_s)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    scaled = AutoscaleConfig(
        max_replicas=40,
        start_s=60.0,
        ttft_target_s=TTFT_S,
        target_utilisation=options.utilisation,
        scale_down_delay_s=options.delay,
    )
    for name in options.trace or sorted(STATIC):
        path = options.traces / f"AzureLLMInferenceTrace_{name}.csv"
        for count in STATIC[name]:
            show(name, f"{count} fixed", 0, play(path, count, None, 0))
        for seed in range(options.seeds):
            show(name, "scaled", seed, play(path, FIRST_REPLICAS, scaled, seed))


if __name__ == "__main__":
    main()
