"""The loader on a real event loop, with adapters that are there when the test says so."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import AdapterCount
from penstock.workers.engine.sequence import Resident
from penstock.workers.serving.adapters import MAX_FAILURES, Adapters
from penstock.workers.serving.residency import SERVICE_S


class Loaded(NamedTuple):
    digest: str


@dataclass
class Disk:
    """`load`, in the loader's thread."""

    held: threading.Event | None = None
    """Event that loading waits for; None: it does not wait."""
    errors: dict[str, Exception] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def unload(self, adapter: Resident) -> None:
        self.unloaded.append(adapter.digest)

    def load(self, digest: str, folder: Path) -> Loaded:
        assert folder == Path("store") / digest
        self.loaded.append(digest)
        if self.held is not None:
            assert self.held.wait(10)
        if digest in self.errors:
            raise self.errors[digest]
        return Loaded(digest)


class Log:
    """The outcome of each want."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self.outcomes: list[str] = []
        self._changed = asyncio.Event()
        adapters.on_change = self._changed.set

    def want(self, who: str, digest: str, tenant: str = "") -> object:
        def ready(adapter: Resident) -> None:
            assert adapter.digest == digest
            self.outcomes.append(f"{who} ready")

        return self.adapters.want(digest, ready, lambda error: self.outcomes.append(f"{who}: {error}"), tenant)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def loader(disk: Disk, num_slots: int = 2, clock: Clock | None = None) -> AsyncIterator[Log]:
    adapters = Adapters(Path("store"), disk.load, num_slots, clock or Clock(), disk.unload, disk.forgotten.append)
    yield Log(adapters)
    adapters.stop()


async def test_a_sequence_waits_while_its_adapter_is_loaded_and_the_next_one_does_not() -> None:
    disk = Disk()
    async with loader(disk) as log:
        assert log.want("first", "a") is not None
        assert log.outcomes == []
        await log.until(lambda: log.outcomes == ["first ready"])

        assert log.want("second", "a") is None

        assert log.outcomes == ["first ready", "second ready"]
        assert disk.loaded == ["a"]
        assert log.adapters.resident == ("a",)


async def test_two_sequences_that_wait_for_one_adapter_load_it_once() -> None:
    disk = Disk(held=threading.Event())
    async with loader(disk) as log:
        log.want("first", "a")
        log.want("second", "a")
        assert disk.held is not None
        disk.held.set()
        await log.until(lambda: len(log.outcomes) == 2)

        assert disk.loaded == ["a"]
        log.adapters.release("a")
        log.adapters.release("a")


async def test_with_every_slot_needed_an_adapter_waits_for_one_to_fall_idle() -> None:
    async with loader(Disk(), num_slots=1) as log:
        log.want("first", "a")
        await log.until(lambda: log.outcomes == ["first ready"])
        log.want("second", "b")
        await asyncio.sleep(0)
        assert log.outcomes == ["first ready"]
        assert log.adapters.resident == (), "it takes no newcomers while another waits for its slot"

        log.adapters.release("a")
        await log.until(lambda: log.outcomes == ["first ready", "second ready"])

        assert log.adapters.resident == ("b",)


async def test_what_is_given_up_is_unloaded_before_another_is_loaded() -> None:
    disk = Disk()
    async with loader(disk, num_slots=1) as log:
        for digest in "ab":
            log.want(digest, digest)
            await log.until(lambda digest=digest: f"{digest} ready" in log.outcomes)  # type: ignore[misc]
            log.adapters.release(digest)

        assert (disk.loaded, disk.unloaded) == (["a", "b"], ["a"])
        log.adapters.drop("b")
        assert disk.unloaded == ["a", "b"]


async def test_an_adapter_that_was_deleted_while_it_was_loaded_is_unloaded() -> None:
    disk = Disk(held=threading.Event())
    async with loader(disk) as log:
        log.adapters.preload("a")
        log.adapters.drop("a")
        (loading,) = [task for task in asyncio.all_tasks() if task.get_name() == "adapter a"]
        assert disk.held is not None
        disk.held.set()
        await loading

        assert disk.unloaded == disk.forgotten == ["a"]
        assert log.adapters.resident == ()


async def test_busy_adapters_can_not_starve_one_that_waits() -> None:
    """Each of them always has a sequence running, and newcomers all the time."""
    async with loader(Disk(), num_slots=2) as log:
        for digest in "ab":
            log.want(f"old {digest}", digest)
        await log.until(lambda: len(log.outcomes) == 2)
        log.want("waits", "c")

        log.want("new a", "a")
        log.want("new b", "b")
        log.adapters.release("a")
        await log.until(lambda: "waits ready" in log.outcomes)

        assert log.outcomes == ["old a ready", "old b ready", "new b ready", "waits ready"]
        assert log.adapters.resident == ("c",), "b is closed now, because a waits"
        log.adapters.release("c")
        await log.until(lambda: log.outcomes[-1] == "new a ready")


async def test_an_adapter_that_was_closed_for_nothing_opens_again() -> None:
    """A slot fell free elsewhere."""
    async with loader(Disk(), num_slots=2) as log:
        for digest in "ab":
            log.want(f"old {digest}", digest)
        await log.until(lambda: len(log.outcomes) == 2)
        log.want("waits", "c")
        log.adapters.release("b")
        await log.until(lambda: log.outcomes[-1] == "waits ready")

        assert log.want("new a", "a") is None
        assert log.outcomes[-1] == "new a ready"
        assert log.adapters.resident == ("c", "a")


async def test_a_failure_reaches_those_who_wait_and_the_routers_and_the_next_want_tries_again() -> None:
    disk = Disk(
        errors={
            "a": InvalidRequest("it does not fit."),
            "b": FileNotFoundError("gone"),
            "c": RuntimeError("who knows"),
        }
    )
    async with loader(disk) as log:
        for digest in "abc":
            log.want(digest, digest)
        await log.until(lambda: len(log.adapters.failures) == 3)

        assert sorted(log.outcomes) == [
            "a: The adapter can't be loaded: it does not fit.",
            "b: The adapter's files are not in this replica's store; every gateway and replica must share the folder.",
            "c: The adapter can't be loaded (RuntimeError).",
        ]
        disk.errors.clear()
        log.want("again", "a")
        await log.until(lambda: log.outcomes[-1] == "again ready")
        assert dict(log.adapters.failures).keys() == {"b", "c"}


async def test_failures_are_remembered_only_so_far() -> None:
    digests = [f"d{number}" for number in range(MAX_FAILURES + 3)]
    async with loader(Disk(errors={digest: OSError() for digest in digests})) as log:
        for digest in digests:
            log.want(digest, digest)
        await log.until(lambda: len(log.outcomes) == len(digests))

        assert len(log.adapters.failures) == MAX_FAILURES


async def test_a_cancelled_want_hears_nothing_and_holds_nothing() -> None:
    disk = Disk(held=threading.Event())
    async with loader(disk, num_slots=1) as log:
        want = log.want("first", "a")
        log.adapters.cancel(want)  # type: ignore[arg-type]
        log.want("second", "b")
        assert disk.held is not None
        disk.held.set()
        await log.until(lambda: log.outcomes == ["second ready"])

        assert log.adapters.resident == ("b",)


async def test_a_preload_takes_an_idle_slot_and_none_that_is_needed() -> None:
    disk = Disk()
    async with loader(disk, num_slots=1) as log:
        log.adapters.preload("a")
        await log.until(lambda: log.adapters.resident == ("a",))
        log.want("first", "a")
        log.adapters.preload("b")
        log.adapters.release("a")
        assert disk.loaded == ["a"], "a preload is not worth a wait"

        log.adapters.preload("b")
        await log.until(lambda: log.adapters.resident == ("b",))


async def test_a_preload_for_a_tenant_takes_only_a_slot_that_the_tenants_request_might_take() -> None:
    disk, clock = Disk(), Clock()
    async with loader(disk, clock=clock) as log:
        for digest in "ab":
            log.want(digest, digest, digest)
            await log.until(lambda digest=digest: f"{digest} ready" in log.outcomes)  # type: ignore[misc]
            log.adapters.release(digest)
        log.adapters.preload("c", "a")
        assert disk.loaded == ["a", "b"], "both have served for less than a second"

        clock.now += SERVICE_S
        log.adapters.preload("c", "a")
        await log.until(lambda: "c" in log.adapters.resident)

        assert log.adapters.resident == ("b", "c"), "its own makes room, not another tenant's"


async def test_hits_waits_loads_and_evictions_are_counted_by_tenant() -> None:
    disk, clock = Disk(), Clock()
    async with loader(disk, num_slots=1, clock=clock) as log:
        log.adapters.preload("a")
        await log.until(lambda: log.adapters.resident == ("a",))
        for who in ("first", "second"):
            log.want(who, "a", "x")
            log.adapters.release("a")
        clock.now += SERVICE_S
        log.want("third", "b", "y")
        await log.until(lambda: "third ready" in log.outcomes)

        assert log.adapters.counts.totals == [2, 1, 2, 1]
        assert set(log.adapters.counts.changed_since(0)) == {
            AdapterCount("a", "", 0, 0, 1, 0),
            AdapterCount("a", "x", 2, 0, 0, 1),
            AdapterCount("b", "y", 0, 1, 1, 0),
        }


async def test_of_a_deleted_adapter_nothing_is_kept_when_its_last_sequence_has_ended() -> None:
    disk = Disk()
    async with loader(disk) as log:
        log.want("first", "a")
        await log.until(lambda: log.outcomes == ["first ready"])
        log.adapters.drop("a")
        log.adapters.drop("in no slot")
        assert (disk.unloaded, disk.forgotten) == ([], ["in no slot"])

        log.adapters.release("a")

        assert (disk.unloaded, disk.forgotten) == (["a"], ["in no slot", "a"])


async def test_a_preload_behind_one_that_waits_is_forgotten_too() -> None:
    disk = Disk()
    async with loader(disk, num_slots=1) as log:
        log.want("first", "a")
        await log.until(lambda: log.outcomes == ["first ready"])
        log.want("waits", "b")

        log.adapters.preload("c")
        log.adapters.release("a")
        await log.until(lambda: log.outcomes[-1] == "waits ready")
        log.adapters.release("b")

        assert log.adapters.resident == ("b",)
        assert disk.loaded == ["a", "b"]


async def test_when_the_one_that_waits_gives_up_the_closed_adapter_takes_newcomers_again() -> None:
    async with loader(Disk(), num_slots=1) as log:
        log.want("old", "a")
        await log.until(lambda: log.outcomes == ["old ready"])
        given_up = log.want("waits", "b")
        log.want("new", "a")
        assert log.outcomes == ["old ready"]

        log.adapters.cancel(given_up)  # type: ignore[arg-type]

        assert log.outcomes == ["old ready", "new ready"]
        assert log.adapters.resident == ("a",)


async def test_a_dropped_adapter_leaves_with_its_last_sequence() -> None:
    async with loader(Disk()) as log:
        log.want("first", "a")
        await log.until(lambda: log.outcomes == ["first ready"])

        log.adapters.drop("a")
        assert log.adapters.resident == ()
        log.adapters.release("a")

        log.want("second", "a")
        assert log.outcomes == ["first ready"], "it has to be loaded again"


async def test_what_is_dropped_while_it_loads_for_nobody_takes_no_slot() -> None:
    disk = Disk(held=threading.Event())
    async with loader(disk) as log:
        log.adapters.preload("a")
        await asyncio.to_thread(lambda: None)
        log.adapters.drop("a")
        assert disk.held is not None
        disk.held.set()
        log.want("other", "b")
        await log.until(lambda: log.outcomes == ["other ready"])

        assert log.adapters.resident == ("b",)


async def test_one_tenants_many_adapters_take_turns_and_another_tenants_sequences_never_wait() -> None:
    disk, clock = Disk(), Clock()
    async with loader(disk, num_slots=3, clock=clock) as log:
        log.want("few", "f", "few")
        await log.until(lambda: log.outcomes == ["few ready"])
        for number in range(6):
            log.want(f"many {number}", f"m{number}", "many")
        await log.until(lambda: len(log.outcomes) == 3)
        served = ["m0", "m1"]
        for number in range(2, 6):
            log.adapters.release(served[-2])  # idle, or one that drains
            assert len(disk.loaded) == number + 1, "the last ones have not served yet"
            clock.now += SERVICE_S
            await log.until(lambda expected=f"many {number} ready": expected in log.outcomes)  # type: ignore[misc]
            served.append(f"m{number}")

            assert log.want(f"few {number}", "f", "few") is None, "its adapter takes newcomers all the time"

        assert disk.loaded == ["f", *served]


async def test_the_next_slot_goes_to_the_tenant_that_has_the_fewest() -> None:
    clock = Clock()
    async with loader(Disk(), num_slots=2, clock=clock) as log:
        for digest in "ab":
            log.want(digest, digest, "many")
        await log.until(lambda: len(log.outcomes) == 2)
        clock.now += SERVICE_S
        for digest in "cde":
            log.want(digest, digest, "many")
        log.want("f", "f", "few")

        log.adapters.release("a")
        await log.until(lambda: len(log.outcomes) == 3)

        assert log.outcomes[-1] == "f ready"


async def test_newcomers_of_an_adapter_that_drains_for_another_tenant_wait_behind_that() -> None:
    async with loader(Disk(), num_slots=2) as log:
        for digest in "ab":
            log.want(digest, digest, "many")
        await log.until(lambda: len(log.outcomes) == 2)
        log.want("few", "f", "few")
        log.want("new a", "a", "many")
        assert log.want("new b", "b", "many") is None

        log.adapters.release("a")
        await log.until(lambda: "few ready" in log.outcomes)

        assert log.outcomes[2:] == ["new b ready", "few ready"]


async def test_when_the_tenant_that_waits_gives_up_what_drained_for_it_takes_newcomers_at_once() -> None:
    async with loader(Disk(), num_slots=2) as log:
        for digest in "ab":
            log.want(digest, digest, "many")
        await log.until(lambda: len(log.outcomes) == 2)
        given_up = log.want("few", "f", "few")
        assert log.adapters.resident == ("b",)

        log.adapters.cancel(given_up)  # type: ignore[arg-type]

        assert log.adapters.resident == ("a", "b")
