"""The stream server over the real engine and a tiny model, while one tenant's adapters take turns."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.adapters.store import digest_of
from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, SamplingParams, StepCosts, Submit
from penstock.workers.compute.loading import load_runner
from penstock.workers.engine.engine import Engine, EngineLoad
from penstock.workers.engine.sequence import Resident
from penstock.workers.serving.adapters import Adapters
from penstock.workers.serving.load import StreamInfo
from penstock.workers.serving.opening import Door
from penstock.workers.serving.residency import MIN_SERVICE_S
from penstock.workers.serving.stream import StreamServer
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.stream_fakes import EPOCH, SECRET, Bench, FakeRouter, submit
from tests.unit.workers.tiny_models import engine_config, saved, tiny_model

CONFIG = msgspec.structs.replace(engine_config(blocks=128), max_num_seqs=4, admission_lookahead=20)
HASHER = ChainHasher(bytes(16), CONFIG.block_size)
NUM_SLOTS, NUM_ADAPTERS = 2, 4
PACE = 0.2
"""Pace of the slots' clock: slower than real time, so that each adapter serves while others end."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder of adapters by their digests, and the digests: the last one is the tenant's with a single one."""
    folder = tmp_path_factory.mktemp("adapters")
    digests = []
    for seed in range(NUM_ADAPTERS + 1):
        adapted(tiny_model("llama"), folder / str(seed), seed)
        digests.append(digest_of(folder / str(seed)))
        (folder / str(seed)).rename(folder / digests[-1])
    return folder, digests


class Replica(Bench):
    """The fakes' bench, with the engine of a replica in place of the fake one."""

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__()
        self.runner = load_runner(saved(tiny_model("llama"), model), CONFIG, poison=True)
        self.server = StreamServer(StreamInfo.of(EPOCH, CONFIG), self.events.append, Door(SECRET, EPOCH))
        self.real = Engine(
            self.runner, CONFIG, HASHER, self.server.on_step, measure_costs=lambda runner, config: StepCosts()
        )
        self.adapters = Adapters(folder, self._load, NUM_SLOTS, lambda: PACE * time.monotonic())
        self.loaded: list[str] = []

    def _load(self, digest: str, folder: Path) -> Resident:
        self.loaded.append(digest)
        return self.runner.load_adapter(digest, folder, max_rank=8)


@asynccontextmanager
async def replica(model: Path, folder: Path) -> AsyncIterator[Replica]:
    bench = await asyncio.to_thread(Replica, model, folder)
    await asyncio.to_thread(bench.real.start)
    blocks = bench.runner.num_blocks
    idle = EngineLoad(0, 0, 0, 0, blocks, blocks, 0, StepCosts())
    port = await bench.server.start(bench.real, idle, "127.0.0.1", adapters=bench.adapters)
    bench.address = f"127.0.0.1:{port}"
    try:
        yield bench
    finally:
        bench.server.stop()
        assert await asyncio.to_thread(bench.real.stop)


def request(sid: int, tenant: str, adapter: str | None, max_tokens: int) -> Submit:
    return submit(
        sid,
        num_tokens=9,
        tenant=tenant,
        adapter=adapter,
        chain_key=HASHER.root("tiny", adapter),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


class Reader:
    """What a router has received."""

    def __init__(self, router: FakeRouter) -> None:
        self.router = router
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.residents: list[tuple[str, ...]] = []

    async def until_finished(self, *sids: int) -> None:
        while not set(sids) <= self.finishes.keys():
            frame = await self.router.frame()
            for delta in frame.deltas:
                self.tokens.setdefault(delta.sid, []).extend(delta.token_ids)
                if delta.finish is not None:
                    self.finishes[delta.sid] = delta.finish
            if frame.load is not None:
                self.residents.append(frame.load.resident_adapters)


async def test_beside_a_tenant_of_more_adapters_than_slots_others_go_on_as_if_alone(
    tmp_path: Path, store: tuple[Path, list[str]]
) -> None:
    folder, digests = store
    own = digests[-1]
    async with replica(tmp_path / "a", folder) as bench, bench.router() as router:
        alone = Reader(router)
        router.send(request(1, "few", own, 40), request(2, "none", None, 40))
        await alone.until_finished(1, 2)

    async with replica(tmp_path / "b", folder) as bench, bench.router() as router:
        reader = Reader(router)
        router.send(request(1, "few", own, 40))
        await reader.until_finished(1)
        began_s = time.monotonic()
        crowd = range(2, 2 + 3 * NUM_ADAPTERS)
        router.send(*(request(sid, "many", digests[sid % NUM_ADAPTERS], 60) for sid in crowd))
        reader.residents.clear()
        for sid in range(100, 108, 2):
            router.send(request(sid, "few", own, 40), request(sid + 1, "none", None, 40))
            await reader.until_finished(sid, sid + 1)
        num_before = len(reader.finishes.keys() & set(crowd))
        await reader.until_finished(*crowd)
        took_s = time.monotonic() - began_s

    assert all(own in resident for resident in reader.residents), "its adapter takes newcomers all the time"
    assert all(reader.tokens[sid] == alone.tokens[1] for sid in (1, *range(100, 108, 2)))
    assert all(reader.tokens[sid] == alone.tokens[2] for sid in range(101, 108, 2))
    assert set(reader.finishes.values()) == {Finish.LENGTH}
    assert num_before < len(crowd), "others ended while adapters waited"
    assert sorted(bench.loaded) == sorted(digests), "each was loaded once"
    assert took_s * PACE >= (NUM_ADAPTERS - 1) * MIN_SERVICE_S, "each served for a while"
