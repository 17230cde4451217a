"""Where a running engine's time goes: its clock stands still but when a step of the test takes time."""

import pytest

from penstock.wire.frames import Finish, TimeAccounts
from penstock.workers.engine.engine import MAX_FAILURES
from penstock.workers.engine.sequence import Sampled, Step
from tests.unit.workers.engine.houses import Device, Gate, House
from tests.unit.workers.engine.test_engine_failures import Picky


def take_time(house: House, seconds: float = 0.5) -> None:
    def pass_time() -> None:
        house.now += seconds

    house.runner.takes_time = pass_time


class Slow(Gate):
    """Steps take a second, and raise with a prompt that begins with 13."""

    house: House

    def compute(self, step: Step) -> list[list[Sampled]]:
        self.house.now += 1.0
        if any(chunk.seq.token_ids[0] == 13 for chunk in step.chunks):
            raise RuntimeError("bad row")
        return super().compute(step)


def test_a_sequence_alone_has_all_of_its_steps(house: House) -> None:
    take_time(house)

    seq = house.submit([1, 2, 3], max_tokens=4)
    house.until_finished(seq)

    assert seq.step_s == 2.0
    assert house.engine.accounts().steps_s == pytest.approx(2.0)


def test_sequences_together_have_the_time_between_them_and_each_second_once(gated: House) -> None:
    take_time(gated)
    seqs = [gated.submit([1, 2], max_tokens=3) for _ in range(3)]
    gated.runner.open()

    gated.until_finished(*seqs)

    steps_s = gated.engine.accounts().steps_s
    assert sum(seq.step_s for seq in seqs) == pytest.approx(steps_s)
    assert 0 < max(seq.step_s for seq in seqs) < steps_s


def test_a_wait_for_work_is_idle_time_and_behind_a_drain_it_is_the_drain_s(house: House) -> None:
    house.now += 7.0
    seq = house.submit([1], max_tokens=1)
    house.until_finished(seq)

    assert house.engine.accounts() == TimeAccounts(idle_s=7.0)

    house.engine.begin_drain()
    house.snapshot()
    house.now += 3.0

    assert house.engine.accounts() == TimeAccounts(idle_s=7.0, drain_s=3.0)


def test_a_step_that_fails_and_what_is_computed_of_it_again_are_apart(houses: list[House]) -> None:
    runner = Slow(is_open=False)
    house = House(runner)
    houses.append(house)
    runner.house = house
    good, bad = house.submit([1, 2], max_tokens=1), house.submit([13, 2], max_tokens=1)
    runner.open()

    assert house.until_finished(good, bad) == [Finish.LENGTH, Finish.ERROR]
    house.snapshot()

    accounts = house.engine.accounts()
    assert good.step_s == accounts.steps_s >= 1.0
    assert accounts.failed_s >= 2.0, "the step together, and the bad row alone"
    assert bad.step_s == 0.0


def test_a_row_without_a_choice_still_pays_for_its_step(houses: list[House]) -> None:
    house = House(Picky())
    houses.append(house)
    take_time(house)

    bad = house.submit([13, 2])
    house.until_finished(bad)

    assert bad.step_s == 0.5


def test_the_time_of_a_broken_engine_has_failed(houses: list[House]) -> None:
    house = House(Device())
    houses.append(house)
    house.runner.fails = MAX_FAILURES + 2
    seq = house.submit([1], max_tokens=2)

    assert house.until_finished(seq) == [Finish.REFUSED]
    house.snapshot()
    house.now += 4.0

    assert house.engine.accounts() == TimeAccounts(failed_s=4.0)
