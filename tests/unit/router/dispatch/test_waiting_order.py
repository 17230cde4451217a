"""The order of waiting requests without an event loop; on one it is tested in test_waiting.py."""

from random import Random

import pytest

from penstock.router.dispatch.attempt import AttemptResult
from penstock.router.dispatch.lane import Claim, Lane
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting_order import WaitingOrder
from penstock.tenancy.share import Share
from penstock.wire.errors import DeadlineExceeded, Overloaded

LANE = Lane(("pool",))


class RecordedTurn:
    """A turn that remembers what it was told."""

    def __init__(self) -> None:
        self.result: AttemptResult | Exception | None = None

    def done(self) -> bool:
        return self.result is not None

    def set_result(self, result: AttemptResult) -> None:
        self.result = result

    def set_exception(self, error: Exception) -> None:
        self.result = error


class Places:
    def __init__(self) -> None:
        self.num_free = 0

    def attempt(self) -> AttemptResult:
        if not self.num_free:
            return AttemptResult.MUST_WAIT
        self.num_free -= 1
        return AttemptResult.PLACED


def make_order(max_waiting: int = 8, timeout_s: float = 30.0, max_share: float = 1.0) -> WaitingOrder:
    return WaitingOrder(
        max_waiting, timeout_s, VirtualCounters(), max_share=max_share, clock=lambda: 0.0, random=Random(0)
    )


def test_a_wake_tells_as_many_turns_as_there_are_places() -> None:
    order, places, turns = make_order(), Places(), [RecordedTurn() for _ in range(3)]
    for arrival, turn in enumerate(turns):
        order.enter("tenant")
        assert order.try_first(LANE, places.attempt, Claim(arrival, "tenant")) is None
        order.begin(LANE, places.attempt, Claim(arrival, "tenant"), turn, deadline_in_s=60)

    places.num_free = 2
    order.wake("pool")

    assert [turn.result for turn in turns] == [AttemptResult.PLACED, AttemptResult.PLACED, None]
    assert len(order) == order.num_waiting("pool") == 1


def test_what_an_attempt_raises_is_told_to_its_turn_and_the_next_one_is_tried() -> None:
    order, places, first, second = make_order(), Places(), RecordedTurn(), RecordedTurn()
    error, is_broken = ValueError("broken"), False

    def fail() -> AttemptResult:
        if is_broken:
            raise error
        return AttemptResult.MUST_WAIT

    order.enter("tenant")
    order.begin(LANE, fail, Claim(0, "tenant"), first, deadline_in_s=60)
    order.begin(LANE, places.attempt, Claim(1, "tenant"), second, deadline_in_s=60)
    is_broken, places.num_free = True, 1
    order.wake("pool")

    assert first.result is error
    assert second.result is AttemptResult.PLACED


def test_what_asking_for_help_raises_is_told_to_the_turn_too() -> None:
    order, places, first, second = make_order(), Places(), RecordedTurn(), RecordedTurn()
    error = ValueError("broken")

    def fail(_replica_id: str) -> bool:
        raise error

    order.enter("tenant")
    order.begin(LANE, places.attempt, Claim(0, "tenant"), first, deadline_in_s=60, may_help=fail)
    order.begin(LANE, places.attempt, Claim(1, "tenant"), second, deadline_in_s=60)
    order.wake("pool")
    places.num_free = 1
    order.wake("pool", "a")

    assert first.result is error
    assert second.result is AttemptResult.PLACED


def test_who_is_held_takes_no_place_of_the_queue_and_is_displaced_by_none() -> None:
    order, places, held = make_order(max_waiting=2, max_share=0.5), Places(), [RecordedTurn() for _ in range(3)]
    batch, live = Claim(9, "tenant", Share(service_class="batch")), Lane(("live",))
    order.enter("tenant")
    for arrival, turn in enumerate(held):
        claim = batch._replace(arrival=arrival)
        order.begin(LANE, places.attempt, claim, turn, deadline_in_s=60, timeout_s=600, is_held=True)
    assert (len(order), order.num_unheld) == (3, 0)
    order.begin(live, places.attempt, batch, RecordedTurn(), deadline_in_s=60)
    order.begin(live, places.attempt, Claim(10, "other"), RecordedTurn(), deadline_in_s=60)
    with pytest.raises(Overloaded):
        order.begin(live, places.attempt, Claim(11, "third", batch.share), RecordedTurn(), deadline_in_s=60)
    assert (len(order), order.num_unheld) == (5, 2)
    places.num_free = 3
    order.wake("pool")

    assert [turn.result for turn in held] == [AttemptResult.PLACED] * 3
    assert (len(order), order.num_unheld) == (2, 2)


@pytest.mark.parametrize(("deadline_in_s", "kind"), [(5.0, DeadlineExceeded), (60.0, Overloaded)])
def test_a_waiter_whose_patience_ends_is_told_why_and_leaves_no_trace(
    deadline_in_s: float, kind: type[Exception]
) -> None:
    order, places = make_order(), Places()
    order.enter("tenant")
    waiter = order.begin(LANE, places.attempt, Claim(0, "tenant"), RecordedTurn(), deadline_in_s=deadline_in_s)

    error = order.explain_late(waiter, deadline_in_s)
    order.give_up(waiter)
    order.leave("tenant")

    assert order.patience_s(deadline_in_s) == min(30.0, deadline_in_s)
    assert isinstance(error, kind)
    assert (len(order), order.oldest_s("pool")) == (0, 0.0)


def test_a_head_that_had_to_wait_is_tried_again_only_for_a_change_that_may_help_it() -> None:
    order, places, asked, tried = make_order(), Places(), list[str](), list[int]()

    def wait(arrival: int) -> RecordedTurn:
        def attempt() -> AttemptResult:
            tried.append(arrival)
            return places.attempt()

        def may_help(replica_id: str) -> bool:
            asked.append(replica_id)
            return replica_id == "b"

        turn = RecordedTurn()
        order.enter("tenant")
        order.begin(LANE, attempt, Claim(arrival, "tenant"), turn, deadline_in_s=60, may_help=may_help)
        return turn

    first, second = wait(0), wait(1)
    order.wake("pool", "a")  # it has not been tried yet: what changed before, nobody has shown it
    assert (tried, asked) == ([0], [])
    order.wake("pool", "a")
    assert (tried, asked) == ([0], ["a"])
    order.wake("pool")  # anything may have changed
    assert tried == [0, 0]
    places.num_free = 1
    order.wake("pool", "b")
    order.wake("pool", "a")

    assert (first.result, second.result) == (AttemptResult.PLACED, None)
    assert tried == [0, 0, 0, 1]  # the next head is tried once, whatever changed
    assert asked == ["a", "b", "a"]
