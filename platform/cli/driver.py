"""The process that is Ray's driver: starts Ray and Serve, deploys gateway and pools, stays until SIGTERM, stops both in
order.

A process of its own because Ray ends its driver without a message when the raylet dies, takes its signals and writes to
its output: what must outlive that (Redis, the temp folder, the person's terminal) belongs to `penstock up`. Everything
it needs comes as arguments and environment, set before Ray is imported; what happens goes as one `Event` a line to the
descriptor it was given.

    python -m penstock.cli.driver CONFIG_JSON TEMP_DIR AUTOSCALE_LOG PARENT_PID EVENT_FD
"""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from penstock.autoscale.loop import autoscaler_app
from penstock.base.errors import ConfigError
from penstock.cli.applications import Placement, gateway_application, pool_application
from penstock.cli.autoscale import scaled_pools
from penstock.cli.config import PlatformConfig, check_gpus, start_timeout_s
from penstock.cli.events import DEPLOYED, FAILED, RAY, Event
from penstock.wire.discovery import AUTOSCALER_APP, GATEWAY_APP, pool_app_name

OBJECT_STORE_BYTES = 96 * 2**20
"""Size of Ray's shared memory. Tokens don't pass through it."""
LOGICAL_CPUS = 64
"""Number of CPUs that Ray counts with for placement; threads are divided by us, so it must never be what refuses a
replica."""
RUNNING_TIMEOUT_S = 180.0
"""Seconds until all applications must run. The first start of a checkpoint may build a kernel."""
POLL_S = 0.1
TAIL_LINES = 15
REFUSAL = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
"""Beginning of the line of a ConfigError in a traceback."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): a signal for this process when its parent dies."""


def main(arguments: Sequence[str]) -> None:
    config_path, temp_dir, journal, parent, descriptor = arguments
    stop_with_parent(int(parent))
    config = msgspec.json.decode(Path(config_path).read_bytes(), type=PlatformConfig)
    with open(int(descriptor), "wb", buffering=0) as pipe:
        signal.signal(signal.SIGTERM, _stop)
        try:
            _run(config, Path(temp_dir), journal, lambda event: pipe.write(msgspec.json.encode(event) + b"\n"))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if ray.is_initialized():
                serve.shutdown()
                ray.shutdown()


def stop_with_parent(parent: int) -> None:
    """Have SIGTERM sent to this process when the one that started it dies, however that happens. Its number is 1 in a
    container."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the parent is gone already")


def _run(config: PlatformConfig, temp_dir: Path, journal: str, report: Callable[[Event], object]) -> None:
    _start_ray(temp_dir)
    signal.signal(signal.SIGTERM, _stop)  # Ray has taken it for itself
    report(Event(RAY))
    try:
        check_gpus(config, ray.cluster_resources().get("GPU", 0.0))
    except ConfigError as error:
        report(Event(FAILED, str(error)))
        return
    names = deploy(config, journal)
    failed = await_running(names, start_timeout_s(config, RUNNING_TIMEOUT_S))
    if failed is not None:
        report(failed)
        return
    report(Event(DEPLOYED))
    while True:
        signal.pause()


def deploy(config: PlatformConfig, journal: str) -> list[str]:
    """Submit gateway, pools and, where one is scaled, the autoscaler to Serve, all at once and without waiting; returns
    the names of their applications. No proxy: the gateway answers for itself. journal: path of the autoscaler's event
    log."""
    gateway = serve.RunTarget(gateway_application(config, Placement(replicas=1)), GATEWAY_APP, route_prefix=None)
    pools = [
        serve.RunTarget(
            pool_application(pool, config.adapters, Placement(pool.replicas), config.stream, config.targets.classes),
            pool_app_name(pool.name),
            route_prefix=None,
            external_scaler_enabled=True,
        )
        for pool in config.pools
    ]
    targets = [gateway, *pools, *_autoscaler(config, journal)]
    serve.start(proxy_location="Disabled")
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    return [target.name for target in targets]


def _autoscaler(config: PlatformConfig, journal: str) -> list[serve.RunTarget]:
    """The application of the autoscaler, in a list that is empty where no pool is scaled."""
    pools = scaled_pools(config)
    if not pools:
        return []
    return [serve.RunTarget(autoscaler_app(pools, journal, config.budget_gpus), AUTOSCALER_APP, route_prefix=None)]


def _start_ray(temp_dir: Path) -> None:
    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        namespace="penstock",
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _temp_dir=str(temp_dir),
        _node_ip_address="127.0.0.1",
    )


def await_running(names: Sequence[str], timeout_s: float = RUNNING_TIMEOUT_S) -> Event | None:
    """Wait until every application runs (None), one has failed, or time is up (an event that says so)."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = serve.status().applications
        for name in names:
            if name in found and found[name].status == ApplicationStatus.DEPLOY_FAILED:
                return failure(name, _reasons(found[name]))
        missing = [name for name in names if name not in found or found[name].status != ApplicationStatus.RUNNING]
        if not missing:
            return None
        if time.monotonic() > deadline:
            detail = "\n".join(_reasons(found[name]) for name in missing if name in found)
            return Event(FAILED, f"{', '.join(missing)} did not come up within {timeout_s:.0f} s.", detail)
        time.sleep(POLL_S)


def failure(name: str, reasons: str) -> Event:
    """The event about an application that failed: our own refusal where there is one in Serve's account of it, else the
    end of that account."""
    lines = reasons.strip().splitlines()
    for line in reversed(lines):
        if line.startswith(REFUSAL):
            return Event(FAILED, f"{name} could not be started: {line.removeprefix(REFUSAL)}")
    return Event(FAILED, f"{name} could not be started.", "\n".join(lines[-TAIL_LINES:]))


def _reasons(application: ApplicationStatusOverview) -> str:
    messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
    return "\n".join(dict.fromkeys(filter(None, messages)))


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
