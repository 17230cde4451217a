"""Sending a plan: open and closed loop, sessions, drain, cut, repeats. The clock is real, so nothing here rests on a
machine being quick."""

import asyncio
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain, count, pairwise
from typing import Any

import pytest

from penstock_loadtest.client.client import Answer
from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.planned import Message, Planned
from penstock_loadtest.results.records import Outcome, Record
from penstock_loadtest.run.runner import RunFacts, run_load
from penstock_loadtest.scenario import Scenario
from tests.real_time import real_time
from tests.unit.loadtest.stand_in import Serve, StandIn, at_once, blocked, never

FOREVER_S = 30.0


def request(index: int, at_s: float = 0.0, **more: Any) -> Planned:
    return Planned(**({"index": index, "at_s": at_s, "prompt": f"prompt {index}", "max_tokens": 8} | more))


def session(index: int, *, turns: int, at_s: float = 0.0, think_s: float = 0.0) -> list[Planned]:
    return [
        request(index + n, at_s, session=f"{index}", turn=n, is_last_turn=n == turns - 1, think_s=think_s if n else 0.0)
        for n in range(turns)
    ]


class Ran:
    """A run and what came of it."""

    def __init__(
        self,
        plan: Iterator[Planned] | list[Planned],
        serve: Serve = at_once,
        *,
        stop_when: Callable[["Ran"], bool] | None = None,
        enough_when: Callable[["Ran"], bool] | None = None,
        **settings: Any,
    ):
        self.scenario = Scenario(**({"duration_s": FOREVER_S, "drain_s": FOREVER_S} | settings))
        self.client = StandIn(serve)
        self.sent: list[Planned] = []
        self.records: list[Record] = []
        self._stop_when = stop_when or (lambda _: False)
        self._enough_when = enough_when or (lambda _: False)
        self.facts = asyncio.run(self._run(iter(plan)))

    async def _run(self, plan: Iterator[Planned]) -> RunFacts:
        self.stop, self.enough = asyncio.Event(), asyncio.Event()
        return await run_load(
            self.scenario,
            plan,
            self.client,
            on_sent=self._on_sent,
            on_ended=self._on_ended,
            stop=self.stop,
            enough=self.enough,
        )  # type: ignore[arg-type]

    def _on_sent(self, planned: Planned) -> None:
        self.sent.append(planned)
        self._check_stop()

    def _on_ended(self, answer: Answer) -> None:
        self.records.append(answer.record)
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stop_when(self):
            self.stop.set()
        if self._enough_when(self):
            self.enough.set()

    def record(self, index: int) -> Record:
        return next(record for record in self.records if record.index == index)

    @property
    def outcomes(self) -> list[Outcome]:
        return [record.outcome for record in sorted(self.records, key=lambda record: record.index)]


def sent_s(record: Record) -> float:
    assert record.sent_s is not None
    return record.sent_s


def end_s(record: Record) -> float:
    assert record.end_s is not None
    return record.end_s


# open loop


def test_requests_leave_whatever_the_server_does() -> None:
    ran = Ran([request(n, n / 200) for n in range(40)], never, stop_when=lambda ran: len(ran.sent) == 40)

    assert ran.client.most_in_flight == 40
    assert ran.facts.most_in_flight == 40


def test_no_request_leaves_before_its_time_and_each_is_recorded_with_it() -> None:
    plan = [request(n, n * 0.0033) for n in range(60)]
    ran = Ran(plan)

    assert [record.intended_s for record in ran.records] == [planned.at_s for planned in plan]
    assert all(sent_s(record) >= record.intended_s for record in ran.records)


@real_time
def test_what_became_due_meanwhile_leaves_at_once_and_nothing_is_late_for_good() -> None:
    block_s = 0.5

    async def serve(planned: Planned) -> Outcome:
        if planned.index == 0:
            blocked(block_s)
        return "finished"

    ran = Ran([request(n, n * 0.05) for n in range(30)], serve)

    late = [record.lateness_s or 0.0 for record in ran.records]
    assert len(ran.records) == 30
    assert late[1] > 0.3
    assert min(late[2:]) < late[1] - 0.2


async def test_bodies_are_there_before_the_run_starts() -> None:
    prepared_at_first_send = []
    plan = [request(n) for n in range(100)]

    async def serve(_: Planned) -> Outcome:
        prepared_at_first_send.append(len(ran_client[0].histories))
        return "finished"

    ran_client: list[StandIn] = []
    client = StandIn(serve)
    ran_client.append(client)

    await run_load(
        Scenario(),
        iter(plan),
        client,  # type: ignore[arg-type]
        on_sent=lambda _: None,
        on_ended=lambda _: None,
        stop=asyncio.Event(),
    )

    assert prepared_at_first_send[0] == 100


def test_requests_that_were_due_before_the_end_leave_even_behind_it() -> None:
    async def serve(planned: Planned) -> Outcome:
        if planned.index == 0:
            blocked(0.4)
        return "finished"

    ran = Ran([request(n, n / 100) for n in range(20)], serve, duration_s=0.2)

    assert len(ran.records) == 20


def test_a_request_past_its_timeout_is_unfinished() -> None:
    ran = Ran([request(0)], never, timeout_s=0.05)

    assert ran.outcomes == ["unfinished"]
    assert not ran.records[0].is_cut


# sessions


def test_a_turn_follows_the_answer_before_it_after_the_users_pause() -> None:
    ran = Ran(session(0, turns=3, think_s=0.05))

    first, second, third = (ran.record(n) for n in range(3))
    assert second.intended_s == pytest.approx(end_s(first) + 0.05)
    assert third.intended_s == pytest.approx(end_s(second) + 0.05)
    assert sent_s(third) >= third.intended_s


def test_a_turn_carries_the_real_answers() -> None:
    ran = Ran(session(0, turns=3))

    assert ran.client.histories[2] == (
        Message("user", "prompt 0"),
        Message("assistant", "answer 0"),
        Message("user", "prompt 1"),
        Message("assistant", "answer 1"),
    )


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_a_failed_turn_ends_its_session_and_what_never_leaves_is_counted(loop: str) -> None:
    async def serve(planned: Planned) -> Outcome:
        return "failed" if planned.index == 1 else "finished"

    ran = Ran([*session(0, turns=4), *session(4, turns=2)], serve, loop=loop)

    assert ran.outcomes == ["finished", "failed", "finished", "finished"]
    assert ran.facts.turns_not_sent == 2
    assert ran.facts.sent == 4


def test_turns_due_behind_the_end_of_the_run_never_leave_and_are_counted() -> None:
    ran = Ran([*session(0, turns=3, think_s=60.0), request(3, 0.05)], duration_s=0.1)

    assert ran.facts.sent == 2
    assert ran.facts.turns_not_sent == 2


def test_the_run_does_not_wait_for_turns_that_will_not_leave() -> None:
    ran = Ran(session(0, turns=3, think_s=60.0), duration_s=20.0)

    assert ran.facts.ended_s < 15


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_sessions_go_on_beside_each_other(loop: str) -> None:
    plan = [turn for n in range(10) for turn in session(3 * n, turns=3)]
    ran = Ran(plan, loop=loop, concurrency=4)

    assert ran.outcomes == ["finished"] * 30
    assert ran.facts.turns_not_sent == 0
    for n in range(10):
        turns = [ran.record(3 * n + turn) for turn in range(3)]
        assert all(end_s(before) <= sent_s(after) for before, after in pairwise(turns))


# closed loop


def test_so_many_requests_are_under_way_and_never_more() -> None:
    async def serve(_: Planned) -> Outcome:
        await asyncio.sleep(0.002)
        return "finished"

    ran = Ran([request(n) for n in range(50)], serve, loop="closed", concurrency=5)

    assert len(ran.records) == 50
    assert ran.client.most_in_flight == 5


def test_a_request_was_intended_when_its_slot_got_free() -> None:
    async def serve(_: Planned) -> Outcome:
        await asyncio.sleep(0.01)
        return "finished"

    ran = Ran([request(n) for n in range(5)], serve, loop="closed", concurrency=1)

    assert ran.records[0].intended_s >= 0
    for before, after in pairwise(ran.records):
        assert end_s(before) <= after.intended_s <= sent_s(after)


def test_a_closed_loop_over_an_endless_plan_ends_with_the_duration() -> None:
    async def serve(_: Planned) -> Outcome:
        await asyncio.sleep(0.01)
        return "finished"

    ran = Ran((request(n) for n in count()), serve, loop="closed", concurrency=3, duration_s=0.3)

    assert len(ran.records) >= 3
    assert set(ran.outcomes) == {"finished"}
    assert all(record.intended_s < 0.3 + 1 for record in ran.records)
    assert not ran.facts.is_interrupted


def test_a_slot_does_not_wait_for_a_user_who_thinks() -> None:
    ran = Ran(
        chain(session(0, turns=2, think_s=0.2), (request(n) for n in count(2))),
        loop="closed",
        concurrency=1,
        enough_when=lambda ran: ran.sent[-1].index == 1,
    )

    order = [planned.index for planned in ran.sent]
    assert order[:4] == [0, 2, 3, 4]
    assert 1 in order, "a turn that is due goes before what the plan has"
    assert ran.record(1).intended_s >= end_s(ran.record(0)) + 0.2


# ends


def test_ctrl_c_cuts_what_is_under_way_and_sends_nothing_more() -> None:
    async def serve(planned: Planned) -> Outcome:
        return await (at_once if planned.index < 5 else never)(planned)

    ran = Ran(
        [request(n, n / 1000 if n < 8 else 20.0) for n in range(12)],
        serve,
        stop_when=lambda ran: len(ran.sent) == 8 and len(ran.records) == 5,
    )

    assert ran.facts.is_interrupted
    assert ran.facts.sent == 8
    assert ran.outcomes == ["finished"] * 5 + ["unfinished"] * 3
    assert [record.is_cut for record in ran.records] == [False] * 5 + [True] * 3


def test_every_request_has_a_record_though_ctrl_c_comes_while_many_leave() -> None:
    ran = Ran([request(n) for n in range(400)], never, stop_when=lambda ran: len(ran.sent) == 50)

    assert 50 <= ran.facts.sent < 400
    assert sorted(record.index for record in ran.records) == list(range(ran.facts.sent))


def test_ctrl_c_ends_a_closed_loop_too() -> None:
    ran = Ran(
        (request(n) for n in count()), never, loop="closed", concurrency=4, stop_when=lambda ran: len(ran.sent) == 4
    )

    assert ran.outcomes == ["unfinished"] * 4


def test_after_the_last_request_the_drain_is_as_long_as_it_may_be() -> None:
    ran = Ran([request(0), request(1)], never, drain_s=0.1)

    assert ran.outcomes == ["unfinished"] * 2
    assert all(record.is_cut for record in ran.records)
    assert not ran.facts.is_interrupted
    assert ran.facts.ended_s >= ran.facts.last_sent_s + 0.1


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_after_sigterm_nothing_more_is_sent_and_what_is_under_way_ends(loop: str) -> None:
    async def serve(_: Planned) -> Outcome:
        await asyncio.sleep(0.05)
        return "finished"

    ran = Ran(
        (request(n, n / 200) for n in count()),
        serve,
        loop=loop,
        concurrency=4,
        enough_when=lambda ran: len(ran.sent) >= 4,
    )

    assert 4 <= ran.facts.sent < 12
    assert {record.outcome for record in ran.records} == {"finished"}
    assert len(ran.records) == ran.facts.sent
    assert not ran.facts.is_interrupted


def test_a_plan_that_breaks_at_its_beginning_stops_the_run_before_anything_is_sent() -> None:
    def plan() -> Iterator[Planned]:
        yield request(0)
        raise TraceInvalid("trace.jsonl, line 2: not JSON.")

    with pytest.raises(TraceInvalid, match="line 2"):
        Ran(plan())


def test_a_plan_that_breaks_midway_is_told_with_everything_recorded_before() -> None:
    def plan() -> Iterator[Planned]:
        yield from (request(n) for n in range(2000))
        raise TraceInvalid("trace.jsonl, line 2001: not JSON.")

    ran = Ran(plan())

    assert isinstance(ran.facts.plan_error, TraceInvalid)
    assert len(ran.records) == 2000


async def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    kilobytes = 20
    plan = (request(n, prompt="x" * 1024 * kilobytes) for n in range(4000))

    class Forgets(list[Any]):
        def append(self, _: Any) -> None:
            pass

    client = StandIn()
    client.bodies = Forgets()
    client.histories = {}
    client.prepare = lambda planned, history=(): str(planned.prompt).encode()  # type: ignore[method-assign]

    tracemalloc.start()
    await run_load(
        Scenario(repeat=5), plan, client, on_sent=lambda _: None, on_ended=lambda _: None, stop=asyncio.Event()
    )  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4000 * 1024 * kilobytes / 2


# repeats


def test_a_sample_is_sent_again_when_all_is_over() -> None:
    ran = Ran([request(n) for n in range(20)], repeat=6)

    assert len(ran.records) == 20
    assert len(ran.facts.repeats) == 6
    assert len({first.index for first, _ in ran.facts.repeats}) == 6
    assert sorted(second.index for _, second in ran.facts.repeats) == list(range(20, 26))
    assert sorted(ran.client.bodies[20:]) == sorted(f"prompt {first.index}".encode() for first, _ in ran.facts.repeats)
    assert all(second.intended_s >= ran.facts.ended_s for _, second in ran.facts.repeats)


def test_only_finished_requests_with_a_determined_answer_are_sent_again() -> None:
    async def serve(planned: Planned) -> Outcome:
        return "finished" if planned.index != 1 else "failed"

    plan = [request(0, temperature=1.0), request(1), request(2, temperature=1.0, seed=7), request(3)]
    ran = Ran(plan, serve, repeat=10)

    assert sorted(first.index for first, _ in ran.facts.repeats) == [2, 3]


def test_after_ctrl_c_nothing_is_sent_again() -> None:
    ran = Ran([request(n) for n in range(5)], repeat=3, stop_when=lambda ran: len(ran.records) == 5)

    assert ran.facts.repeats == []


def test_repeats_end_with_the_drain() -> None:
    async def serve(planned: Planned) -> Outcome:
        return await (at_once if planned.index < 20 else never)(planned)

    ran = Ran([request(n) for n in range(20)], serve, repeat=12, drain_s=0.1)

    assert 0 < len(ran.facts.repeats) < 12
    assert {second.outcome for _, second in ran.facts.repeats} == {"unfinished"}
