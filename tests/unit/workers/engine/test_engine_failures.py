"""Steps that fail, sequences that make them fail, and an engine that is no longer healthy."""

import time

import pytest
from msgspec import structs

from penstock.wire.frames import Finish, SamplingParams, split_keys
from penstock.workers.config import SpeculationConfig
from penstock.workers.engine.engine import LOST, MAX_FAILURES, Engine, StepReport
from penstock.workers.engine.isolation import ROW_FAILED
from penstock.workers.engine.sequence import Sampled, Sequence, Step
from tests.unit.workers.engine.houses import CONFIG, COSTS, HASHER, TIMEOUT_S, Device, Gate, House
from tests.unit.workers.paged_hash import Proposal, answer, make_sequence


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
