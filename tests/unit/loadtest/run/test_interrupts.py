"""Ctrl-C and SIGTERM while a load runs."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock_loadtest.run.interrupts import stop_by_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_stops_and_the_second_one_hurries(number: signal.Signals) -> None:
    stop, hurried = asyncio.Event(), asyncio.Event()
    with stop_by_signals(stop, hurry=hurried.set):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 10)
        assert not hurried.is_set()

        os.kill(os.getpid(), number)
        await asyncio.wait_for(hurried.wait(), 10)


async def test_a_load_that_may_end_by_itself_does_so_at_the_first_sigterm() -> None:
    stop, hurried, enough = asyncio.Event(), asyncio.Event(), asyncio.Event()
    with stop_by_signals(stop, hurry=hurried.set, enough=enough):
        for wanted, others in ((enough, (stop, hurried)), (stop, (hurried,)), (hurried, ())):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(wanted.wait(), 10)
            assert not any(other.is_set() for other in others)


def test_afterwards_signals_are_what_they_were() -> None:
    async def main() -> None:
        with stop_by_signals(asyncio.Event(), hurry=lambda: None):
            pass
        found.append(signal.getsignal(signal.SIGTERM))

    before, found = signal.getsignal(signal.SIGTERM), list[object]()
    asyncio.run(main())

    assert found == [before]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_load_in_another_thread_leaves_signals_alone() -> None:
    async def main() -> None:
        with stop_by_signals(asyncio.Event(), hurry=lambda: None):
            assert signal.getsignal(signal.SIGTERM) is before

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(main())).result()
