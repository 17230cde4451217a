import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from msgspec import structs

from penstock.prefix.hashing import ChainHasher
from penstock.wire.errors import EngineFault
from penstock.wire.frames import BlockEvents, Finish, SamplingParams, StepCosts, split_keys
from penstock.workers.config import EngineConfig, SpeculationConfig, TimedConfig
from penstock.workers.engine.engine import ADAPT_EVERY, LOST, MAX_FAILURES, Engine, StepReport
from penstock.workers.engine.isolation import ROW_FAILED
from penstock.workers.engine.runner import Runner
from penstock.workers.engine.sequence import Sampled, SeqOutput, Sequence, Step, Times
from penstock.workers.engine.timed import TimedRunner
from tests.unit.workers.paged_hash import HashRunner, Proposal, answer, make_sequence

TIMEOUT_S = 20.0
BLOCK_SIZE = 4
CONFIG = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=4, max_batched_tokens=16, stall_s=5.0)
HASHER = ChainHasher(bytes(16), BLOCK_SIZE)
COSTS = StepCosts(base_s=1.0)


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


class Picky(Gate):
    """Finds no token for prompts that begin with 13."""

    def compute(self, step: Step) -> list[list[Sampled]]:
        chosen = super().compute(step)
        return [
            [Sampled(0, error="no choice")] if chunk.seq.token_ids[0] == 13 else choice
            for chunk, choice in zip(step.chunks, chosen, strict=True)
        ]


class Breaking(Gate):
    """Fails at a step of several rows, and for good when so many steps of one row have been computed after it."""

    def __init__(self, num_blocks: int, good_rows: int) -> None:
        super().__init__(num_blocks, is_open=False)
        self._good_rows = good_rows
        self._has_failed = False

    def compute(self, step: Step) -> list[list[Sampled]]:
        self._has_failed |= len(step.chunks) > 1
        if self._has_failed:
            if len(step.chunks) > 1 or not self._good_rows:
                raise RuntimeError("the device is gone")
            self._good_rows -= 1
        return super().compute(step)


class Poisoned(Gate):
    """Raises in the middle of a step that computes a prompt beginning with 13, once it has `phase` output tokens."""

    def __init__(self, phase: int, num_blocks: int, drafter: Proposal | None = None) -> None:
        super().__init__(num_blocks)
        self.drafter = drafter or self.drafter
        self._phase = phase

    def compute(self, step: Step) -> list[list[Sampled]]:
        sampled: list[list[Sampled]] = []
        for chunk in step.chunks:
            sampled.append(self._compute(chunk))
            if chunk.seq.token_ids[0] == 13 and chunk.seq.num_output_tokens >= self._phase:
                raise FloatingPointError
        return sampled


def _propose_answer(seq: Sequence, count: int) -> list[int]:
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    # never beyond the phase of a poisoned sequence: what is accepted there would be lost with the step
    return [] if prompt[0] == 13 else answer(prompt, seq.sampling)[seq.num_output_tokens :][:count]


POISON_DRAFTERS: dict[str, Proposal | None] = {"none": None, "right": _propose_answer}


class House:
    """A running engine and what it reported."""

    def __init__(self, runner: Gate, config: EngineConfig = CONFIG) -> None:
        self.runner = runner
        self.now = 1000.0
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
        ends = Counter(output.seq for report in self.received for output in report.outputs if output.finish is not None)
        assert all(count == 1 for count in ends.values()), "a sequence is reported as finished twice"
        assert self.runner.forgotten == list(dict.fromkeys(self.runner.forgotten))
        pool = self.engine._pool
        assert pool.num_free == pool.num_blocks
        pool.check([])


@pytest.fixture
def houses() -> Iterator[list[House]]:
    """Engines to stop at the end, with nothing held."""
    opened: list[House] = []
    yield opened
    for house in opened:
        house.stop()


@pytest.fixture(params=[Gate, Device])
def house(houses: list[House], request: pytest.FixtureRequest) -> House:
    houses.append(House(request.param()))
    return houses[0]


@pytest.fixture(params=[Gate, Device])
def gated(houses: list[House], request: pytest.FixtureRequest) -> House:
    """A running engine whose steps wait for `runner.passes`."""
    houses.append(House(request.param(is_open=False)))
    return houses[0]


def test_tokens_are_reported_as_they_are_made_and_the_last_with_its_finish(house: House) -> None:
    seq = house.submit([1, 2, 3, 4, 5], max_tokens=4)
    house.until_finished(seq)

    outputs = house.outputs(seq)
    assert [token for output in outputs for token in output.token_ids] == answer([1, 2, 3, 4, 5], seq.sampling)
    assert [output.finish for output in outputs] == [None, None, None, Finish.LENGTH]
    assert house.runner.forgotten == [seq]


def test_sequences_from_many_threads_all_finish(house: House) -> None:
    sequences: list[Sequence] = []
    threads = [
        threading.Thread(target=lambda first=first: sequences.append(house.submit([first, 2, 3], max_tokens=6)))
        for first in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    house.until_finished(*sequences)

    assert all(seq.token_ids[3:] == answer(seq.token_ids[:3], seq.sampling) for seq in sequences)
    assert len(house.runner.forgotten) == 20


def test_a_step_is_reported_while_a_device_computes_the_next_one(houses: list[House]) -> None:
    runner = Device(is_open=False)
    houses.append(house := House(runner))
    reported_at_launch: list[int] = []
    runner.on_launch = lambda: reported_at_launch.append(house.reports.qsize())
    seq = house.submit([1], max_tokens=3)

    for _ in range(2):
        runner.entered.get(timeout=TIMEOUT_S)
        runner.passes.release()
    runner.entered.get(timeout=TIMEOUT_S)  # the third is under way, and has not ended

    assert reported_at_launch == [0, 0, 1]
    assert house.reports.qsize() == 2
    runner.open()
    assert house.until_finished(seq) == [Finish.LENGTH]


def test_a_device_that_fails_loses_no_token_of_the_step_before(houses: list[House]) -> None:
    runner = Device(is_open=False)
    houses.append(house := House(runner))
    seq = house.submit([1], max_tokens=3)
    runner.entered.get(timeout=TIMEOUT_S)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    runner.on_launch = fail
    runner.open()

    assert house.until_finished(seq) == [Finish.REFUSED]
    assert [output.finish for output in house.outputs(seq)] == [None, Finish.REFUSED]


def test_a_submit_does_not_wait_for_the_step_under_way(gated: House) -> None:
    first = gated.submit([1])
    gated.runner.entered.get(timeout=TIMEOUT_S)
    second = gated.submit([2])  # returns, although the step hangs
    gated.runner.open()

    assert gated.until_finished(first, second) == [Finish.LENGTH, Finish.LENGTH]


def test_an_aborted_sequence_frees_its_blocks_before_the_next_step(gated: House) -> None:
    gone, stays = gated.submit([1] * 9), gated.submit([2] * 5, max_tokens=9)
    gated.runner.entered.get(timeout=TIMEOUT_S)
    gated.engine.abort(gone)
    gated.runner.passes.release()
    following = gated.runner.entered.get(timeout=TIMEOUT_S)

    assert [chunk.seq for chunk in following.chunks] == [stays]
    assert gone.block_table == []
    gated.runner.open()
    gated.until_finished(stays)
    assert [output.finish for output in gated.outputs(gone)][-1] is Finish.ABORT
    assert gated.runner.forgotten == [gone, stays]


def test_an_abort_of_a_finished_sequence_changes_nothing(house: House) -> None:
    seq = house.submit([1, 2])
    house.until_finished(seq)
    house.engine.abort(seq)
    house.snapshot()

    assert seq.finish is Finish.LENGTH
    assert house.reports.empty()


def test_a_deadline_ends_running_and_waiting_sequences(gated: House) -> None:
    sequences = [
        gated.submit([first], max_tokens=50, deadline=deadline)
        for first, deadline in enumerate([1010.0, None, 1010.0, 1020.0, 1010.0])
    ]
    gated.runner.entered.get(timeout=TIMEOUT_S)
    gated.now = 1011.0
    gated.runner.open()

    assert gated.until_finished(sequences[0], sequences[2], sequences[4]) == [Finish.DEADLINE] * 3
    assert sequences[0].error == "The deadline of the request passed."
    gated.until_finished(sequences[1], sequences[3])
    assert sequences[3].finish is Finish.LENGTH


def test_a_later_deadline_is_kept_too(gated: House) -> None:
    early, late = gated.submit([1], max_tokens=50, deadline=1010.0), gated.submit([2], max_tokens=50, deadline=1020.0)
    gated.runner.entered.get(timeout=TIMEOUT_S)
    gated.now = 1010.0
    gated.runner.passes.release()
    second = gated.runner.entered.get(timeout=TIMEOUT_S)
    gated.now = 1020.0
    gated.runner.open()

    assert [chunk.seq for chunk in second.chunks] == [late]
    assert gated.until_finished(early, late) == [Finish.DEADLINE, Finish.DEADLINE]


def test_a_refused_sequence_is_reported_at_once(gated: House) -> None:
    gated.submit([1], max_tokens=2)
    gated.runner.entered.get(timeout=TIMEOUT_S)
    refused = gated.submit([2] * 200)
    gated.runner.passes.release()

    assert gated.until_finished(refused) == [Finish.REFUSED]  # before the next step, which waits
    assert refused.error is not None
    assert refused.error.startswith("The sequence has 200 tokens")


def test_rows_without_a_choice_end_their_sequences_while_their_neighbours_and_the_engine_go_on(
    houses: list[House],
) -> None:
    house = House(Picky(is_open=False))
    houses.append(house)
    good = house.submit([1, 2, 3], max_tokens=6)
    bad = [house.submit([13, number, 3, 4, 5]) for number in range(MAX_FAILURES + 1)]
    house.runner.open()

    assert house.until_finished(good, *bad) == [Finish.LENGTH, *[Finish.ERROR] * len(bad)]
    assert [token for output in house.outputs(good) for token in output.token_ids] == answer([1, 2, 3], good.sampling)
    assert [(output.token_ids, output.seq.error) for seq in bad for output in house.outputs(seq)] == [
        ([], "no choice")
    ] * len(bad)
    assert house.engine.is_healthy(house.now)
    assert set(house.runner.forgotten) >= set(bad)


def test_a_step_that_fails_once_costs_nobody_anything(gated: House, caplog: pytest.LogCaptureFixture) -> None:
    gated.runner.fails = 1
    sequences = [gated.submit([first] * 9) for first in (1, 2, 3)]
    gated.runner.open()

    assert gated.until_finished(*sequences) == [Finish.LENGTH] * 3
    assert [seq.token_ids[9:] for seq in sequences] == [answer(seq.token_ids[:9], seq.sampling) for seq in sequences]
    assert gated.engine.is_healthy(gated.now)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("phase", [0, 7])
@pytest.mark.parametrize("num_blocks", [33 * 14, 90])  # room for all, and so little that sequences are preempted
@pytest.mark.parametrize("drafter", sorted(POISON_DRAFTERS))
def test_of_32_streams_none_fails_beside_50_sequences_that_make_steps_raise(
    houses: list[House], phase: int, num_blocks: int, drafter: str
) -> None:
    runner = Poisoned(phase, num_blocks, POISON_DRAFTERS[drafter])
    speculation = SpeculationConfig(method="ngram" if drafter == "right" else "none", adaptive=False)
    config = structs.replace(CONFIG, max_num_seqs=33, max_batched_tokens=99, speculation=speculation)
    houses.append(house := House(runner, config))
    poisons: list[Sequence] = []
    innocent: list[Sequence] = []
    for number in range(50):
        while sum(seq.finish is None for seq in innocent) < 32:
            innocent.append(house.submit([len(innocent) % 13, 2, number % 40, 4, 5], max_tokens=40))
        poisons.append(house.submit([13, number % 40, *range(number % 9)], max_tokens=20))
        house.until_finished(poisons[-1])
    while any(seq.finish is None for seq in innocent):
        house.next_report()

    assert [(seq.finish, seq.error) for seq in poisons] == [(Finish.ERROR, ROW_FAILED)] * 50
    assert [seq.num_output_tokens for seq in poisons] == [phase] * 50
    assert {seq.finish for seq in innocent} == {Finish.LENGTH}
    assert all(seq.token_ids[5:] == answer(seq.token_ids[:5], seq.sampling) for seq in innocent)
    assert house.engine.is_healthy(house.now)
    assert num_blocks > 90 or any(seq.num_preemptions for seq in innocent)


def test_sequences_that_fail_alone_in_an_idle_engine_leave_it_healthy(houses: list[House]) -> None:
    houses.append(house := House(Poisoned(0, 32)))
    poisons = [house.submit([13, number]) for number in range(MAX_FAILURES + 3)]

    assert house.until_finished(*poisons) == [Finish.ERROR] * len(poisons)
    assert house.engine.is_healthy(house.now)
    assert set(poisons) <= set(house.runner.forgotten)


def test_what_a_sequence_wrote_in_a_step_that_failed_is_not_cached(houses: list[House]) -> None:
    houses.append(house := House(Poisoned(0, 32)))
    failed = house.submit([13] * 9)
    house.until_finished(failed)

    assert set(failed.block_keys).isdisjoint(split_keys(house.snapshot().stored))


def test_where_nothing_can_be_computed_sequences_are_refused_as_lost_so_that_others_go_on_with_them(
    gated: House, caplog: pytest.LogCaptureFixture
) -> None:
    gated.runner.fails = 2  # the step, and the check whether anything can be computed
    failed = gated.submit([1] * 9)
    gated.runner.entered.get(timeout=TIMEOUT_S)
    waiting = gated.submit([2] * 3)
    gated.runner.open()

    assert gated.until_finished(failed, waiting) == [Finish.REFUSED, Finish.LENGTH]
    assert failed.error == LOST
    assert [report.is_broken for report in gated.received if report.outputs][:2] == [True, False]
    assert gated.engine.is_healthy(gated.now)
    assert "the device is gone" in caplog.text


@pytest.mark.parametrize(
    ("num_blocks", "good_rows"), [(2, 0), (2, 1), (32, 0), (32, 1), (32, 2)]
)  # of 2 blocks none is free when the step fails; else the first row after it is the check
def test_a_device_that_breaks_in_a_step_or_among_its_parts_is_nobodys_fault(
    houses: list[House], num_blocks: int, good_rows: int
) -> None:
    houses.append(house := House(Breaking(num_blocks, good_rows)))
    lost = [house.submit([first] * 3) for first in (1, 2)]
    house.runner.open()

    assert house.until_finished(*lost) == [Finish.REFUSED] * 2
    assert [seq.error for seq in lost] == [LOST] * 2
    assert not house.engine.is_healthy(house.now)
    assert any(report.is_broken for report in house.received)


def test_a_sequence_that_fails_alone_and_holds_every_block_leaves_the_engine_healthy(houses: list[House]) -> None:
    houses.append(house := House(Poisoned(2, num_blocks=2)))
    failed = house.submit([13] * 5)

    assert house.until_finished(failed) == [Finish.ERROR]
    assert house.engine.is_healthy(house.now)


def test_an_engine_that_computes_nothing_is_unhealthy_and_closed(house: House) -> None:
    house.runner.fails = 2 * MAX_FAILURES
    for _ in range(MAX_FAILURES):
        assert house.engine.is_healthy(house.now)
        house.until_finished(house.submit([1]))

    assert not house.engine.is_healthy(house.now)
    assert house.received[-1].load.is_closed
    house.until_finished(house.submit([1]))
    assert house.engine.is_healthy(house.now)
    assert not house.received[-1].load.is_closed


def test_an_engine_is_unhealthy_while_a_step_takes_too_long(gated: House) -> None:
    gated.submit([1], max_tokens=1)
    gated.runner.entered.get(timeout=TIMEOUT_S)

    assert gated.engine.is_healthy(gated.now + CONFIG.stall_s)
    assert not gated.engine.is_healthy(gated.now + CONFIG.stall_s + 0.1)


def test_an_idle_engine_stays_healthy(house: House) -> None:
    house.until_finished(house.submit([1]))
    house.snapshot()

    assert house.engine.is_healthy(house.now + 1e6)


def test_an_engine_whose_thread_is_gone_is_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    def on_step(report: StepReport) -> None:
        raise ZeroDivisionError

    engine = Engine(Gate(), CONFIG, HASHER, on_step, measure_costs=lambda runner, config: COSTS)
    assert not engine.is_healthy(time.monotonic())
    engine.start()
    assert engine.is_healthy(time.monotonic())
    engine.submit(make_sequence(HASHER, [1], SamplingParams(max_tokens=1)))
    engine._thread.join(TIMEOUT_S)

    assert not engine.is_healthy(time.monotonic())
    assert "The engine's thread ends." in caplog.text


def test_an_engine_that_can_not_be_measured_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    def measure_costs(runner: Runner, config: EngineConfig) -> StepCosts:
        raise MemoryError

    with pytest.raises(EngineFault, match="step times"):
        Engine(Gate(), CONFIG, HASHER, print, measure_costs=measure_costs).start()
    assert caplog.records[0].levelno == logging.ERROR


def test_block_events_and_a_snapshot_tell_the_same(houses: list[House]) -> None:
    house = House(Gate(num_blocks=8))  # small, so that blocks are evicted
    houses.append(house)
    for first in range(6):
        house.until_finished(house.submit([first] * 11, max_tokens=6))
    snapshot = house.snapshot()

    mirror: set[bytes] = set()
    events = [report.events for report in house.received if report.events is not None]
    for event in events:
        mirror = (mirror | set(split_keys(event.stored))) - set(split_keys(event.removed))
    assert [event.event_seq for event in events] == list(range(1, len(events) + 1))
    assert any(event.removed for event in events)
    assert set(split_keys(snapshot.stored)) == mirror
    assert (snapshot.event_seq, snapshot.is_snapshot) == (len(events), True)


def test_the_load_counts_what_runs_and_what_waits(houses: list[House]) -> None:
    houses.append(gated := House(Gate(is_open=False)))
    has_submitted = threading.Event()

    def hold_up(_: BlockEvents) -> None:
        assert has_submitted.wait(TIMEOUT_S)

    gated.engine.request_snapshot(hold_up)  # so that all of them meet the first step
    for token, length in enumerate([3, 20, 5, 6, 7]):
        gated.submit([token] * length, max_tokens=3)
    has_submitted.set()
    gated.runner.passes.release(2)
    first, second = gated.next_report().load, gated.next_report().load

    # 3 + 10 + 3 tokens; then a decoding row, the other 10 and 2, and 3 tokens of the next one
    assert (first.num_running, first.num_waiting, first.prefill_tokens_outstanding) == (3, 2, 10 + 2 + 6 + 7)
    assert (second.num_running, second.num_waiting, second.prefill_tokens_outstanding) == (4, 1, 3 + 7)
    assert (first.kv_tokens, second.kv_tokens) == (4 + 20 + 5, 5 + 21 + 6 + 6)
    assert (first.free_blocks, second.free_blocks) == (32 - 1 - 5 - 2, 32 - 1 - 5 - 2 - 2)
    assert (first.total_blocks, first.costs) == (32, COSTS)
    assert (first.unplaced_tokens, second.unplaced_tokens) == (6 + 7, 7)


def test_what_waits_for_blocks_and_may_be_passed_keeps_nobody_out(houses: list[House]) -> None:
    houses.append(gated := House(Gate(num_blocks=8, is_open=False)))
    holder = gated.submit([1] * 20, max_tokens=11)
    gated.runner.entered.get(timeout=TIMEOUT_S)
    gated.submit([2] * 15)
    gated.runner.passes.release(1)
    unknown = gated.next_report().load
    gated.runner.entered.get(timeout=TIMEOUT_S)
    gated.runner.passes.release(1)
    blocked = gated.next_report().load
    gated.runner.open()

    assert unknown.unplaced_tokens == 0  # it came in after the step had begun
    assert (blocked.num_waiting, blocked.unplaced_tokens) == (1, 0)
    gated.until_finished(holder)


def test_an_idle_engine_has_no_load(house: House) -> None:
    house.until_finished(house.submit([1] * 9))
    load = house.received[-1].load

    assert (load.num_running, load.num_waiting, load.prefill_tokens_outstanding, load.kv_tokens) == (0, 0, 0, 0)
    assert load.free_blocks == load.total_blocks
    assert load.event_seq == len([report for report in house.received if report.events])


def test_costs_follow_the_measured_steps_slowly(house: House) -> None:
    def takes_time() -> None:
        house.now += 4.0

    house.until_finished(house.submit([1], max_tokens=ADAPT_EVERY - 1))
    assert house.received[-1].load.costs == COSTS
    house.runner.takes_time = takes_time
    house.until_finished(house.submit([1], max_tokens=1))
    early = house.received[-1].load.costs.base_s
    house.until_finished(house.submit([1], max_tokens=14 * ADAPT_EVERY))
    late = [report.load.costs.base_s for report in house.received[-ADAPT_EVERY - 1 :]]

    assert 1.0 < early < 1.2
    assert 2.0 < late[-1] < 4.0
    assert 1.0 < late[-1] / late[0] < 1.1


def test_a_draining_engine_finishes_what_it_has_and_refuses_more(gated: House) -> None:
    seq = gated.submit([1] * 5, max_tokens=6)
    gated.runner.entered.get(timeout=TIMEOUT_S)

    assert not gated.engine.stop(drain=True, timeout_s=0.0)
    late = gated.submit([2])
    gated.runner.open()
    assert gated.engine.stop(drain=True, timeout_s=TIMEOUT_S)
    assert gated.until_finished(seq, late) == [Finish.LENGTH, Finish.REFUSED]
    assert late.error == "The replica is draining."


def test_a_stop_aborts_what_runs(gated: House) -> None:
    seq = gated.submit([1] * 5, max_tokens=60)
    gated.runner.entered.get(timeout=TIMEOUT_S)
    gated.stop()

    assert seq.finish is Finish.ABORT
    assert gated.outputs(seq)[-1].finish is Finish.ABORT
    assert gated.engine.stop()


def test_an_engine_that_never_started_can_be_stopped() -> None:
    assert Engine(Gate(), CONFIG, HASHER, print).stop()


def test_an_engine_with_a_timed_runner_knows_its_costs_without_a_probe() -> None:
    config = EngineConfig(runner="timed", timed=TimedConfig(base_s=0.001, row_s=0.0001))
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    hasher = ChainHasher(bytes(16), config.block_size)
    engine = Engine(TimedRunner(config), config, hasher, reports.put)
    engine.start()
    engine.submit(make_sequence(hasher, [1, 2, 3], SamplingParams(max_tokens=2)))

    assert reports.get(timeout=TIMEOUT_S).load.costs == StepCosts(base_s=0.001, row_s=0.0001)
    assert engine.stop(drain=True, timeout_s=TIMEOUT_S)


def test_drafts_are_counted_in_the_load_and_come_as_several_tokens_at_once(houses: list[House]) -> None:
    runner = Gate()
    runner.drafter = lambda seq, count: answer(seq.token_ids[: seq.num_prompt_tokens], seq.sampling)[
        seq.num_output_tokens :
    ][:count]
    config = structs.replace(CONFIG, speculation=SpeculationConfig(method="ngram", max_draft_tokens=3, adaptive=False))
    houses.append(house := House(runner, config))
    seq = house.submit([1, 2, 3, 4, 5], max_tokens=9)
    house.until_finished(seq)

    assert [len(output.token_ids) for output in house.outputs(seq)] == [1, 4, 4]
    assert [token for output in house.outputs(seq) for token in output.token_ids] == answer(
        [1, 2, 3, 4, 5], seq.sampling
    )
    assert (house.received[-1].load.num_drafted, house.received[-1].load.num_accepted) == (6, 6)


def test_a_traced_sequence_is_timed_step_by_step(gated: House) -> None:
    seq = make_sequence(HASHER, [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    seq.arrival_s, seq.times = 990.0, Times()
    gated.engine.submit(seq)

    for _ in range(2):
        gated.runner.entered.get(timeout=TIMEOUT_S)
        gated.unix_now += 1.0  # the step takes a second
        gated.runner.passes.release()
        gated.next_report()

    assert seq.times == Times(wait_s=10.0, admitted_s=5000.0, first_token_s=5001.0, last_token_s=5002.0)
