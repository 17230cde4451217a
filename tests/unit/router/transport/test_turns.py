"""Connections are read a few at a time, the sources in turn."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from penstock.router.transport.turns import Turns

MOST_AT_ONCE = 8


class Readers:
    """Connections that want to be read, and the order in which they are."""

    def __init__(self) -> None:
        self.turns = Turns(MOST_AT_ONCE)
        self.read: list[str] = []

    def ask(self, source: str, count: int = 1, *, is_known: bool = False) -> None:
        for _ in range(count):
            if self.turns.take():
                self.read.append(source)
            else:
                self.turns.wait(source, partial(self.read.append, source), is_known=is_known)

    async def until(self, condition: Callable[[], bool]) -> int:
        """Iterations of the event loop until then."""
        for number in range(1000):
            if condition():
                return number
            await asyncio.sleep(0)
        raise AssertionError(self.read)


async def test_a_few_are_read_at_once_and_the_others_in_the_iterations_that_follow() -> None:
    readers = Readers()
    readers.ask("a", 3 * MOST_AT_ONCE)

    assert len(readers.read) == MOST_AT_ONCE
    most = 0
    for _ in range(20):
        before = len(readers.read)
        await asyncio.sleep(0)
        most = max(most, len(readers.read) - before)
    assert most == MOST_AT_ONCE
    assert readers.read == ["a"] * 3 * MOST_AT_ONCE


async def test_one_iteration_does_not_count_for_the_next() -> None:
    readers = Readers()
    for _ in range(5):
        readers.ask("a", MOST_AT_ONCE)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert len(readers.read) == 5 * MOST_AT_ONCE


async def test_a_source_with_many_connections_holds_up_no_other() -> None:
    readers = Readers()
    readers.ask("flood", 1000)
    readers.ask("other")

    await readers.until(lambda: "other" in readers.read)

    assert len(readers.read) <= 3 * MOST_AT_ONCE


async def test_those_who_have_shown_their_key_do_not_wait_behind_many_addresses() -> None:
    readers = Readers()
    for number in range(1000):
        readers.ask(f"address {number}")
    readers.ask("tenant", is_known=True)

    await readers.until(lambda: "tenant" in readers.read)

    assert len(readers.read) <= 3 * MOST_AT_ONCE


async def test_nor_do_addresses_wait_behind_tenants() -> None:
    readers = Readers()
    for number in range(1000):
        readers.ask(f"tenant {number}", is_known=True)
    readers.ask("address")

    await readers.until(lambda: "address" in readers.read)

    assert len(readers.read) <= 3 * MOST_AT_ONCE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_reader_that_fails_stops_nobody_else() -> None:
    readers = Readers()
    readers.ask("a", MOST_AT_ONCE)
    loop = asyncio.get_running_loop()
    caught: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: caught.append(context))

    def fail() -> None:
        raise ValueError

    readers.turns.wait("b", fail, is_known=False)
    readers.ask("c")
    await readers.until(lambda: "c" in readers.read)

    assert len(caught) == 1
