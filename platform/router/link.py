"""The router's end of the token stream to one replica: one gRPC call, used once.

Not the keeper of links: who wants another after a loss connects again. Invariants: what is sent in one turn of the event loop travels in one
frame, in order; a loss is reported once, within seconds also when the replica's machine vanishes; no frame is passed on after that, nor
after the link was closed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
import msgspec

from penstock.wire.errors import ReplicaLost
from penstock.wire.frames import STREAM_METHOD, Abort, Announce, DownFrame, Hello, Submit, UpFrame, decode_down, encode

CONNECT_TIMEOUT_S = 3.0
"""From the call to the replica's first load report."""
KEEPALIVE_MS = 2000
"""A replica whose machine has vanished, or whose process is stopped, is lost after twice that."""
MAX_FRAME_BYTES = 64 * 2**20
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # what gRPC really waits for an answer; a minute, if not told
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a lost connection's backoff must not delay the next link
)

Op: TypeAlias = Submit | Abort | Hello | Announce
Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

log = logging.getLogger("penstock.link")


class Link:
    """Made by `connect`. Its methods never wait; after a loss they do nothing."""

    def __init__(self, address: str, call: Call, on_frame: Callable[[DownFrame], None], on_lost: Callable[[], None]) -> None:
        self._address = address
        self._call = call
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._ops: list[Op] = []
        self._wake = asyncio.Event()
        self._is_over = False

    def submit(self, submit: Submit) -> None:
        self._push(submit)

    def abort(self, sid: int) -> None:
        self._push(Abort(sid))

    def announce(self) -> None:
        """Ask for a snapshot of the replica's blocks."""
        self._push(Announce())

    def _push(self, op: Op) -> None:
        if not self._is_over:
            self._ops.append(op)
            self._wake.set()

    async def run(self, first: DownFrame) -> None:
        """Pass frames on, from `first` to the loss of the stream; cancel to close the link."""
        tasks = [asyncio.create_task(self._read(first)), asyncio.create_task(self._write())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._report_loss(next(task for task in tasks if task.done()).exception())
        finally:
            self._is_over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, first: DownFrame) -> None:
        call, on_frame = self._call, self._on_frame
        on_frame(first)
        while (data := await call.read()) is not grpc.aio.EOF:
            on_frame(decode_down(data))

    async def _write(self) -> None:
        call, wake = self._call, self._wake
        while True:
            await wake.wait()
            wake.clear()
            ops, self._ops = self._ops, []
            await call.write(encode(UpFrame(ops)))

    def _report_loss(self, error: BaseException | None) -> None:
        self._is_over = True
        if error is None or isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
            log.warning("replica lost", extra={"address": self._address, "reason": _reason(error)})
        else:
            log.error("link failed", extra={"address": self._address}, exc_info=error)
        self._on_lost()


@asynccontextmanager
async def connect(address: str, router_id: str, on_frame: Callable[[DownFrame], None], on_lost: Callable[[], None]) -> AsyncIterator[Link]:
    """Open the stream to the replica at `address` (host:port); leaving closes it.

    on_frame: called with every frame, from the first, which has a load. on_lost: called once, when the stream ends otherwise than by leaving.
    Raises ReplicaLost when the replica doesn't answer within CONNECT_TIMEOUT_S, or refuses.
    """
    channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    try:
        call: Call = channel.stream_stream(STREAM_METHOD)()
        first = await _greet(address, call, router_id)
        link = Link(address, call, on_frame, on_lost)
        running = asyncio.create_task(link.run(first))
        try:
            yield link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            call.cancel()
    finally:
        await channel.close()


async def _greet(address: str, call: Call, router_id: str) -> DownFrame:
    """Say Hello; returns the replica's first frame."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await call.write(encode(UpFrame([Hello(router_id)])))
            data = await call.read()
    except TimeoutError:
        raise ReplicaLost(f"The replica at {address} did not answer within {CONNECT_TIMEOUT_S:.0f} s.") from None
    except grpc.aio.AioRpcError as error:
        raise ReplicaLost(f"No stream to the replica at {address}: {_reason(error)}.") from None
    if data is grpc.aio.EOF:
        raise ReplicaLost(f"The replica at {address} closed the stream at once.")
    try:
        return decode_down(data)
    except msgspec.MsgspecError:
        raise ReplicaLost(f"What listens at {address} is not a replica of this version.") from None


def _reason(error: Any) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return "the stream ended"
