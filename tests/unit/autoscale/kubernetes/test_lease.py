"""The Lease's rules, enumerated: every order in which two electors' calls can be made, lost, delayed, applied without
an answer, or not made."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from penstock.autoscale.kubernetes.lease import (
    Observed,
    Record,
    State,
    Times,
    is_leader,
    next_record,
    observe,
    record_written,
)

TIMES = Times(duration_s=3, deadline_s=2, retry_s=1)
ELECTORS = ("a", "b")
LATEST = 4
"""Ticks that a write may be on its way; its sender waits for two."""
PATIENCE = 2


class Write(NamedTuple):
    """On its way to the server."""

    who: str
    record: Record
    over: int
    """The version that it replaces; 0: it creates."""
    sent: int
    is_awaited: bool = True


class World(NamedTuple):
    now: int
    record: Record | None
    version: int
    states: tuple[State, State]
    writes: tuple[Write, ...] = ()

    def leaders(self) -> list[str]:
        return [who for who, state in zip(ELECTORS, self.states, strict=True) if is_leader(state, self.now)]

    def key(self) -> tuple[object, ...]:
        """Worlds with equal keys go on alike: times count from now, versions and records by whether they are the
        server's."""

        def about(state: State) -> tuple[object, ...]:
            observed = state.observed
            known = (
                None
                if observed is None
                else (
                    observed.record.holder,
                    observed.record == self.record,
                    observed.version == str(self.version),
                    min(self.now - observed.since_s, 4),
                )
            )
            return known, max(state.sure_until_s - self.now, -1)

        on_the_way = tuple(
            sorted(
                (write.who, write.record.holder, write.over == self.version, self.now - write.sent, write.is_awaited)
                for write in self.writes
            )
        )
        return None if self.record is None else self.record.holder, tuple(map(about, self.states)), on_the_way


def following(world: World, times: Times) -> Iterator[World]:
    """Every world that can come of it: time passes, or one thing happens."""
    if all(world.now - write.sent < LATEST for write in world.writes):
        yield world._replace(now=world.now + 1)
    for write in world.writes:
        yield from arrivals(world, write, times)
        if write.is_awaited and world.now - write.sent >= PATIENCE:  # the call has timed out, but may still arrive
            yield world._replace(writes=swapped(world.writes, write, write._replace(is_awaited=False)))
    for who in ELECTORS:
        if not any(write.who == who and write.is_awaited for write in world.writes) and len(world.writes) < 3:
            yield attempt(world, who, times, reads=True)
            if is_leader(state_of(world, who), world.now):
                yield attempt(world, who, times, reads=False)


def attempt(world: World, who: str, times: Times, reads: bool) -> World:
    state = state_of(world, who)
    if reads:
        state = (
            state._replace(observed=None)
            if world.record is None
            else observe(state, who, world.record, str(world.version), world.now)
        )
    record = next_record(state, who, times, world.now, renewed=f"{who} {world.now} {len(world.writes)} {world.version}")
    world = with_state(world, who, state)
    if record is None:
        return world
    return world._replace(
        writes=(
            *world.writes,
            Write(who, record, 0 if state.observed is None else int(state.observed.version), world.now),
        )
    )


def arrivals(world: World, write: Write, times: Times) -> Iterator[World]:
    """It is lost; or it is applied or refused, and the answer arrives, or not."""
    rest = world._replace(writes=tuple(other for other in world.writes if other is not write))
    yield rest
    if write.over != world.version:
        return
    applied = rest._replace(record=write.record, version=world.version + 1)
    yield applied
    if write.is_awaited:
        yield with_state(
            applied, write.who, record_written(write.record, str(applied.version), times, write.sent, world.now)
        )


def state_of(world: World, who: str) -> State:
    return world.states[ELECTORS.index(who)]


def with_state(world: World, who: str, state: State) -> World:
    return world._replace(states=(state, world.states[1]) if who == "a" else (world.states[0], state))


def swapped(writes: tuple[Write, ...], old: Write, new: Write) -> tuple[Write, ...]:
    return tuple(new if write is old else write for write in writes)


def reachable(times: Times) -> Iterator[World]:
    first = World(0, None, 0, (State(), State()))
    todo, known = [first], {first.key()}
    while todo:
        world = todo.pop()
        yield world
        for after in following(world, times):
            if after.key() not in known:
                known.add(after.key())
                todo.append(after)


def test_whatever_happens_to_their_calls_there_are_never_two_leaders() -> None:
    worlds = 0
    ever: set[str] = set()

    for world in reachable(TIMES):
        worlds += 1
        ever.update(world.leaders())
        assert len(world.leaders()) < 2, world

    assert ever == set(ELECTORS)
    assert worlds > 1000


def test_the_enumeration_finds_two_leaders_where_one_is_sure_of_itself_for_too_long() -> None:
    assert any(len(world.leaders()) == 2 for world in reachable(TIMES._replace(deadline_s=5)))


def test_a_lease_that_nobody_renews_changes_hands_after_its_duration_by_the_others_clock() -> None:
    held = Record("a", 4, 15, "then")
    state = observe(State(), "b", held, "7", now=100.0)

    assert next_record(observe(state, "b", held, "7", 114.9), "b", Times(), 114.9, "now") is None
    assert next_record(observe(state, "b", held, "7", 115.0), "b", Times(), 115.0, "now") == Record("b", 5, 15, "now")


def test_a_renewal_begins_the_others_waiting_anew() -> None:
    state = observe(State(), "b", Record("a", 4, 15, "then"), "7", now=100.0)
    state = observe(state, "b", Record("a", 4, 15, "later"), "8", now=110.0)

    assert next_record(state, "b", Times(), 124.9, "now") is None


def test_a_lease_that_was_given_back_is_free_at_once() -> None:
    state = observe(State(), "b", Record("", 4, 1, "then"), "7", now=100.0)

    assert next_record(state, "b", Times(), 100.0, "now") == Record("b", 5, 15, "now")


def test_a_leader_renews_in_the_same_term() -> None:
    state = record_written(Record("a", 4, 15, "then"), "7", Times(), sent_s=100.0, now=101.0)

    assert next_record(state, "a", Times(), 102.0, "now") == Record("a", 4, 15, "now")


@pytest.mark.parametrize(
    ("now", "margin", "expected"), [(109.9, 0.0, True), (110.0, 0.0, False), (104.9, 5.0, True), (105.0, 5.0, False)]
)
def test_a_leader_is_sure_of_itself_from_when_the_renewal_was_sent(now: float, margin: float, expected: bool) -> None:
    state = record_written(Record("a"), "7", Times(), sent_s=100.0, now=104.0)

    assert is_leader(state, now, margin) is expected


def test_who_gives_back_is_no_leader() -> None:
    assert record_written(Record(""), "8", Times(), 100.0, 100.0) == State(Observed(Record(""), "8", 100.0), -math.inf)
