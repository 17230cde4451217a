"""The simulator's own speed, and its choices of a replica beside those of the whole search: `make bench-simulator`.

    python -m bench.simulator --traces FOLDER [--rounds 3]

FOLDER (or PENSTOCK_TEST_DATA) has the traces, see docs/testing.md. Speed: requests a minute of CPU, the fastest of the
rounds, of simulated replicas as `bench.autoscaling.replicas` has them: Azure's conversations of 2023, all of them in
their own time on 8 replicas, and Mooncake's conversations with prefix cache, at 0.7 of what 8 replicas would take with
one endless cache. Choices: what the gateway decides with its shortlist in C++, at every decision beside the search
through all replicas, on loads of the routing contest.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from random import Random

from bench.autoscaling.replicas import ENGINE, TTFT_S
from bench.routing.loads import Load, load_loads, mean_work_s
from bench.support.compared_decisions import ComparedDecisions
from bench.support.report import Row, write_report
from penstock.autoscale.journal import Journal
from penstock.base.errors import ConfigError
from penstock.router.config import GatewayConfig
from penstock.router.replicas.routing_policy import RoutingPolicy, production
from penstock.router.routing.native_search import open_search
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.request import SimulatedRequest
from penstock.sim.simulation import Simulation
from penstock_loadtest.planned import Planned
from penstock_loadtest.workload.traces import read_azure

CONVERSATIONS = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
SPEED_REPLICAS = 8
GOALS = {"Azure conversation": 200_000, "Mooncake conversation": 20_000}
"""Requests a minute of a core."""
PART = 0.7
SECONDS = 900.0
COMPARED = ("conversation", "groups")
COMPARED_REPLICAS = (8, 64)
COMPARED_SECONDS = 240.0
TIMEOUT_S = 120.0
LEAST_ANSWERED = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = os.environ.get("PENSTOCK_TEST_DATA")
    parser.add_argument("--traces", type=Path, default=traces and Path(traces), required=traces is None)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        plans = {
            "Azure conversation": read_conversations(options.traces / CONVERSATIONS),
            "Mooncake conversation": plan_load(load_one(options.traces, "conversation"), SPEED_REPLICAS, SECONDS),
        }
        loads = [load_one(options.traces, name) for name in COMPARED]
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = []
    for name, plan in plans.items():
        speeds = [requests_per_minute(plan) for _ in range(options.rounds)]
        rows.append(Row(f"{name} (rival: the goal)", round(max(speeds)), GOALS[name], "requests/minute"))
    for load in loads:
        for replicas in COMPARED_REPLICAS:
            compared = ComparedDecisions(f"ties {load.name} {replicas}")
            simulate(plan_load(load, replicas, COMPARED_SECONDS), replicas, compared)
            label = f"{load.name}, {replicas} replicas, {compared.num_decided} decisions"
            rows += [
                Row(f"{label}: the whole search's", round(100 * compared.equal, 3), 99.9, "%"),
                Row(f"{label}: highest predicted cost beside its", round(max(compared.costs), 4), 1.03, "x"),
            ]
    write_report("simulator", rows)
    return 0


def read_conversations(path: Path) -> list[Planned]:
    """Azure's conversations in their own time; no prompt shares anything with another."""
    rows = list(read_azure(path))
    return [
        Planned(
            index=index,
            at_s=row.at_s - rows[0].at_s,
            endpoint="completions",
            prompt=[-1 - index, max(1, row.prompt_tokens)],
            max_tokens=max(1, row.output_tokens),
        )
        for index, row in enumerate(rows)
    ]


def load_one(folder: Path, name: str) -> Load:
    """Raises ConfigError where its trace is not there."""
    found, missing = load_loads(folder, [name])
    if missing:
        raise ConfigError(missing[0])
    return found[0]


def plan_load(load: Load, replicas: int, seconds: float) -> list[Planned]:
    """Requests of so many seconds of a load at PART of what the replicas would take with one endless cache."""
    return load.plan(0, PART * replicas / mean_work_s(load), seconds)


def requests_per_minute(plan: list[Planned]) -> float:
    """Requests that a minute of CPU plays."""
    began_s = time.process_time()
    simulate(plan, SPEED_REPLICAS, production(Random("ties 0"), open_search()))
    return 60 * len(plan) / (time.process_time() - began_s)


def simulate(plan: list[Planned], replicas: int, routing: RoutingPolicy) -> None:
    """Play it on so many replicas. Raises RuntimeError where many requests were not answered."""
    num_answered = 0

    def on_ended(request: SimulatedRequest) -> None:
        nonlocal num_answered
        num_answered += request.is_finished

    simulation = Simulation(
        [SimulatedPool("pool", "edge", replicas, None, ENGINE)],
        GatewayConfig(ttft_target_s=TTFT_S),
        SimulationConfig(),
        on_ended,
        lambda _: None,
        Journal(None),
        routing=routing,
    )
    simulation.run(iter(plan), TIMEOUT_S, TIMEOUT_S)
    if num_answered < LEAST_ANSWERED * len(plan):
        raise RuntimeError(f"only {num_answered} of {len(plan)} requests were answered")


if __name__ == "__main__":
    sys.exit(main())
