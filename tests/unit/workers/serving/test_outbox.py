from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.frames import BlockEvents, Delta, Finish, Load, StepCosts, Timing, TokenLogprobs
from penstock.workers.serving.outbox import ALONE_S, FRAME_S, REPORT_S, Outbox, merge_deltas

LOAD = Load("e", 0, 8, 0, 0, 0, 0, 10, 10, StepCosts(), 512)


def reported() -> Outbox:
    """An outbox whose first load went out at time 0."""
    outbox = Outbox()
    assert outbox.take(0.0, LOAD) is not None
    return outbox


def test_the_first_load_is_due_at_once() -> None:
    outbox = Outbox()

    assert outbox.due_s() == float("-inf")
    assert outbox.wants_load(0.0)


def test_nothing_to_tell_is_no_frame() -> None:
    outbox = reported()

    assert outbox.due_s() is None
    assert outbox.take(1.0, None) is None


def test_a_delta_waits_only_for_the_distance_to_the_deltas_before() -> None:
    outbox = reported()
    outbox.add(Delta(1, [7]))
    assert outbox.due_s() == float("-inf")
    outbox.take(1.0, LOAD)

    outbox.add(Delta(1, [8]))

    assert outbox.due_s() == 1.0 + FRAME_S


def test_with_a_longer_interval_the_first_and_the_last_of_an_answer_wait_no_longer() -> None:
    outbox = Outbox(0.05)
    outbox.take(0.0, LOAD)
    outbox.add(Delta(1, [7]))
    outbox.take(1.0, None)

    outbox.add(Delta(1, [8]))
    assert outbox.due_s() == 1.05
    outbox.add(Delta(2, [9], num_cached_tokens=0))
    assert outbox.due_s() == 1.0 + FRAME_S
    frame = outbox.take(1.01, None)
    assert frame is not None
    assert [delta.token_ids for delta in frame.deltas] == [[8], [9]]

    outbox.add(Delta(2, [10]))
    outbox.add(Delta(2, [11]))
    assert outbox.due_s() == 1.06
    outbox.add(Delta(1, [], Finish.STOP))
    assert outbox.due_s() == 1.01 + FRAME_S


def test_an_interval_of_nothing_holds_nothing_back() -> None:
    outbox = Outbox(0.0)
    outbox.take(0.0, LOAD)
    outbox.add(Delta(1, [7], num_cached_tokens=0))
    outbox.take(1.0, None)
    outbox.add(Delta(1, [8]))

    assert outbox.due_s() == 1.0


def test_a_load_on_its_own_does_not_hold_deltas_back() -> None:
    outbox = reported()
    outbox.add(Delta(1, [7]))
    outbox.take(1.0, None)
    outbox.touch_load()
    outbox.take(2.0, LOAD)

    outbox.add(Delta(1, [8]))

    assert outbox.due_s() == 1.0 + FRAME_S


def test_a_load_that_changed_goes_along_with_deltas_but_not_oftener_than_its_interval() -> None:
    outbox = reported()
    outbox.touch_load()
    outbox.add(Delta(1, [7]))

    assert not outbox.wants_load(FRAME_S)
    assert outbox.wants_load(REPORT_S)


def test_a_stale_load_and_block_events_go_on_their_own_in_the_end() -> None:
    loads, events = reported(), reported()
    loads.touch_load()
    events.add_events(BlockEvents(1, b"k" * 16))

    assert loads.due_s() == ALONE_S
    assert events.due_s() == ALONE_S


def test_an_urgent_load_is_due_at_once() -> None:
    outbox = reported()

    outbox.touch_load(is_urgent=True)

    assert outbox.due_s() == 0.0
    assert outbox.wants_load(0.001)


def test_what_was_taken_is_gone_and_not_counted_any_more() -> None:
    outbox = reported()
    outbox.add(Delta(1, [7, 8]))
    outbox.add_events(BlockEvents(1, b"k" * 16, b"r" * 16))
    assert (outbox.num_tokens, outbox.num_event_bytes) == (2, 32)

    frame = outbox.take(1.0, None)

    assert frame is not None
    assert (frame.deltas, frame.events) == ([Delta(1, [7, 8])], [BlockEvents(1, b"k" * 16, b"r" * 16)])
    assert (outbox.num_tokens, outbox.num_event_bytes, outbox.due_s()) == (0, 0, None)


def test_a_merged_delta_keeps_the_first_ones_facts_and_the_last_ones_finish() -> None:
    first = Delta(1, [7], num_cached_tokens=16, logprobs=[TokenLogprobs(-1.0)])
    last = Delta(1, [8], finish=Finish.ERROR, logprobs=[TokenLogprobs(-2.0)], error="why")

    assert merge_deltas(first, last) == Delta(
        1, [7, 8], Finish.ERROR, 16, [TokenLogprobs(-1.0), TokenLogprobs(-2.0)], "why"
    )


def test_a_merged_delta_has_the_latest_times_that_are_known() -> None:
    early, late = Timing(0.0, 1.0, 2.0, 2.0), Timing(0.0, 1.0, 2.0, 3.0)

    assert merge_deltas(Delta(1, [7], timing=early), Delta(1, [8])).timing == early
    assert merge_deltas(Delta(1, [7], timing=early), Delta(1, [8], finish=Finish.STOP, timing=late)).timing == late


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 9), max_size=3), st.booleans())))
def test_each_sequence_gets_its_tokens_once_and_in_order(steps: list[tuple[int, list[int], bool]]) -> None:
    outbox = reported()
    sent: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    for now, (sid, token_ids, is_taken) in enumerate(steps):
        outbox.add(Delta(sid, token_ids))
        sent.setdefault(sid, []).extend(token_ids)
        if is_taken:
            collect(outbox, now, got)
    collect(outbox, len(steps), got)

    assert got == sent


def collect(outbox: Outbox, now: float, got: dict[int, list[int]]) -> None:
    frame = outbox.take(now, None)
    for delta in frame.deltas if frame is not None else ():
        got.setdefault(delta.sid, []).extend(delta.token_ids)
