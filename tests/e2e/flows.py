"""Every connection that the node's conntrack sees while the tests run, and between which pods it was."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.kube import Kube, documents
from tests.unit.deploy.network import End

POD_NETWORK = "10.244.0."
GATEWAY = "10.244.0.1"
"""The node's own address there: kubelet's probes, and what comes through the API server, which no policy concerns."""
NEW = re.compile(
    r"\[NEW\] +(?P<protocol>tcp|udp) .*?"
    r"src=(?P<source>\S+) dst=(?P<service>\S+) sport=\d+ dport=(?P<port>\d+).*?"
    r"src=(?P<target>\S+) dst=\S+ sport=(?P<target_port>\d+)"
)
"""A line of `conntrack --event`: the connection as it was asked for, then as the answer comes back."""
DNS_PORT = 53


class Seen(NamedTuple):
    protocol: str
    source: str
    service: str
    """The address that was asked for."""
    port: int
    target: str
    """The answering end: behind a Service, a pod."""
    target_port: int


class Recording(NamedTuple):
    connections: Path
    pods: Path

    def flows(self) -> set[Seen]:
        """Connections from pods, each different one once."""
        found = filter(None, map(NEW.search, self.connections.read_text(encoding="utf-8").splitlines()))
        return {seen for seen in map(_seen, found) if seen.source.startswith(POD_NETWORK) and seen.source != GATEWAY}

    def ends(self) -> dict[str, list[End]]:
        """Pods by address; an address may have had several, one after another."""
        found: dict[str, list[End]] = {}
        for pod in documents(self.pods.read_text(encoding="utf-8")):
            address = pod.get("status", {}).get("podIP")
            if address:
                found.setdefault(address, []).append(end_of(pod))
        return found


def _seen(found: re.Match[str]) -> Seen:
    return Seen(
        found["protocol"].upper(),
        found["source"],
        found["service"],
        int(found["port"]),
        found["target"],
        int(found["target_port"]),
    )


def end_of(pod: dict[str, Any]) -> End:
    """A pod as the API server has it."""
    meta = pod["metadata"]
    ports = {
        port["name"]: port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
        if "name" in port
    }
    namespace = {"kubernetes.io/metadata.name": meta["namespace"]}
    return End(meta["name"], meta["namespace"], meta.get("labels", {}), namespace, ports, pod["status"]["podIP"])


@contextmanager
def recording(kube: Kube, folder: Path) -> Iterator[Recording]:
    """What conntrack and a watch of all pods say, until the end."""
    found = Recording(folder / "connections", folder / "pods")
    commands = {
        found.connections: ["conntrack", "--event", "--event-mask", "NEW"],
        found.pods: ["kubectl", "get", "pods", "--all-namespaces", "--watch", "--output=json"],
    }
    running = []
    try:
        for path, command in commands.items():
            with path.open("wb") as out:
                running.append(
                    subprocess.Popen(
                        kube.enter(*command), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL
                    )
                )
        yield found
    finally:
        for process in running:
            process.terminate()
            process.wait(10)
