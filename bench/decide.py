"""The choice of a replica at the size of a large fleet: decisions, and reports while requests wait.

    python -m bench.decide [--quick]

A decision: from the filter to the receipt, with reading what changed at the replicas since the one before, without the
prefix index (what it would find is given). Its replica has one more sequence then, so that the next one begins with a
change. Ours compares more than one in C++; the rival compares one by one, as everything did before. Both in
one process and in turn, CPU time, the least of the rounds' means.
Reports: every replica is full, so many requests wait, and each replica reports once a round; one of its sequences ends
in every hundredth report. The rival makes the decision of the first that waits anew with each report.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from bench.support.report import Row, write_report
from penstock.base.metrics import Metrics
from penstock.perf.model import scale_costs
from penstock.prefix.plain_index import PlainIndex
from penstock.router.config import GatewayConfig, PoolSpec
from penstock.router.dispatch.attempt import Attempt, AttemptResult, MayHelp, always
from penstock.router.dispatch.dispatcher import RoutingDispatcher
from penstock.router.dispatch.holds import Hold
from penstock.router.dispatch.lane import Claim, Lane
from penstock.router.dispatch.output_lengths import OutputLengths
from penstock.router.dispatch.receipt import fill_receipt
from penstock.router.dispatch.route_states import RouteReader
from penstock.router.dispatch.shares.charges import Charges
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.state import RequestState
from penstock.router.dispatch.waiting import WaitQueue
from penstock.router.replicas.fleet import Fleet
from penstock.router.replicas.replica_client import Link, Member, PoolCallbacks
from penstock.router.routing.chains import Chains, RequestChains
from penstock.router.routing.native_search import open_search
from penstock.router.routing.request import Generation, Receipt, Route
from penstock.router.routing.search import IN_ARRAYS
from penstock.router.routing.spending import NOWHERE, Spending
from penstock.router.routing.tiers import TierReason
from penstock.wire.discovery import StartTimes
from penstock.wire.frames import Delta, DownFrame, Finish, Load, SamplingParams, StepCosts, Submit

POOL = PoolSpec(name="pool", served_names=("m",), tier="cloud", model="m", app_name="pool", max_model_len=8192)
POOLS = {"pool": POOL}
NUM_TOKENS, BLOCK_SIZE, CREDIT = 2000, 16, 32
COSTS = StepCosts(0.004, 4e-4, 1e-5, 1e-9, 1e-7, 0.0, 0.0, 0.005, 1e-4)
ROUTE = Route("cloud", ("pool",))


@dataclass(frozen=True)
class ListedReplica:
    replica_id: str
    pool: str = "pool"
    address: str = ""
    epoch: str = "epoch"
    model_digest: str = "digest"
    max_model_len: int = 8192
    block_size: int = BLOCK_SIZE
    has_private_prefixes: bool = False
    protocol: int = 0
    stream_key_id: str = ""
    abilities: frozenset[str] = frozenset()
    start: StartTimes | None = None


class SilentLink:
    """A link whose replica never answers by itself."""

    def submit(self, submit: Submit) -> None: ...
    def abort(self, sid: int) -> None: ...
    def announce(self) -> None: ...
    def load_adapter(self, digest: str, tenant: str = "") -> None: ...
    def drop_adapter(self, digest: str) -> None: ...


class KnownIndex(PlainIndex):
    """An index whose look-ups cost nothing: what it finds is given."""

    def __init__(self, found: dict[str, int]) -> None:
        super().__init__()
        self.found = found

    def lookup(self, keys: Sequence[bytes], now: float) -> dict[str, int]:  # noqa: ARG002 (the seam's)
        return self.found


class EagerQueue(WaitQueue):
    """A queue whose heads are tried at every change."""

    async def admit(
        self,
        lane: Lane,
        attempt: Attempt,
        claim: Claim,
        *,
        deadline_in_s: float,
        may_help: MayHelp = always,  # noqa: ARG002 (what is left out here)
        hold: Hold | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> AttemptResult:
        return await super().admit(lane, attempt, claim, deadline_in_s=deadline_in_s, hold=hold, on_wait=on_wait)


class Replicas:
    """Replicas as they report themselves."""

    def __init__(self, count: int, random: Random) -> None:
        self.members = [ListedReplica(f"replica-{number}") for number in range(count)]
        self.frames: dict[str, Callable[[DownFrame], None]] = {}
        self._random = random

    @asynccontextmanager
    async def connect(
        self, member: Member, on_frame: Callable[[DownFrame], None], _on_lost: Callable[[], None]
    ) -> AsyncIterator[Link]:
        self.frames[member.replica_id] = on_frame
        self.report(member.replica_id, self.draw_load())
        yield SilentLink()

    def report(self, replica_id: str, load: Load) -> None:
        self.frames[replica_id](DownFrame([], load))

    def draw_load(self, last_sid: int = 0) -> Load:
        """A load near others': sequences of other routers, some prefill, and noise in its costs."""
        random = self._random
        running, pace = random.randrange(8, 24), random.uniform(0.95, 1.05)
        costs = scale_costs(COSTS, pace)
        return Load(
            "epoch",
            0,
            CREDIT,
            running,
            random.choice((0, 0, 1)),
            random.choice((0, random.randrange(2000))),
            running * 1500,
            20_000,
            30_000,
            costs,
            2048,
            last_sid=last_sid,
        )


class Silence:
    """Takes what comes of a sequence."""

    spending = Spending(NOWHERE)

    def push(self, delta: Delta) -> None: ...
    def lose(self, *, is_planned: bool) -> None: ...


async def settle(is_settled: Callable[[], bool]) -> None:
    """Let everything that can run do so."""
    for _ in range(1000):
        if is_settled():
            return
        await asyncio.sleep(0)
    raise SystemExit("the replicas or requests did not come")


def make_state(arrival: int, chains: Chains) -> RequestState:
    generation = Generation(
        f"request-{arrival}",
        ("pool",),
        bytes(4 * NUM_TOKENS),
        NUM_TOKENS,
        SamplingParams(256),
        "tenant",
        b"salt",
        time.monotonic() + 600,
    )
    own = RequestChains(chains, b"salt", None)
    receipt = Receipt(generation.request_id)
    return RequestState(generation, arrival, time.monotonic(), receipt, None, own, generation.tokenized)


def _never(*_: object) -> bool:
    return False


async def decisions(num_replicas: int, num_held: int, rounds: int, batch: int) -> tuple[float, float]:
    """CPU seconds of a decision, ours and one by one. num_held: replicas that hold a part of the request."""
    random = Random(0)
    held = {f"replica-{number}": random.randrange(1, 100) for number in range(num_held)}
    index, replicas, chains = KnownIndex(held), Replicas(num_replicas, random), Chains(bytes(32))
    ignored = PoolCallbacks(lambda *_: None, lambda _: None, lambda *_: None, lambda *_: None, lambda *_: None)
    async with Fleet(POOLS, replicas.connect, index, ignored, random) as fleet:
        fleet.update(replicas.members)
        await settle(lambda: len(fleet.ready_clients(["pool"])) == num_replicas)
        readers = [
            RouteReader(fleet, index, {}, OutputLengths(), Random(1), time.monotonic, _never, _never, searching)
            for searching in (open_search(), IN_ARRAYS._replace(max_viewed=num_replicas))
        ]
        spent: list[list[float]] = [[], []]
        for _ in range(rounds):
            for reader, seconds in zip(readers, spent, strict=True):
                seconds.append(decide(reader, make_state(0, chains), batch) / batch)
                for member in replicas.members:
                    replicas.report(member.replica_id, replicas.draw_load(10**9))
    return min(spent[0]), min(spent[1])


def decide(reader: RouteReader, state: RequestState, times: int) -> float:
    """CPU seconds of so many decisions."""
    submit, total_s = Submit(0, "", b"", b"", b"", SamplingParams(1)), 0.0
    reader.read(state, ROUTE)  # the request's chain is made once
    for _ in range(times):
        began = time.thread_time()
        chosen = reader.read(state, ROUTE)
        fill_receipt(state.receipt, state.generation, chosen, [chosen], TierReason.ONLY_TIER, POOLS)
        total_s += time.thread_time() - began
        client = chosen.chosen.client
        sid = client.submit(submit, 500, Silence())
        if client.num_inflight > CREDIT // 2:
            client.on_frame(DownFrame([Delta(sid, [], finish=Finish.STOP)]))
    return total_s


async def reports(num_replicas: int, num_waiting: int, rounds: int, *, is_ours: bool) -> tuple[float, float]:
    """CPU seconds of a report while requests wait, and the least of a round's mean without those in which one is
    placed."""
    random = Random(0)
    index, replicas, metrics = PlainIndex(), Replicas(num_replicas, random), Metrics()
    config, counters = GatewayConfig(max_queue=2 * num_waiting), VirtualCounters()
    queue = (WaitQueue if is_ours else EagerQueue)(config.max_queue, 600.0, counters)
    callbacks = PoolCallbacks(queue.wake, lambda _: None, lambda *_: None, lambda *_: None, lambda *_: None)
    async with Fleet(POOLS, replicas.connect, index, callbacks, random) as fleet:
        fleet.update(replicas.members)
        await settle(lambda: len(fleet.ready_clients(["pool"])) == num_replicas)
        chains = Chains(bytes(32))
        dispatcher = RoutingDispatcher(
            POOLS,
            fleet,
            index,
            queue,
            Charges(counters),
            chains,
            config,
            metrics,
            Random(1),
            searching=open_search(),
        )
        fill(fleet)
        waiting = [
            asyncio.create_task(dispatcher.start(make_state(number, chains).generation))
            for number in range(num_waiting)
        ]
        await settle(lambda: len(queue) == num_waiting)
        idle: list[float] = []
        total_s, num_before = 0.0, len(queue)
        for turn in range(rounds):
            loads = [(member.replica_id, replicas.draw_load(10**9)) for member in replicas.members]
            ending = {member.replica_id for member in replicas.members[turn % 100 :: 100]}
            idle_s = 0.0
            for replica_id, load in loads:
                client = fleet.client(replica_id)
                assert client is not None
                ended = [Delta(turn // 100 + 1, [], finish=Finish.STOP)]
                frame = DownFrame(ended if replica_id in ending else [], load)
                began = time.thread_time()
                client.on_frame(frame)
                spent = time.thread_time() - began
                total_s += spent
                idle_s += 0.0 if replica_id in ending else spent
            idle.append(idle_s / (num_replicas - len(ending)))
            await asyncio.sleep(0)
        assert num_before - len(queue) == sum(len(replicas.members[turn % 100 :: 100]) for turn in range(rounds))
        for task in waiting:
            task.cancel()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            if not isinstance(result, BaseException):
                result.close()
    return total_s / rounds / num_replicas, min(idle)


def fill(fleet: Fleet) -> None:
    """Use up each replica's credit."""
    submit = Submit(0, "", b"", b"", b"", SamplingParams(1))
    for client in fleet.ready_clients(["pool"]):
        while client.num_inflight < CREDIT:
            client.submit(submit, 0, Silence())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    is_quick = parser.parse_args().quick
    rows = []
    for num_replicas in (1, 2, 4, 8, 16, 64, 512):
        batch, rounds = max(1, 256 // num_replicas), 3 if is_quick else 40
        for num_held, what in ((1, "one holds a prefix"), (num_replicas, "all hold some")):
            ours, rival = asyncio.run(decisions(num_replicas, num_held, rounds, batch))
            rows.append(Row(f"{num_replicas} replicas, {what}: a decision", ours * 1e6, rival * 1e6, "us"))
    for num_replicas in (64, 512):
        rounds = 2 if is_quick else 10
        ours_s, rival_s = (
            asyncio.run(reports(num_replicas, 1000, rounds if is_ours else 2, is_ours=is_ours))
            for is_ours in (True, False)
        )
        what = f"{num_replicas} replicas, 1,000 wait: a report"
        rows.append(Row(f"{what}, placings included", ours_s[0] * 1e6, rival_s[0] * 1e6, "us"))
        rows.append(Row(f"{what} that helps nobody", ours_s[1] * 1e6, rival_s[1] * 1e6, "us"))
        per_s = 100 * 50 * num_replicas
        rows.append(Row(f"{what} of each every 20 ms", ours_s[0] * per_s, rival_s[0] * per_s, "% of a core"))
    notes = [
        f"{os.cpu_count()} cores, which others used too; CPU time",
        "the rival of reports compares in C++ too, but decides anew at each report",
    ]
    write_report("decide", rows, notes=notes)


if __name__ == "__main__":
    main()
