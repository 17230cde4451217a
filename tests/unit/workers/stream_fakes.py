"""A fake engine under a real stream server, and a bare router on a real connection to it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from penstock.wire.frames import (
    STREAM_METHOD,
    BlockEvents,
    Delta,
    DownFrame,
    Finish,
    Hello,
    SamplingParams,
    StepCosts,
    Submit,
    UpFrame,
    decode_down,
    encode,
    pack_ids,
)
from penstock.workers.engine import EngineLoad, StepReport
from penstock.workers.sequence import SeqOutput, Sequence, Status
from penstock.workers.stream import StreamInfo, StreamServer

TIMEOUT_S = 10.0
NUM_PLACES = 8
IDLE = EngineLoad(0, 0, 0, 0, 100, 100, 0, StepCosts(base_s=0.01))


class FakeEngine:
    """Does what the test says, when it says it."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        self.aborted: asyncio.Queue[Sequence] = asyncio.Queue()
        self.on_step: Callable[[StepReport], None]
        self.snapshot = BlockEvents(0, is_snapshot=True)

    def submit(self, seq: Sequence) -> None:
        self.submitted.put_nowait(seq)

    def abort(self, seq: Sequence) -> None:
        self.aborted.put_nowait(seq)

    def request_snapshot(self, callback: Callable[[BlockEvents], None]) -> None:
        callback(self.snapshot)

    def step(self, *outputs: SeqOutput, events: BlockEvents | None = None, load: EngineLoad = IDLE) -> None:
        self.on_step(StepReport(list(outputs), events, load))


class FakeRouter:
    """The other end, frame by frame."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *ops: Any) -> None:
        await self.call.write(encode(UpFrame(list(ops))))

    async def frame(self) -> DownFrame:
        """The next one. Raises AioRpcError when the replica broke the stream, and EOFError when it ended it."""
        async with asyncio.timeout(TIMEOUT_S):
            data = await self.call.read()
        if data is grpc.aio.EOF:
            raise EOFError
        return decode_down(data)

    async def frame_with(self, is_it: Callable[[DownFrame], Any]) -> DownFrame:
        while not is_it(frame := await self.frame()):
            pass
        return frame

    async def deltas(self, sid: int) -> list[Delta]:
        """All of a sequence, up to its finish."""
        found: list[Delta] = []
        while not found or found[-1].finish is None:
            found += [delta for delta in (await self.frame()).deltas if delta.sid == sid]
        return found


class Bench:
    """The server, its engine, and routers on demand."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.events: list[BlockEvents] = []
        self.server = StreamServer(StreamInfo("epoch", NUM_PLACES, 16, 512), self.events.append)
        self.engine.on_step = self.server.on_step
        self.address = ""

    @asynccontextmanager
    async def router(self, name: str = "r", *, greets: bool = True) -> AsyncIterator[FakeRouter]:
        async with grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.stream_stream(STREAM_METHOD)()
            router = FakeRouter(call)
            if greets:
                await router.send(Hello(name))
            yield router
            call.cancel()


@asynccontextmanager
async def serving() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.address = f"127.0.0.1:{await bench.server.start(bench.engine, IDLE, '127.0.0.1')}"
    try:
        yield bench
    finally:
        await bench.server.stop()


def submit(sid: int = 1, num_tokens: int = 4, **changes: Any) -> Submit:
    values: dict[str, Any] = {"sid": sid, "request_id": f"q{sid}", "token_ids": pack_ids(range(num_tokens)), "block_keys": b"", "chain_key": b"c" * 16}
    return Submit(**{**values, "sampling": SamplingParams(max_tokens=8), **changes})


def gain(seq: Sequence, *token_ids: int, finish: Finish | None = None) -> SeqOutput:
    """What a step would do to the sequence, and its output."""
    seq.status = Status.RUNNING if finish is None else Status.FINISHED
    seq.token_ids += token_ids
    seq.finish = finish
    return SeqOutput(seq, list(token_ids), finish=finish)


async def soon(queue: "asyncio.Queue[Sequence]") -> Sequence:
    async with asyncio.timeout(TIMEOUT_S):
        return await queue.get()
