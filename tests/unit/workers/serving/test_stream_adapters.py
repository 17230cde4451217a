"""The stream server and sequences whose adapter has still to be loaded."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.wire.frames import Abort, AdapterCount, DownFrame, DropAdapter, Finish, LoadAdapter
from penstock.workers.serving.adapters import Adapters
from penstock.workers.serving.stream import MAX_WAITING_SHARE
from tests.unit.workers.stream_fakes import IDLE, NUM_PLACES, TIMEOUT_S, Bench, FakeRouter, gain, serving, soon, submit


class Loaded(NamedTuple):
    digest: str


class Disk:
    def __init__(self) -> None:
        self.gate = threading.Event()
        """Adapters called slow wait for it."""

    def load(self, digest: str, folder: Path) -> Loaded:
        if digest.startswith("slow"):
            assert self.gate.wait(TIMEOUT_S)
        if digest == "broken":
            raise FileNotFoundError(folder)
        return Loaded(digest)


@asynccontextmanager
async def replica(num_slots: int = 2) -> AsyncIterator[tuple[Bench, Disk]]:
    bench, disk = Bench(), Disk()
    adapters = Adapters(Path("store"), disk.load, num_slots)
    bench.address = f"127.0.0.1:{await bench.server.start(bench.engine, IDLE, '127.0.0.1', adapters=adapters)}"
    try:
        yield bench, disk
    finally:
        disk.gate.set()
        bench.server.stop()


async def load_with(router: FakeRouter, *resident: str) -> DownFrame:
    return await router.frame_with(lambda frame: frame.load is not None and frame.load.resident_adapters == resident)


async def test_a_load_report_tells_each_router_once_what_has_become_of_adapters() -> None:
    async with replica() as (bench, _), bench.router("one") as one:
        one.send(submit(1, adapter="quick"))
        await soon(bench.engine.submitted)
        one.send(submit(2, adapter="quick"))
        counts = {}
        totals: tuple[int, ...] = ()
        while totals != (1, 1, 1, 0):
            frame = await one.frame_with(lambda frame: frame.load is not None)
            assert frame.load is not None
            totals = frame.load.adapter_totals
            counts |= {count.digest: count for count in frame.load.adapter_counts}
        async with bench.router("two") as two:
            frame = await two.frame_with(lambda frame: frame.load is not None)
        again = await one.frame_with(lambda frame: frame.load is not None)

        assert counts == {"quick": AdapterCount("quick", "", 1, 1, 1, 0)}
        assert frame.load is not None
        assert (frame.load.adapter_totals, frame.load.adapter_counts) == ((1, 1, 1, 0), tuple(counts.values()))
        assert again.load is not None
        assert again.load.adapter_counts == ()


async def test_a_sequence_enters_the_engine_with_its_adapter_and_overtakes_nobody_who_needs_none() -> None:
    async with replica() as (bench, disk), bench.router() as router:
        router.send(submit(1, adapter="slow"), submit(2), submit(3, adapter="quick"))
        entered = [await soon(bench.engine.submitted) for _ in range(2)]
        assert [(seq.request_id, seq.lora) for seq in entered] == [("q2", None), ("q3", Loaded("quick"))]

        disk.gate.set()
        late = await soon(bench.engine.submitted)

        assert (late.request_id, late.lora) == ("q1", Loaded("slow"))
        await load_with(router, "quick", "slow")
        bench.engine.step(gain(late, 5, finish=Finish.STOP))
        assert (await router.deltas(1))[-1].finish is Finish.STOP


async def test_waiting_for_an_adapter_counts_as_waiting() -> None:
    async with replica() as (bench, _), bench.router() as router:
        router.send(submit(1, adapter="slow"), submit(2, adapter="slow"))

        await router.frame_with(lambda frame: frame.load is not None and frame.load.num_waiting == 2)
        assert bench.engine.submitted.empty()


async def test_an_abort_while_the_adapter_is_loaded_ends_the_sequence_and_the_engine_never_sees_it() -> None:
    async with replica() as (bench, disk), bench.router() as router:
        router.send(submit(1, adapter="slow"), Abort(1))
        assert (await router.deltas(1))[-1].finish is Finish.ABORT

        disk.gate.set()
        await load_with(router, "slow")

        assert bench.engine.submitted.empty()
        assert bench.engine.aborted.empty()
        assert bench.server.num_inflight == 0


async def test_a_router_that_goes_takes_along_what_waits_for_its_adapter() -> None:
    async with replica() as (bench, disk), bench.router("stays") as stays:
        async with bench.router("goes") as goes:
            goes.send(submit(1, adapter="slow"))
            await stays.frame_with(lambda frame: frame.load is not None and frame.load.num_waiting == 1)
        await stays.frame_with(lambda frame: frame.load is not None and frame.load.num_waiting == 0)

        disk.gate.set()
        await load_with(stays, "slow")

        assert bench.engine.submitted.empty()
        assert bench.server.num_inflight == 0


async def test_an_adapter_that_can_not_be_loaded_refuses_its_sequences_so_that_another_replica_may_try() -> None:
    async with replica() as (bench, _), bench.router() as router:
        router.send(submit(1, adapter="broken"))

        last = (await router.deltas(1))[-1]

        assert last.finish is Finish.REFUSED
        assert last.error is not None
        assert "not in this replica's store" in last.error
        frame = await router.frame_with(lambda frame: frame.load is not None and frame.load.failed_adapters)
        assert frame.load is not None
        assert frame.load.failed_adapters[0][0] == "broken"


async def test_a_replica_without_slots_refuses_adapters() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(LoadAdapter("a"), DropAdapter("a"), submit(1, adapter="a"))

        assert (await router.deltas(1))[-1].finish is Finish.REFUSED


async def test_routers_load_and_drop_adapters_and_a_running_sequence_keeps_its_own() -> None:
    async with replica() as (bench, _), bench.router() as router:
        router.send(LoadAdapter("a"))
        await load_with(router, "a")
        router.send(submit(1, adapter="a"))
        seq = await soon(bench.engine.submitted)

        router.send(DropAdapter("a"))
        await load_with(router)
        assert seq.lora == Loaded("a")
        bench.engine.step(gain(seq, 5, finish=Finish.STOP))

        assert (await router.deltas(1))[-1].finish is Finish.STOP


async def test_the_end_of_a_sequence_frees_its_slot_for_the_one_that_waits() -> None:
    async with replica(num_slots=1) as (bench, _), bench.router() as router:
        router.send(submit(1, adapter="a"))
        first = await soon(bench.engine.submitted)
        router.send(submit(2, adapter="b"))
        await router.frame_with(lambda frame: frame.load is not None and frame.load.num_waiting == 1)

        bench.engine.step(gain(first, 5, finish=Finish.LENGTH))
        second = await soon(bench.engine.submitted)

        assert second.lora == Loaded("b")
        await load_with(router, "b")


async def test_draining_waits_for_those_who_wait_for_their_adapter() -> None:
    async with replica() as (bench, disk), bench.router() as router:
        router.send(submit(1, adapter="slow"))
        await router.frame_with(lambda frame: frame.load is not None and frame.load.num_waiting == 1)
        draining = asyncio.create_task(bench.server.drain(TIMEOUT_S))
        await asyncio.sleep(0)
        assert not draining.done()

        disk.gate.set()
        bench.engine.step(gain(await soon(bench.engine.submitted), 5, finish=Finish.STOP))

        assert await draining


async def test_what_waits_for_an_adapter_slot_takes_no_place_and_each_tenant_has_a_bound() -> None:
    async with replica(num_slots=1) as (bench, _), bench.router() as router:
        most = int(MAX_WAITING_SHARE * NUM_PLACES)
        router.send(submit(1, adapter="a", tenant="x"))
        await soon(bench.engine.submitted)
        waiting = range(2, 2 + most)
        router.send(*(submit(sid, adapter="b", tenant="x") for sid in waiting))
        await with_credit(router, 1 + most + NUM_PLACES - 1)

        router.send(submit(99, adapter="b", tenant="x"), submit(100, adapter="c", tenant="y"))
        refused = (await router.deltas(99))[-1]
        await with_credit(router, 1 + most + 1 + NUM_PLACES - 1)
        router.send(Abort(1))
        bench.engine.step(gain(await soon(bench.engine.aborted), finish=Finish.ABORT))
        entered = await soon(bench.engine.submitted)

        assert (refused.finish, refused.error) == (
            Finish.REFUSED,
            f"{most} sequences of this tenant wait for this replica's adapter slots.",
        )
        assert entered.tenant == "y", "it has the fewest slots"


async def test_what_waits_for_an_adapter_that_is_being_loaded_takes_its_place() -> None:
    async with replica() as (bench, _), bench.router() as router:
        router.send(*(submit(sid, adapter="slow", tenant="x") for sid in range(1, NUM_PLACES + 1)))

        frame = await router.frame_with(lambda frame: frame.load is not None and frame.load.num_waiting == NUM_PLACES)

        assert frame.load is not None
        assert frame.load.max_inflight == NUM_PLACES


async def with_credit(router: FakeRouter, credit: int) -> None:
    await router.frame_with(lambda frame: frame.load is not None and frame.load.max_inflight == credit)
