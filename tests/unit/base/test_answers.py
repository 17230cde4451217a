"""Answers that lie in a socket when their time is over: on both event loops, over a real socket."""

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from penstock.base import answers
from penstock.base.answers import answer_within

WITHIN_S = 0.2
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def answered(answer: bytes, stands_still_s: float) -> bytes:
    """What a client reads within WITHIN_S of an answer that comes while its process stands still for so many
    seconds."""
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=near)

    def stand_still() -> None:
        far.send(answer)
        time.sleep(stands_still_s)

    try:
        async with answer_within(WITHIN_S):
            asyncio.get_running_loop().call_later(0.01, stand_still)
            return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()
        far.close()


def run(loop: Callable[[], asyncio.AbstractEventLoop], answer: bytes, stands_still_s: float) -> bytes:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(answered(answer, stands_still_s))


@pytest.mark.parametrize("loop", LOOPS)
def test_what_came_while_this_process_stood_still_is_read(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "READING_S", 10.0)

    assert run(loop, b"answer\n", WITHIN_S + 0.3) == b"answer\n"


@pytest.mark.parametrize("stands_still_s", [0.0, WITHIN_S + 0.3])
@pytest.mark.parametrize("loop", LOOPS)
def test_who_does_not_answer_is_not_waited_for(
    loop: Callable[[], asyncio.AbstractEventLoop], stands_still_s: float
) -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        run(loop, b"half an ans", stands_still_s)

    assert time.monotonic() - began_s >= WITHIN_S


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_stands_still_again_and_again_ends_all_the_same(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def wait_while_it_stands_still() -> None:
        def stand_still() -> None:
            time.sleep(0.15)
            asyncio.get_running_loop().call_later(0.01, stand_still)

        asyncio.get_running_loop().call_soon(stand_still)
        async with answer_within(0.05):
            await asyncio.sleep(60)

    with asyncio.Runner(loop_factory=loop) as runner, pytest.raises(TimeoutError):
        runner.run(wait_while_it_stands_still())


@pytest.mark.parametrize("loop", LOOPS)
def test_an_end_before_the_time_leaves_no_timer_and_other_errors_pass(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    failures: list[object] = []

    async def end_early() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        with pytest.raises(KeyError):
            async with answer_within(0.05):
                raise KeyError
        async with answer_within(0.05):
            pass
        await asyncio.sleep(0.2)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(end_early())

    assert failures == []


@pytest.mark.parametrize("stands_still_s", [0.0, WITHIN_S + 0.05])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cancellation_is_one_before_the_time_and_while_what_came_is_read(
    loop: Callable[[], asyncio.AbstractEventLoop], stands_still_s: float
) -> None:
    async def cancel() -> bool:
        waiting = asyncio.create_task(answered(b"", stands_still_s))
        await asyncio.sleep(0.03)
        waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled()

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(cancel())
