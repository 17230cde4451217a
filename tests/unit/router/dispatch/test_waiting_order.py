"""The order of waiting requests without an event loop; on one it is tested in test_waiting.py."""

from collections.abc import Callable, Sequence
from random import Random

import pytest

from penstock.router.dispatch.attempt import AttemptResult
from penstock.router.dispatch.lane import Claim, Lane
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.waiting_order import MAX_MOVED_BACK, WaitingOrder
from penstock.tenancy.share import Share
from penstock.wire.errors import DeadlineExceeded, Overloaded, RateLimited

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


# overdue


class Late:
    """Attempts of requests of which those in `late` would come too late, once told."""

    def __init__(self, places: Places, late: set[int]) -> None:
        self.places, self.late = places, late

    def of(self, arrival: int) -> Callable[[], AttemptResult]:
        def attempt() -> AttemptResult:
            if self.places.num_free and arrival in self.late:
                self.late.remove(arrival)
                return AttemptResult.OVERDUE
            return self.places.attempt()

        return attempt


def begin_all(order: WaitingOrder, late: Late, claims: Sequence[Claim]) -> list[RecordedTurn]:
    turns = [RecordedTurn() for _ in claims]
    for claim, turn in zip(claims, turns, strict=True):
        order.enter(claim.tenant)
        order.begin(LANE, late.of(claim.arrival), claim, turn, deadline_in_s=60)
    return turns


def placed(turns: Sequence[RecordedTurn]) -> list[int]:
    return [place for place, turn in enumerate(turns) if turn.result is AttemptResult.PLACED]


def test_the_overdue_go_behind_all_that_may_be_in_time_and_are_placed_when_none_of_those_is_left() -> None:
    order, places = make_order(), Places()
    claims = [Claim(0, "a"), Claim(1, "a"), Claim(2, "b"), Claim(3, "a"), Claim(4, "b")]
    turns = begin_all(order, Late(places, {0, 1, 2}), claims)

    places.num_free = 2
    order.wake("pool")
    assert placed(turns) == [3, 4]
    places.num_free = 2
    order.wake("pool")
    assert placed(turns) == [0, 1, 3, 4]
    places.num_free = 1
    order.wake("pool")
    assert placed(turns) == [0, 1, 2, 3, 4]
    assert len(order) == 0


def test_among_the_overdue_too_the_tenant_goes_first_that_has_had_less() -> None:
    counters = VirtualCounters()
    order = WaitingOrder(8, 30.0, counters, max_share=1.0, clock=lambda: 0.0, random=Random(0))
    places = Places()
    order.enter("other")
    turns = begin_all(order, Late(places, {0, 1, 2}), [Claim(0, "tenant"), Claim(1, "tenant"), Claim(2, "other")])
    counters.charge("tenant", 10.0, 1.0)

    for expected in ([2], [0, 2], [0, 1, 2]):
        places.num_free = 1
        order.wake("pool")
        assert placed(turns) == expected


def test_a_newcomer_that_may_be_in_time_goes_before_the_overdue_and_one_that_is_overdue_does_not() -> None:
    order, places = make_order(), Places()
    late = Late(places, {0, 8})
    turns = begin_all(order, late, [Claim(0, "tenant"), Claim(1, "tenant")])
    places.num_free = 1
    order.wake("pool")
    assert placed(turns) == [1]

    places.num_free = 1
    assert order.try_first(LANE, late.of(8), Claim(8, "tenant")) is AttemptResult.OVERDUE
    turn = RecordedTurn()
    order.begin(LANE, late.of(8), Claim(8, "tenant"), turn, deadline_in_s=60, is_overdue=True)
    assert order.try_first(LANE, late.of(9), Claim(9, "tenant")) is AttemptResult.PLACED
    places.num_free = 1
    order.wake("pool")
    assert placed(turns) == [0, 1]
    assert turn.result is None


def test_among_the_overdue_priority_counts() -> None:
    order, places = make_order(), Places()
    turns = begin_all(order, Late(places, {0, 1}), [Claim(0, "tenant"), Claim(1, "tenant", priority=-1)])

    places.num_free = 1
    order.wake("pool")

    assert placed(turns) == [1]


def test_the_wait_of_the_overdue_is_not_what_a_newcomer_has_to_expect() -> None:
    now = 0.0
    order = WaitingOrder(8, 30.0, VirtualCounters(), max_share=1.0, clock=lambda: now, random=Random(0))
    places = Places()
    late = Late(places, {0})
    begin_all(order, late, [Claim(0, "tenant")])
    now = 5.0
    begin_all(order, late, [Claim(1, "tenant")])
    now = 7.0
    assert order.oldest_s("pool") == 7.0

    places.num_free = 1
    order.wake("pool")
    begin_all(order, late, [Claim(2, "tenant")])
    assert order.oldest_s("pool") == 0.0
    assert order.num_waiting("pool") == 2


def test_so_many_at_most_are_found_to_be_overdue_at_once() -> None:
    count = MAX_MOVED_BACK + 8
    order, places = make_order(max_waiting=2 * count), Places()
    turns = begin_all(order, Late(places, set(range(count))), [Claim(arrival, "t") for arrival in range(count + 1)])
    places.num_free = 1
    assert order.wake("pool"), "it is to be called again"
    assert placed(turns) == []
    assert not order.wake("pool")
    assert placed(turns) == [count]


def test_one_that_is_overdue_is_placed_at_once_where_there_is_nobody_to_let_go_first() -> None:
    order, places = make_order(), Places()
    late = Late(places, {0, 1})
    places.num_free = 1
    assert order.try_first(LANE, late.of(0), Claim(0, "tenant")) is AttemptResult.PLACED
    begin_all(order, late, [Claim(2, "tenant")])
    places.num_free = 1
    assert order.try_first(LANE, late.of(1), Claim(1, "other")) is AttemptResult.OVERDUE
    assert places.num_free == 1


def test_one_that_is_overdue_itself_throws_out_nobody() -> None:
    order, places = make_order(2), Places()
    turns = [RecordedTurn() for _ in range(3)]
    for arrival in (0, 1):
        order.begin(LANE, places.attempt, Claim(arrival, "tenant"), turns[arrival], deadline_in_s=60, is_overdue=True)
    with pytest.raises(Overloaded):
        order.begin(LANE, places.attempt, Claim(2, "tenant"), turns[2], deadline_in_s=60, is_overdue=True)
    assert [turn.result for turn in turns] == [None, None, None]


@pytest.mark.parametrize(("max_waiting", "max_share"), [(3, 1.0), (6, 0.5)])
def test_where_the_queue_or_the_tenants_share_is_full_the_overdue_make_way(max_waiting: int, max_share: float) -> None:
    order, places = make_order(max_waiting, max_share=max_share), Places()

    def begin(arrival: int, priority: int, *, is_overdue: bool = False) -> RecordedTurn:
        turn, claim = RecordedTurn(), Claim(arrival, "tenant", priority=priority)
        order.enter("tenant")
        order.begin(LANE, places.attempt, claim, turn, deadline_in_s=60, is_overdue=is_overdue)
        return turn

    urgent, early, late = begin(0, -5, is_overdue=True), begin(1, 0, is_overdue=True), begin(2, 0, is_overdue=True)
    begin(3, 0)
    assert isinstance(late.result, Overloaded)
    begin(4, 0)
    assert isinstance(early.result, Overloaded)
    with pytest.raises((Overloaded, RateLimited)):
        begin(5, 0)
    assert urgent.result is None
    assert len(order) == 3
    begin(6, -5)
    assert isinstance(urgent.result, Overloaded)
    assert len(order) == 3


def test_an_overdue_one_that_gives_up_leaves_no_trace() -> None:
    order, places = make_order(), Places()
    late = Late(places, {0, 1})
    waiters = [
        order.begin(LANE, late.of(arrival), Claim(arrival, "tenant"), RecordedTurn(), deadline_in_s=60)
        for arrival in range(4)
    ]
    places.num_free = 1
    order.wake("pool")
    assert [waiter.is_overdue for waiter in waiters] == [True, True, False, False]
    order.give_up(waiters[0])
    places.num_free = 2
    order.wake("pool")
    assert (len(order), order.num_waiting("pool"), order.oldest_s("pool")) == (0, 0, 0.0)
    assert [waiter.has_left for waiter in waiters] == [True] * 4
