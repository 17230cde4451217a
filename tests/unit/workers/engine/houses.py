"""A running engine, what it reports, and a runner whose steps wait to be let through."""

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable

from msgspec.structs import astuple

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import BlockEvents, Finish, SamplingParams, StepCosts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Sampled, SeqOutput, Sequence, Step
from tests.unit.workers.paged_hash import HashRunner, make_sequence

TIMEOUT_S = 20.0
BLOCK_SIZE = 4
CONFIG = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=4, max_batched_tokens=16, stall_s=5.0)
HASHER = ChainHasher(bytes(16), BLOCK_SIZE)
COSTS = StepCosts(base_s=1.0)
BEGAN_S = 1000.0


class Gate(HashRunner):
    """A runner whose steps wait to be let through; `fails` makes the next ones raise."""

    def __init__(self, num_blocks: int = 32, *, is_open: bool = True) -> None:
        super().__init__(num_blocks, BLOCK_SIZE)
        self.entered: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self.passes = threading.Semaphore(10_000 if is_open else 0)
        self.fails = 0
        self.takes_time: Callable[[], None] = lambda: None

    def compute(self, step: Step) -> list[list[Sampled]]:
        self.entered.put(step)
        assert self.passes.acquire(timeout=TIMEOUT_S)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the device is gone")
        self.takes_time()
        return super().compute(step)

    def open(self) -> None:
        self.passes.release(10_000)


class Device(Gate):
    """Computes by itself: a step is under way when `launch` returns, and waits to be let through when somebody waits
    for it."""

    is_asynchronous = True

    def __init__(self, num_blocks: int = 32, *, is_open: bool = True) -> None:
        super().__init__(num_blocks, is_open=is_open)
        self.on_launch: Callable[[], None] = lambda: None

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        self.on_launch()
        return lambda: self.compute(step)


class House:
    """A running engine and what it reported."""

    def __init__(self, runner: Gate, config: EngineConfig = CONFIG) -> None:
        self.runner = runner
        self.now = BEGAN_S
        self.unix_now = 5000.0
        self.reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.received: list[StepReport] = []
        self.engine = Engine(
            runner,
            config,
            HASHER,
            self.reports.put,
            lambda: self.now,
            unix_clock=lambda: self.unix_now,
            measure_costs=lambda runner, config: COSTS,
        )
        self.engine.start()

    def submit(self, prompt: list[int], max_tokens: int = 4, deadline: float | None = None) -> Sequence:
        seq = make_sequence(HASHER, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), deadline=deadline)
        self.engine.submit(seq)
        return seq

    def next_report(self) -> StepReport:
        self.received.append(self.reports.get(timeout=TIMEOUT_S))
        return self.received[-1]

    def until_finished(self, *sequences: Sequence) -> list[Finish | None]:
        ended: dict[Sequence, Finish | None] = {}
        while not set(sequences) <= set(ended):
            ended |= {output.seq: output.finish for output in self.next_report().outputs if output.finish is not None}
        return [ended[seq] for seq in sequences]

    def outputs(self, seq: Sequence) -> list[SeqOutput]:
        return [output for report in self.received for output in report.outputs if output.seq is seq]

    def snapshot(self) -> BlockEvents:
        snapshots: queue.SimpleQueue[BlockEvents] = queue.SimpleQueue()
        self.engine.request_snapshot(snapshots.put)
        return snapshots.get(timeout=TIMEOUT_S)

    def stop(self) -> None:
        self.runner.open()
        assert self.engine.stop(timeout_s=TIMEOUT_S)
        while not self.reports.empty():
            self.next_report()
        accounts = self.engine.accounts()
        assert math.isclose(sum(astuple(accounts)), self.now - BEGAN_S), "each second is in one account"
        seqs = {output.seq for report in self.received for output in report.outputs}
        assert math.isclose(sum(seq.step_s for seq in seqs), accounts.steps_s), "the steps' time is the sequences'"
        ends = Counter(output.seq for report in self.received for output in report.outputs if output.finish is not None)
        assert all(count == 1 for count in ends.values()), "a sequence is reported as finished twice"
        assert self.runner.forgotten == list(dict.fromkeys(self.runner.forgotten))
        pool = self.engine._pool
        assert pool.num_free == pool.num_blocks
        pool.check([])
