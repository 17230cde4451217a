"""The options of a Ray Serve deployment that all of ours share: a place, health checks, and the time to end in.

Not Serve itself: what is returned goes to `ray.serve.deployment` as keyword arguments, and Ray is not imported here.
"""

from typing import TypedDict

NUM_CPUS = 0.001
"""CPUs of an actor in Ray's count, for placement only: cores are divided by us, so this must never be what refuses a
deployment."""
HEALTH_PERIOD_S = 1.0
"""Time between two health checks, where nothing else is given."""
HEALTH_TIMEOUT_S = 10.0
"""Longest wait for the answer to a health check, where nothing else is given."""
WAIT_LOOP_S = 0.1
"""Time between two checks of Serve's whether a deployment that ends has requests left; none pass through Serve."""


class ServeOptions(TypedDict):
    """Keyword arguments of `ray.serve.deployment`."""

    name: str
    num_replicas: int
    ray_actor_options: dict[str, object]
    health_check_period_s: float
    health_check_timeout_s: float
    graceful_shutdown_timeout_s: float
    graceful_shutdown_wait_loop_s: float
    logging_config: dict[str, object]


def serve_options(
    name: str,
    shutdown_timeout_s: float,
    *,
    num_replicas: int = 1,
    num_gpus: float = 0,
    resource: str | None = None,
    health_period_s: float = HEALTH_PERIOD_S,
    health_timeout_s: float = HEALTH_TIMEOUT_S,
) -> ServeOptions:
    """Options of a Serve deployment. shutdown_timeout_s: how long Serve waits for the destructor. num_gpus: GPUs of
    each replica; with 0 none is requested from Ray. resource: a resource of Ray of which each replica takes one unit;
    with None it may run on any node."""
    actor: dict[str, object] = {"num_cpus": NUM_CPUS}
    if num_gpus:
        actor["num_gpus"] = num_gpus
    if resource is not None:
        actor["resources"] = {resource: 1}
    return {
        "name": name,
        "num_replicas": num_replicas,
        "ray_actor_options": actor,
        "health_check_period_s": health_period_s,
        "health_check_timeout_s": health_timeout_s,
        "graceful_shutdown_timeout_s": shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
        "logging_config": {"enable_access_log": False},
    }
