"""What the stream between a gateway and a replica costs by TLS and without: CPU of a frame at both ends, and of an
opening with its proofs beside the one message of the version before.

    python -m bench.stream [--frames 1000] [--openings 200]

Both ends in one process on loopback, a frame every 10 ms, in turn, three rounds; the median. Ours: by TLS (frames), the
proofs in both directions (openings); the rival: without TLS, the previous version's hello.
"""

import argparse
import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from bench.support.report import Row, write_report
from penstock.base.tls import TlsContexts, TlsFiles
from penstock.router.replicas.link import Greeting, connect
from penstock.wire.channel import Channel
from penstock.wire.frames import BlockEvents, StepCosts, TimeAccounts
from penstock.wire.stream_config import GATEWAY_NAME, REPLICA_NAME
from penstock.workers.engine.engine import EngineLoad
from penstock.workers.engine.sequence import Sequence
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.opening import Door
from penstock.workers.serving.stream import StreamServer

FRAME_BYTES = 400
"""Length of a frame with the deltas of some 16 sequences and a load report."""
EVERY_S = 0.01
ROUNDS = 3
SECRET, EPOCH = bytes(range(32)), "epoch"
IDLE = EngineLoad(0, 0, 0, 0, 100, 100, 0, StepCosts(base_s=0.01))


class NoEngine:
    """An engine that is asked for nothing."""

    def submit(self, seq: Sequence) -> None: ...
    def abort(self, seq: Sequence) -> None: ...
    def request_snapshot(self, callback: Callable[[BlockEvents], None]) -> None: ...
    def begin_drain(self) -> None: ...
    def accounts(self) -> TimeAccounts:
        return TimeAccounts()


def make_files(folder: Path) -> TlsFiles:
    """A certificate for both sides, which is its own CA."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "1",
            ),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=penstock"),
            *("-addext", f"subjectAltName=DNS:{GATEWAY_NAME},DNS:{REPLICA_NAME}"),
        ],
        check=True,
        capture_output=True,
    )
    return TlsFiles(certificate=str(certificate), key=str(key), ca=str(certificate))


async def frame_cpu_us(num_frames: int, files: TlsFiles | None) -> float:
    """CPU microseconds of a frame, both ends together; the loop's waiting for its time is in it."""
    loop = asyncio.get_running_loop()
    arrived = 0
    done = asyncio.Event()

    def count(_message: bytes) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == num_frames:
            done.set()

    server_tls = None if files is None else TlsContexts(files, is_server=True).newest
    client_tls = None if files is None else TlsContexts(files, is_server=False).newest
    server = await loop.create_server(lambda: Channel(count, lambda _: None), "127.0.0.1", 0, ssl=server_tls)
    here = Channel(count, lambda _: None)
    port = server.sockets[0].getsockname()[1]
    name = None if files is None else REPLICA_NAME
    await loop.create_connection(lambda: here, "127.0.0.1", port, ssl=client_tls, server_hostname=name)
    frame = bytes(FRAME_BYTES)
    began_s = time.process_time()
    for _ in range(num_frames):
        here.send(frame)
        await asyncio.sleep(EVERY_S)
    await done.wait()
    used_s = time.process_time() - began_s
    here.abort()
    server.close()
    return used_s / num_frames * 1e6


async def opening_ms(num_openings: int, files: TlsFiles | None, *, is_previous: bool = False) -> tuple[float, float]:
    """Wall and CPU milliseconds of an opening until the first load report, both ends together."""
    door = Door(SECRET, EPOCH, SECRET, None if files is None else GATEWAY_NAME)
    server = StreamServer(StreamInfo(EPOCH, 8, 16, 512, 8), lambda _: None, door)
    tls = None if files is None else TlsContexts(files, is_server=True).newest
    address = f"127.0.0.1:{await server.start(NoEngine(), IDLE, '127.0.0.1', tls=tls)}"
    own = None if files is None else TlsContexts(files, is_server=False).newest
    greeting = Greeting("gateway", EPOCH, SECRET, is_previous)
    walls = []
    began_cpu_s = time.process_time()
    for _ in range(num_openings):
        began_s = time.perf_counter()
        async with connect(address, greeting, lambda _: None, lambda: None, own):
            walls.append(time.perf_counter() - began_s)
    cpu_s = time.process_time() - began_cpu_s
    server.stop()
    return statistics.median(walls) * 1e3, cpu_s / num_openings * 1e3


def run(measure: Coroutine[Any, Any, Any]) -> Any:
    return uvloop.run(measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--openings", type=int, default=200)
    options = parser.parse_args()
    plain: list[float] = []
    by_tls: list[float] = []
    previous, proven, proven_by_tls = [], [], []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        files = make_files(Path(folder))
        for _ in range(ROUNDS):
            plain.append(run(frame_cpu_us(options.frames, None)))
            by_tls.append(run(frame_cpu_us(options.frames, files)))
            previous.append(run(opening_ms(options.openings, None, is_previous=True)))
            proven.append(run(opening_ms(options.openings, None)))
            proven_by_tls.append(run(opening_ms(options.openings, files)))
    rows = [Row("CPU of a frame, both ends, TLS", statistics.median(by_tls), statistics.median(plain), "us")]
    for name, found in (("proofs", proven), ("proofs and TLS", proven_by_tls)):
        for index, kind in enumerate(("time", "CPU")):
            ours, theirs = (statistics.median(each[index] for each in side) for side in (found, previous))
            rows.append(Row(f"{kind} of an opening, {name}", ours, theirs, "ms"))
    write_report("stream", rows, notes=[f"frames of {FRAME_BYTES} bytes, one in {EVERY_S * 1e3:.0f} ms"])


if __name__ == "__main__":
    main()
