"""What a RayService runs, on a real Ray with the resources that its worker groups have, and the autoscaler's way into
it through Redis."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.free_ports import free_port
from penstock.base.environment import serve_environment
from penstock.base.redis_server import EmbeddedRedis, find_executable

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]


def test_the_applications_answer_are_scaled_from_outside_and_roll_with_what_they_had(
    tmp_path: Path, socket_dir: Path
) -> None:
    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    server.start()
    try:
        environment = (
            os.environ
            | serve_environment()
            | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
        )
        environment |= {"PENSTOCK_REDIS_URL": server.url, "PENSTOCK_CLUSTER_SECRET": "5a" * 32}
        command = [sys.executable, "-m", "tests.integration.serve_config", str(socket_dir / "ray"), str(free_port())]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    finally:
        server.stop()
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(
        next(line for line in finished.stdout.splitlines() if line.startswith("{"))
    )  # Ray writes there too

    def ids(step: str) -> list[str]:
        return [replica["replica_id"] for replica in found[step]["replicas"]]

    assert found["answer"] == 200
    assert len({replica["address"] for replica in found["grown"]["replicas"]} - {None}) == 1, (
        "that of the node, in Kubernetes the pod's"
    )
    assert ids("grown")[0] == ids("first")[0]
    assert found["done"]
    assert ids("shrunk") == ids("grown")[1:], "the oldest was named, and it alone has gone"
    assert found["rolled"]["target"] == 2, "not the one that the values say"
    assert not set(ids("rolled")) & set(ids("shrunk"))
    assert found["stream"] == "data: [DONE]", "a stream outlives the roll"
