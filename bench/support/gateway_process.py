"""A gateway and one timed replica in a process of their own, over the real stream and a real Redis, without Ray.

    python -m bench.support.gateway_process REDIS_URL PORT OTHER_URL

For benchmarks of what gateways tell: it is there in seconds where a platform takes minutes. Not a platform: nothing
places, watches or replaces processes, and there is no autoscaler. SIGUSR1 takes the replica off the gateway's list, as
discovery does with one that has died; SIGUSR2 puts it back.
"""

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from bench.gpu.steps.cluster import Member
from penstock.base.redis import connect
from penstock.base.subsecrets import replica_secrets
from penstock.base.telemetry import TelemetryConfig
from penstock.cli.applications import pool_spec
from penstock.cli.config import PoolConfig
from penstock.prefix.hashing import ChainHasher
from penstock.router.app import Core
from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.models.catalogue import Checkpoint
from penstock.router.transport.listener import Listener
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.workers.config import EngineConfig, TimedConfig
from penstock.workers.engine.engine import Engine, EngineLoad
from penstock.workers.engine.timed import TimedRunner
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.opening import Door
from penstock.workers.serving.stream import StreamServer

HOST = "127.0.0.1"
SECRET = bytes(range(32))
"""The cluster's secret, from which tenants' keys derive."""
POOL = "scaled"
MODEL = "demo"
ENGINE = EngineConfig(runner="timed", max_num_seqs=8, timed=TimedConfig(base_s=0.03, prefill_token_s=0.0001))
START_S = 120.0
DRAIN_S = 2


async def serve(redis_url: str, port: int, other_url: str) -> None:
    """Serve until the process is ended. other_url: of a provider of chats, at /v1, and collector of spans."""
    pool = PoolConfig(name=POOL, model=MODEL, served_names=(POOL, "either"), tier="edge", engine=ENGINE)
    spec, source = pool_spec(pool), resolve(MODEL)
    epoch, secrets = uuid.uuid4().hex, replica_secrets(SECRET)
    server = StreamServer(StreamInfo.of(epoch, ENGINE), lambda _events: None, Door(secrets.stream, epoch))
    runner = TimedRunner(ENGINE)
    engine = Engine(runner, ENGINE, ChainHasher(secrets.block, ENGINE.block_size), server.on_step)
    await asyncio.to_thread(engine.start)
    idle = EngineLoad(0, 0, 0, 0, runner.num_blocks, runner.num_blocks, 0, ENGINE.timed.costs)
    address = f"{HOST}:{await server.start(engine, idle, HOST)}"
    key_id = secrets.stream_key_id.hex()
    member = Member("replica-0", address, epoch, runner.max_model_len, key_id, pool=POOL, model_digest=source.digest)
    provider = ProviderConfig(
        name="far",
        base_url=f"{other_url}/v1",
        model="large",
        served_names=("either",),
        ttft_s=0.05,
        input_price=1.0,
        output_price=2.0,
        breaker_failures=3,
        breaker_open_s=1.0,
    )
    core = Core(
        GatewayConfig(port=port, max_queue=64, max_queue_share=1.0, queue_timeout_s=5.0, ttft_target_s=3.0),
        [spec],
        {MODEL: Checkpoint(load_tokenizer(source), source.digest)},
        SECRET,
        connect(redis_url),
        "gateway-0",
        TelemetryConfig(otlp_endpoint=other_url, sample_ratio=1.0),
        [provider],
    )
    loop = asyncio.get_running_loop()
    async with core.providers, core.fleet, asyncio.TaskGroup() as tasks:
        for part in (core.admission, core.exchange, core.loss_watch, core.published):
            tasks.create_task(part.run())
        core.fleet.update([member._replace(abilities=frozenset())])
        loop.add_signal_handler(signal.SIGUSR1, partial(core.fleet.update, []))
        loop.add_signal_handler(signal.SIGUSR2, partial(core.fleet.update, [member]))
        await Listener(core.app, HOST, [port], DRAIN_S).start()


@contextmanager
def running_gateway(folder: Path, redis_url: str, port: int, other_url: str) -> Iterator[int]:
    """The process id, once it is ready. Raises RuntimeError with its log's tail."""
    log = folder / "gateway.log"
    command = [sys.executable, "-m", "bench.support.gateway_process", redis_url, str(port), other_url]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the gateway is not ready:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        answer = httpx.get(f"http://{HOST}:{port}/readyz", timeout=2.0, trust_env=False, verify=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
