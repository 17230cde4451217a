"""A Serve pool of empty replicas on a Ray of its own, and the actuator at work on it; run as a process by
test_autoscale. Prints JSON.

python -m tests.integration.serve_pool TEMP_DIR
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from penstock.autoscale.actuator import ServeActuator
from penstock.autoscale.observation import ServeState
from penstock.wire.discovery import REPLICA_DEPLOYMENT

APP = "pool-a"
DRAIN_S = 4.0


@serve.deployment(
    name=REPLICA_DEPLOYMENT, num_replicas=3, ray_actor_options={"num_cpus": 0.001}, graceful_shutdown_wait_loop_s=0.1
)
class Empty:
    async def __del__(self) -> None:
        await asyncio.sleep(DRAIN_S)


async def settled(actuator: ServeActuator, is_so: Callable[[ServeState], bool]) -> ServeState:
    deadline = time.monotonic() + 20
    while not is_so(placed := (await actuator.read())["a"]):
        assert time.monotonic() < deadline, placed
        await asyncio.sleep(0.05)
    return placed


async def go() -> dict[str, Any]:
    actuator = ServeActuator({"a": APP, "unknown": "pool-unknown"})
    begin = await settled(actuator, lambda placed: len(placed.running) == 3)
    known = sorted(await actuator.read())
    oldest = begin.running[0]
    is_refused = [
        await actuator.step_down("a", ("nobody",), 2),
        await actuator.step_down("a", (oldest,), 1),  # one victim does not make 3 into 1
    ]
    untouched = await settled(actuator, lambda placed: True)

    is_done = await actuator.step_down("a", (oldest,), 2)
    draining = await settled(actuator, lambda placed: True)
    status = serve.status().applications[APP].status.value
    seen = set(draining.running)
    gone = await settled(actuator, lambda placed: seen.update(placed.running) is None and not placed.num_stopping)

    await actuator.set_target("a", 4)
    grown = await settled(actuator, lambda placed: len(placed.running) == 4)
    return {
        "begin": begin,
        "known": known,
        "refused": is_refused,
        "untouched": untouched == begin,
        "done": is_done,
        "draining": draining,
        "status": status,
        "seen": sorted(seen),
        "gone": gone,
        "grown": grown,
    }


def main() -> None:
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        namespace="penstock-test",
        object_store_memory=96 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _temp_dir=sys.argv[1],
        _node_ip_address="127.0.0.1",
    )
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        serve.run_many([serve.RunTarget(Empty.bind(), APP, route_prefix=None, external_scaler_enabled=True)])
        found = asyncio.run(go())
        sys.stdout.write(
            json.dumps(
                {key: value._asdict() if isinstance(value, ServeState) else value for key, value in found.items()}
            )
            + "\n"
        )
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
