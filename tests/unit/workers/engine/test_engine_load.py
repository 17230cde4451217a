"""What an engine tells gateways of itself: block events, its load, its costs, its drafts."""

import threading

from msgspec import structs

from penstock.wire.frames import BlockEvents, split_keys
from penstock.workers.config import SpeculationConfig
from penstock.workers.engine.engine import ADAPT_EVERY
from tests.unit.workers.engine.houses import CONFIG, COSTS, TIMEOUT_S, Gate, House
from tests.unit.workers.paged_hash import answer


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
