"""The platform's gateway, replaced by a fresh one that routes by a policy of this bench: the same application with
another choice of a replica, or with production's own.

    python -m bench.routing_live.gateway TEMP_DIR RAY_ADDRESS POLICY

It knows nothing of what the one before it saw, but for what replicas and Redis tell it.
"""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import ray
from ray import serve

from bench.routing_live.policies import find_maker
from bench.support.more_gateways import ray_address, ray_environment
from bench.support.platform_process import PlatformProcess
from penstock.cli.applications import Placement, gateway_application
from penstock.cli.cluster import RAY_FOLDER
from penstock.cli.config import PlatformConfig
from penstock.cli.state import StateDir
from penstock.wire.discovery import GATEWAY_APP

READY_S = 120.0


def replace_gateway(platform: PlatformProcess, policy: str) -> None:
    """End the platform's gateway and start one with this policy in its place; returns when it is ready."""
    run = StateDir(platform.state).read()
    assert run is not None
    subprocess.run(
        [sys.executable, "-m", "bench.routing_live.gateway", run.temp_dir, ray_address(platform), policy],
        env=ray_environment(platform),
        check=True,
        timeout=READY_S,
    )
    end = time.monotonic() + READY_S
    while not _is_ready(f"{platform.url}/readyz"):
        if time.monotonic() > end:
            raise RuntimeError(f"the gateway with the policy {policy} was not ready within {READY_S:.0f} s")
        time.sleep(0.1)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    temp_dir, address, policy = sys.argv[1:]
    config = msgspec.json.decode((Path(temp_dir) / "config.json").read_bytes(), type=PlatformConfig)
    ray.init(address=address, namespace="penstock", log_to_driver=False, _temp_dir=str(Path(temp_dir) / RAY_FOLDER))
    serve.delete(GATEWAY_APP)
    application = gateway_application(config, Placement(1), find_maker(policy))
    serve.run_many([serve.RunTarget(application, GATEWAY_APP, None)])


if __name__ == "__main__":
    main()
