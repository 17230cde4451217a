"""The engine's thread: submits, aborts, deadlines, draining and its end."""

import logging
import queue
import threading

import pytest

from penstock.prefix.hashing import ChainHasher
from penstock.wire.errors import EngineFault
from penstock.wire.frames import Finish, SamplingParams, StepCosts
from penstock.workers.config import EngineConfig, TimedConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.runner import Runner
from penstock.workers.engine.sequence import Sequence, Times
from penstock.workers.engine.timed import TimedRunner
from tests.unit.workers.engine.houses import CONFIG, HASHER, TIMEOUT_S, Device, Gate, House
from tests.unit.workers.paged_hash import answer, make_sequence


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


def test_an_engine_that_can_not_be_measured_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    def measure_costs(runner: Runner, config: EngineConfig) -> StepCosts:
        raise MemoryError

    with pytest.raises(EngineFault, match="step times"):
        Engine(Gate(), CONFIG, HASHER, print, measure_costs=measure_costs).start()
    assert caplog.records[0].levelno == logging.ERROR


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
