"""The Kubernetes that the end-to-end tests run on: the one that KUBECONFIG names, else one of their own
(tests/cluster.py).

On a cluster that KUBECONFIG names, KubeRay is installed already, PENSTOCK_E2E_IMAGE and PENSTOCK_E2E_REDIS_IMAGE name
images that its nodes can pull or have, and it has a default storage class. On their own one everything is made.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, running_cluster

ROOT = Path(__file__).resolve().parents[2]
COMMAND_S = 120.0
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Kube:
    enter: Callable[..., list[str]]
    """A command line, as one that runs where the API server, pods and Services can be reached."""
    own: Cluster | None
    """None: the cluster is somebody's. Its nodes pull their images, and its parts are not touched."""

    def run(
        self, *command: str, given: str = "", timeout_s: float = COMMAND_S, env: dict[str, str] | None = None
    ) -> str:
        """What it prints. Fails the test when it fails."""
        done = subprocess.run(
            self.enter(*command),
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def kubectl(self, *arguments: str, given: str = "", timeout_s: float = COMMAND_S) -> str:
        return self.run("kubectl", *arguments, given=given, timeout_s=timeout_s)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Objects, as kubectl has them."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return found

    def apply(self, *objects: dict[str, object]) -> None:
        self.kubectl("apply", "--filename=-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def client(self, client: str, timeout_s: float = COMMAND_S, **parameters: object) -> Any:
        """What a client of tests/e2e/clients.py finds inside the cluster's network."""
        return json.loads(
            self.run(
                sys.executable, "-m", "tests.e2e.clients", client, given=json.dumps(parameters), timeout_s=timeout_s
            )
        )


def documents(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects one behind the other, as `kubectl get --watch` writes them; the last one may be half written."""
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            found, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        yield found


def until(is_so: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> float:
    """Seconds that it took."""
    start = time.monotonic()
    while not is_so():
        assert time.monotonic() < start + within_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.5)
    return time.monotonic() - start


@contextmanager
def kubernetes() -> Iterator[Kube]:
    """Skips where there is none."""
    if os.environ.get("KUBECONFIG"):
        yield Kube(lambda *command: list(command), None)
        return
    with running_cluster("--nodes", "real", "--kuberay", must=True) as found:
        yield Kube(found.inside, found)
