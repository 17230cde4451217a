"""CPU time of one decision of ours: 64 replicas, reported by 8 gateways, from the reports to the target."""

import time
from random import Random
from typing import Final

from bench.autoscaling.replicas import ENGINE, MAX_ROWS
from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.observation import ServeState
from penstock.autoscale.observe import AgedReport, observe
from penstock.autoscale.policy import State, decide
from penstock.wire.frames import Load
from penstock.wire.scaling import GatewayReport, PoolFlow, PoolReport, ReplicaReport

REPLICAS: Final = 64
GATEWAYS: Final = 8
POOL: Final = "pool"


def measure_decision_ms(turns: int = 200, *, replicas: int = REPLICAS, gateways: int = GATEWAYS) -> float:
    """Lowest CPU milliseconds of a turn, the first minute left out, in which the policy's windows fill. What else runs
    on the machine only adds."""
    settings = AutoscaleConfig(max_replicas=2 * replicas)
    running = tuple(f"replica-{number}" for number in range(replicas))
    state, taken = State(), []
    for turn in range(60 + turns):
        reports = [AgedReport(_report(gateway, turn, running), 0.25) for gateway in range(gateways)]
        begun = time.process_time()
        observation = observe(POOL, ServeState(replicas, running), reports)
        state, _ = decide(settings, state, observation, MAX_ROWS, float(turn))
        taken.append(time.process_time() - begun)
    return 1000 * min(taken[60:])


def _report(gateway: int, turn: int, running: tuple[str, ...]) -> GatewayReport:
    started = 6 * (turn + 1)
    flow = PoolFlow(started, started - 10, 1000 * started, 200 * started, 180 * started)
    random = Random(turn)  # all gateways report the same loads
    replicas = [
        ReplicaReport(
            name,
            POOL,
            Load(
                epoch="1",
                event_seq=turn,
                max_inflight=MAX_ROWS,
                num_running=random.randint(8, 16),
                num_waiting=random.randint(0, 1),
                prefill_tokens_outstanding=random.randint(0, 1500),
                kv_tokens=random.randint(8000, 20000),
                free_blocks=4000,
                total_blocks=6000,
                costs=ENGINE.timed.costs,
                max_batched_tokens=512,
            ),
            16,
            2000,
            100 * turn,
        )
        for name in running
    ]
    return GatewayReport(f"gateway-{gateway}", turn + 1, [PoolReport(POOL, flow, turn % 3, 0.1)], replicas)
