"""Further gateways beside the one that `penstock up` starts, on ports of their own: Serve applications like it.

On a cluster each gateway has a machine of its own, so all listen on one port; on one machine each needs another.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import psutil
import ray
from ray import serve

from bench.support.cpu import command_line, descendants
from bench.support.free_ports import free_port
from bench.support.platform_process import PlatformProcess
from penstock.cli.applications import Placement, gateway_application
from penstock.cli.cluster import RAY_FOLDER
from penstock.cli.config import PlatformConfig
from penstock.cli.state import StateDir
from penstock.wire.discovery import GATEWAY_APP

READY_S = 60.0


def start_gateways(platform: PlatformProcess, count: int) -> list[str]:
    """Start further gateways; their base addresses, without /v1. They end with the platform."""
    run = StateDir(platform.state).read()
    assert run is not None
    ports = [free_port() for _ in range(count)]
    subprocess.run(
        [sys.executable, "-m", "bench.support.more_gateways", run.temp_dir, ray_address(platform), *map(str, ports)],
        env=ray_environment(platform),
        check=True,
    )
    return [f"http://127.0.0.1:{port}" for port in ports]


def ray_environment(platform: PlatformProcess) -> dict[str, str]:
    """The environment of a process that is to join the platform's Ray cluster, its token among it."""
    found = psutil.Process(platform.gateways[0]).environ()
    return {**os.environ, **{name: value for name, value in found.items() if name.startswith("RAY_AUTH_")}}


def ray_address(platform: PlatformProcess) -> str:
    """Address of the platform's own Ray cluster: there may be others on the machine."""
    option = "--gcs-address="
    for process in descendants(platform.pid):
        for argument in command_line(process):
            if argument.startswith(option):
                return argument.removeprefix(option)
    raise RuntimeError("the platform has no raylet")


def main() -> None:
    temp_dir, address, *ports = sys.argv[1:]
    config = msgspec.json.decode((Path(temp_dir) / "config.json").read_bytes(), type=PlatformConfig)
    folder = str(Path(temp_dir) / RAY_FOLDER)
    ray.init(address=address, namespace="penstock", log_to_driver=False, _temp_dir=folder)
    targets = [
        serve.RunTarget(gateway_application(_moved(config, int(port)), Placement(1)), f"{GATEWAY_APP}-{port}", None)
        for port in ports
    ]
    serve.run_many(targets)
    for port in ports:
        _wait_until_ready(f"http://127.0.0.1:{port}/readyz")


def _moved(config: PlatformConfig, port: int) -> PlatformConfig:
    return msgspec.structs.replace(config, gateway=msgspec.structs.replace(config.gateway, port=port))


def _wait_until_ready(url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} did not answer 200 within {READY_S:.0f} s")


if __name__ == "__main__":
    main()
