"""`penstock up`: the composition root of a whole platform on one machine.

Starts Redis, Ray, the pools and the gateway; waits until requests are answered; stays until it is interrupted; then
stops everything in order. Invariant: however it ends, no process, socket or temp folder of this run is left. What stays
is the state folder.

Decisions: docs/decisions/one-machine.md
"""

import asyncio
import logging
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import httpx
import psutil
from redis.exceptions import RedisError
from rich.console import Console

from penstock.adapters.sources.bring import read_secrets
from penstock.base import log as logs
from penstock.base.cores import available_cores
from penstock.base.environment import (
    CLUSTER_SECRET,
    REPLICA_SECRETS,
    provider_key,
    redis_variable,
    source_credential,
    vllm_python,
)
from penstock.base.errors import ConfigError
from penstock.base.redis import connect
from penstock.base.redis_roles import ROLES, RoleName, make_password
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.base.redis_url import without_credentials
from penstock.cli.cluster import POLL_S, Cluster, StartFailed, driver_command, ray_environment
from penstock.cli.config import PlatformConfig, check_memory, divide_machine, place_folders, start_timeout_s
from penstock.cli.events import DEPLOYED, RAY
from penstock.cli.fitting import check_models_fit
from penstock.cli.interrupts import Interrupted, Interrupts
from penstock.cli.processes import become_subreaper, end_descendants
from penstock.cli.progress import Progress
from penstock.cli.state import TEMP_PREFIX, PoolState, RunState, StateDir
from penstock.cli.status import own_client
from penstock.tenancy.keys import create_key, put_key
from penstock.text.source import resolve
from penstock.workers.vllm.launch import find_python

DEMO_TENANT = "demo"
RAY_TIMEOUT_S = 90.0
READY_TIMEOUT_S = 180.0
POLL_TIMEOUT_S = 2.0
MARGIN_S = 20.0
"""Seconds more than the driver itself waits, so that its own reason arrives first."""
GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL for processes that are left at the end."""

log = logging.getLogger(__name__)


def up(config: PlatformConfig, config_path: Path, state: StateDir, console: Console) -> None:
    """Runs until interrupted. Raises ConfigError before anything starts, and StartFailed when something did not come up
    or stay up."""
    check_memory(config, psutil.virtual_memory().total)
    for provider in config.providers:
        if provider.api_key_env is not None:
            provider_key(provider.name, provider.api_key_env)  # missing, it would only show once Ray is up
    read_secrets(config.adapters.sources, source_credential)
    for pool in config.pools:
        if pool.engine.runner == "vllm":
            find_python(pool.engine, vllm_python())
    with state.locked():
        check_port(config.gateway.host, config.gateway.port)
        with state.open_log() as log_file:
            logs.configure(stream=log_file)
            Run(
                place_folders(divide_machine(config, available_cores()), state.path),
                config_path,
                state,
                Progress(console),
                log_file,
            ).until_interrupted()


def check_port(host: str, port: int) -> None:
    """Refuse an address that the gateway could not listen on. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"The gateway can't listen on {host}:{port} ({error.strerror}); free it, or set gateway.host and "
                "gateway.port."
            ) from error


class Run:
    """One life of the platform: what was started, and how it is stopped again."""

    def __init__(
        self, config: PlatformConfig, config_path: Path, state: StateDir, progress: Progress, log_file: TextIO
    ) -> None:
        self._config = config
        self._config_path = config_path
        self._state = state
        self._progress = progress
        self._log_file = log_file
        self._interrupts = Interrupts()

    def until_interrupted(self) -> None:
        self._interrupts.install()
        become_subreaper()
        start = time.monotonic()
        with ExitStack() as cleanup:
            try:
                cluster, api_key = self._start(cleanup)
                self._announce(api_key, time.monotonic() - start)
                status = cluster.wait_until_ended()
                raise StartFailed(
                    f"Ray's driver process ended by itself with status {status}; what depends on it is stopped too.",
                    cluster.log_tail(),
                )
            except Interrupted:
                log.info("interrupted")
            finally:
                self._interrupts.begin_stopping()
                self._progress.print_line("stopping (once more to hurry)")
        self._progress.print_line("stopped")

    def _start(self, cleanup: ExitStack) -> tuple[Cluster, str]:
        """Everything up to the first answer; also returns the demo tenant's key. What it starts, `cleanup` ends, last
        things first."""
        temp_dir = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
        cleanup.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        cleanup.callback(self._state.clear)
        cleanup.callback(self._end_what_is_left)
        self._state.write(self._run_state(temp_dir))
        with self._progress.step("Redis"):
            redis_urls = self._start_redis(temp_dir, cleanup)
            api_key = asyncio.run(self._demo_key(redis_urls["operator"]))
        with self._progress.step("checkpoints"):
            drafts = {pool.engine.speculation.model for pool in self._config.pools if pool.engine.speculation.model}
            for model in {pool.model for pool in self._config.pools} | drafts:
                resolve(model)  # once here, where a download shows, instead of in every replica at once
            check_models_fit(self._config, psutil.virtual_memory().total)
        with self._progress.step("Ray"):
            cluster = Cluster(
                driver_command(self._config, temp_dir, self._state.journal_path),
                temp_dir,
                self._environment(temp_dir, redis_urls),
                self._log_file,
            )
            cleanup.callback(cluster.stop, self._interrupts.hurry)
            cluster.wait_for(RAY, RAY_TIMEOUT_S)
        with self._progress.step(f"{_count(self._config.num_replicas, 'replica')} and the gateway"):
            cluster.wait_for(DEPLOYED, start_timeout_s(self._config, READY_TIMEOUT_S) + MARGIN_S)
            self._await_ready(cluster)
        self._state.write_env(f"{self._address}/v1", api_key)
        return cluster, api_key

    def _environment(self, temp_dir: Path, redis_urls: dict[RoleName, str]) -> dict[str, str]:
        """Environment of all processes, which are of one user: what belongs to one role only is not kept from the
        others, but not used by them."""
        return {
            **ray_environment(),
            CLUSTER_SECRET: self._state.secret().hex(),
            REPLICA_SECRETS: str(self._state.write_replica_secrets(temp_dir)),
            **{redis_variable(role): redis_urls[role] for role in ("gateway", "replica", "autoscaler")},
        }

    def _start_redis(self, temp_dir: Path, cleanup: ExitStack) -> dict[RoleName, str]:
        """Start the embedded Redis, where no other is named; returns the address for each role."""
        named = {role: url for role in ROLES if (url := self._config.redis.url_for(role)) is not None}
        if named:
            return named
        secret = self._state.secret()
        server = EmbeddedRedis(
            executable=find_executable(),
            data_dir=self._state.redis_dir,
            socket_dir=temp_dir / "redis",
            passwords={role: make_password(secret, role) for role in ROLES},
        )
        cleanup.callback(server.stop)
        server.start()
        return {role: server.url_for(role) for role in ROLES}

    async def _demo_key(self, redis_url: str) -> str:
        """The same key at every start, known to Redis even if that lost its data; a new one where it was revoked.
        Raises ConfigError when Redis does not answer."""
        client = connect(redis_url)
        try:
            key = self._state.read_key()
            if key is None or not await put_key(client, self._state.secret(), DEMO_TENANT, key):
                key = await create_key(client, self._state.secret(), DEMO_TENANT)
                self._state.write_key(key)
        except RedisError as error:
            raise ConfigError(f"Redis at {without_credentials(redis_url)} does not answer: {error}.") from error
        finally:
            await client.aclose()
        return key

    def _announce(self, api_key: str, took_s: float) -> None:
        shown = api_key if self._progress.is_terminal else None
        self._progress.print_line(
            announcement(self._address, self._config.pools[0].names[0], self._state.env_path, shown, took_s)
        )

    def _await_ready(self, cluster: Cluster) -> None:
        """Wait until /readyz answers 200. Raises StartFailed."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        last = "no answer"
        with own_client(self._shown, POLL_TIMEOUT_S) as client:
            while time.monotonic() < deadline:
                try:
                    answer = client.get(f"{self._address}/readyz")
                    if answer.status_code == 200:
                        return
                    last = f"status {answer.status_code}"
                except httpx.HTTPError as error:
                    last = type(error).__name__
                time.sleep(POLL_S)
        hint = "" if self._shown is None else "; its own certificate must be one that gateway.tls.ca lets in"
        raise StartFailed(
            f"The gateway at {self._address} was not ready within {READY_TIMEOUT_S:.0f} s ({last}{hint}).",
            cluster.log_tail(),
        )

    def _end_what_is_left(self) -> None:
        count = end_descendants(GRACE_S)
        if count:
            log.info("ended_what_was_left", extra={"processes": count})

    @property
    def _address(self) -> str:
        return self._address_of(self._config.gateway.port)

    def _address_of(self, port: int) -> str:
        host = self._config.gateway.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        scheme = "http" if self._config.gateway.tls is None else "https"
        return f"{scheme}://{shown}:{port}"

    @property
    def _shown(self) -> tuple[str, str] | None:
        """Paths of the certificate and key to show to the gateway: its own; None where it asks for none."""
        tls = self._config.gateway.tls
        return None if tls is None or tls.ca is None else (tls.certificate, tls.key)

    def _run_state(self, temp_dir: Path) -> RunState:
        own = psutil.Process()
        return RunState(
            pid=own.pid,
            pid_started=own.create_time(),
            version=version("penstock"),
            config=str(self._config_path),
            gateway=self._address,
            redis=without_credentials(self._config.redis.url or "embedded"),
            temp_dir=str(temp_dir),
            pools=tuple(
                PoolState(pool.name, pool.model, pool.names, pool.tier, pool.engine.runner, pool.replicas)
                for pool in self._config.pools
            ),
            admin=None if (port := self._config.gateway.admin_port) is None else self._address_of(port),
            shown=self._shown,
        )


def announcement(address: str, model: str, env_path: Path, api_key: str | None, took_s: float) -> str:
    """What is said when the platform answers. api_key: None where no person's terminal shows it: files and journals are
    kept, and read by others."""
    begin = f"\nPenstock answers on {address} after {took_s:.0f} s."
    if api_key is None:
        return f"{begin} Its address and an API key are in {env_path}: for shells . {env_path}\n\nCtrl-C stops it."
    return (
        f"{begin} For scripts: . {env_path}\n\n"
        f"  export OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={api_key}\n\n"
        f"  curl {address}/v1/chat/completions "
        f"-H 'Authorization: Bearer {api_key}' -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}\'\n\n'
        "Ctrl-C stops it."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
