"""Real Redis servers on loopback: one, a master with a replica and three sentinels, and a cluster of three nodes."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from bench.support.free_ports import free_ports
from penstock.base.redis_server import find_executable

SERVICE = "tenants"
NUM_SLOTS = 16384
START_S = 20.0


def wait_until(is_so: Callable[[], bool], within_s: float = START_S) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except redis.RedisError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not so within {within_s} s")


class Servers:
    """Processes by port. Each has a folder of its own, so one that was killed starts again with its data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, port: int, *settings: str) -> redis.Redis:
        """Returns a client of the server when that answers. settings: lines of redis.conf."""
        own = self._folder / str(port)
        own.mkdir(exist_ok=True)
        lines = [f"port {port}", "bind 127.0.0.1", f"dir {own}", "save ''", *settings]
        (own / "redis.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return self._run(port, str(own / "redis.conf"))

    def start_again(self, port: int) -> redis.Redis:
        return self._run(port, str(self._folder / str(port) / "redis.conf"))

    def watch(self, port: int, master: int) -> redis.Redis:
        """A sentinel of the master."""
        own = self._folder / str(port)
        own.mkdir(exist_ok=True)
        lines = [
            *(f"port {port}", "bind 127.0.0.1", f"dir {own}"),
            f"sentinel monitor {SERVICE} 127.0.0.1 {master} 2",
            f"sentinel down-after-milliseconds {SERVICE} 1000",
            f"sentinel failover-timeout {SERVICE} 10000",
        ]
        (own / "redis.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return self._run(port, str(own / "redis.conf"), "--sentinel")

    def _run(self, port: int, *arguments: str) -> redis.Redis:
        self._processes[port] = subprocess.Popen(
            [str(find_executable()), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        client = redis.Redis(port=port)
        wait_until(lambda: bool(client.ping()))
        return client

    def pid(self, port: int) -> int:
        return self._processes[port].pid

    def kill(self, port: int) -> None:
        process = self._processes.pop(port)
        process.kill()
        process.wait()

    def end(self) -> None:
        for port in list(self._processes):
            self.kill(port)


@contextmanager
def sentinels(folder: Path) -> Iterator[tuple[Servers, int, str]]:
    """The servers, the master's port, and the address of it all."""
    servers = Servers(folder)
    master, replica, *watchers = free_ports(5)
    try:
        servers.start(master, "appendonly yes").close()
        copy = servers.start(replica, "appendonly yes", f"replicaof 127.0.0.1 {master}")
        wait_until(lambda: copy.info("replication")["master_link_status"] == "up")
        clients = [servers.watch(port, master) for port in watchers]
        wait_until(lambda: all(_is_watched(client) for client in clients))
        for client in (copy, *clients):
            client.close()
        yield (
            servers,
            master,
            f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in watchers)}/{SERVICE}",
        )
    finally:
        servers.end()


def _is_watched(sentinel: redis.Redis) -> bool:
    state = sentinel.sentinel_master(SERVICE)
    return isinstance(state, dict) and bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Servers, list[int], str]]:
    """The servers, their ports, and the address of the cluster."""
    servers = Servers(folder)
    ports = free_ports(3, with_bus=True)
    bounds = [NUM_SLOTS * number // len(ports) for number in range(len(ports) + 1)]
    try:
        clients = []
        for number, port in enumerate(ports):
            client = servers.start(port, "appendonly yes", "cluster-enabled yes", "cluster-node-timeout 2000")
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)  # type: ignore[no-untyped-call]
            client.execute_command("CLUSTER ADDSLOTS", *range(bounds[number], bounds[number + 1]))  # type: ignore[no-untyped-call]
            clients.append(client)
        for port in ports[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port)  # type: ignore[no-untyped-call]
        wait_until(lambda: all(_is_whole(client) for client in clients))
        for client in clients:
            client.close()
        yield servers, ports, f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in ports)}"
    finally:
        servers.end()


def _is_whole(client: redis.Redis) -> bool:
    said = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    facts = said if isinstance(said, dict) else dict(line.split(":") for line in said.decode().split())
    return bool(facts["cluster_state"] == "ok" and facts["cluster_known_nodes"] == "3")


@contextmanager
def single(folder: Path, port: int) -> Iterator[tuple[Servers, str]]:
    """One server with an append-only file, and its address."""
    servers = Servers(folder)
    try:
        servers.start(port, "appendonly yes").close()
        yield servers, f"redis://127.0.0.1:{port}"
    finally:
        servers.end()
