"""A fake engine under a real stream server, and a bare router on a real connection to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from penstock.wire.channel import Channel
from penstock.wire.frames import (
    BlockEvents,
    Delta,
    DownFrame,
    Finish,
    SamplingParams,
    StepCosts,
    Submit,
    TimeAccounts,
    UpFrame,
    decode_down,
    encode,
    pack_token_ids,
)
from penstock.wire.proof import (
    Answer,
    Challenge,
    Opening,
    StreamProofs,
    decode_opening,
    encode_opening,
    make_nonce,
)
from penstock.workers.engine.engine import EngineLoad, StepReport
from penstock.workers.engine.sequence import SeqOutput, Sequence, Status
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.opening import Door
from penstock.workers.serving.stream import StreamServer

TIMEOUT_S = 10.0
NUM_PLACES = 8
SECRET = bytes(range(32))
EPOCH = "epoch"
ACCOUNTS = TimeAccounts(2.0, 1.0, 4.0, 0.0, 0.5)
IDLE = EngineLoad(0, 0, 0, 0, 100, 100, 0, StepCosts(base_s=0.01))


class FakeEngine:
    """An engine whose steps are made by the test."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[Sequence] = asyncio.Queue()
        self.aborted: asyncio.Queue[Sequence] = asyncio.Queue()
        self.on_step: Callable[[StepReport], None]
        self.snapshot = BlockEvents(0, is_snapshot=True)
        self.is_draining = False
        self.shown = ACCOUNTS

    def submit(self, seq: Sequence) -> None:
        self.submitted.put_nowait(seq)

    def abort(self, seq: Sequence) -> None:
        self.aborted.put_nowait(seq)

    def request_snapshot(self, callback: Callable[[BlockEvents], None]) -> None:
        callback(self.snapshot)

    def begin_drain(self) -> None:
        self.is_draining = True

    def accounts(self) -> TimeAccounts:
        return self.shown

    def step(self, *outputs: SeqOutput, events: BlockEvents | None = None, load: EngineLoad = IDLE) -> None:
        self.on_step(StepReport(list(outputs), events, load))


class FakeRouter:
    """The other end, frame by frame."""

    def __init__(self) -> None:
        self.channel = Channel(self._on_message, self._on_end)
        self._frames: asyncio.Queue[DownFrame | None] = asyncio.Queue()
        self.challenges: asyncio.Queue[Challenge] = asyncio.Queue()

    async def greet(self, name: str = "r", secret: bytes = SECRET, epoch: str = EPOCH) -> Answer:
        """Open the stream; returns what proved it."""
        opening = Opening(name, make_nonce())
        self.channel.on_message = self._on_challenge
        self.channel.send(encode_opening(opening))
        async with asyncio.timeout(TIMEOUT_S):
            challenge = await self.challenges.get()
        self.channel.on_message = self._on_message
        proofs = StreamProofs(secret, opening, epoch, challenge.nonce)
        assert challenge.proof == proofs.replica or secret != SECRET
        answer = Answer(proofs.router)
        self.channel.send(encode_opening(answer))
        return answer

    def _on_challenge(self, data: bytes) -> None:
        challenge = decode_opening(data)
        assert isinstance(challenge, Challenge)
        self.challenges.put_nowait(challenge)

    def _on_message(self, data: bytes) -> None:
        self._frames.put_nowait(decode_down(data))

    def _on_end(self, _error: Exception | None) -> None:
        self._frames.put_nowait(None)

    def send(self, *ops: Any) -> None:
        self.channel.send(encode(UpFrame(list(ops))))

    async def frame(self) -> DownFrame:
        """The next frame. Raises EOFError when the replica ended the stream."""
        async with asyncio.timeout(TIMEOUT_S):
            frame = await self._frames.get()
        if frame is None:
            raise EOFError
        return frame

    async def rest(self) -> list[DownFrame]:
        """All frames until the replica ends the stream."""
        frames: list[DownFrame] = []
        with contextlib.suppress(EOFError):
            while True:
                frames.append(await self.frame())
        return frames

    async def frame_with(self, is_it: Callable[[DownFrame], Any]) -> DownFrame:
        while not is_it(frame := await self.frame()):
            pass
        return frame

    async def deltas(self, sid: int) -> list[Delta]:
        """All deltas of a sequence, up to its finish."""
        found: list[Delta] = []
        while not found or found[-1].finish is None:
            found += [delta for delta in (await self.frame()).deltas if delta.sid == sid]
        return found


class Bench:
    """The server, its engine, and routers on demand."""

    def __init__(self, previous_secret: bytes | None = None) -> None:
        self.engine = FakeEngine()
        self.events: list[BlockEvents] = []
        self.server = StreamServer(
            StreamInfo(EPOCH, NUM_PLACES, 16, 512, NUM_PLACES), self.events.append, Door(SECRET, EPOCH, previous_secret)
        )
        self.engine.on_step = self.server.on_step
        self.address = ""

    @asynccontextmanager
    async def router(self, name: str = "r", *, greets: bool = True) -> AsyncIterator[FakeRouter]:
        router = FakeRouter()
        host, _, port = self.address.rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: router.channel, host, int(port))
        if greets:
            await router.greet(name)
        yield router
        if router.channel.is_open:
            router.channel.close()


@asynccontextmanager
async def serving(
    previous_secret: bytes | None = None, count_compiled: Callable[[], int] = lambda: 0
) -> AsyncIterator[Bench]:
    bench = Bench(previous_secret)
    port = await bench.server.start(bench.engine, IDLE, "127.0.0.1", count_compiled=count_compiled)
    bench.address = f"127.0.0.1:{port}"
    try:
        yield bench
    finally:
        bench.server.stop()


def submit(sid: int = 1, num_tokens: int = 4, **changes: Any) -> Submit:
    values: dict[str, Any] = {
        "sid": sid,
        "request_id": f"q{sid}",
        "packed_token_ids": pack_token_ids(range(num_tokens)),
        "block_keys": b"",
        "chain_key": b"c" * 16,
    }
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
