"""Answers that lie in a socket when their time is over: on both event loops, over a real socket."""

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from penstock.base.answers import LATE_S, READING_S, answer_within

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
def test_what_came_while_this_process_stood_still_is_read(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    assert run(loop, b"answer\n", WITHIN_S + 3 * LATE_S) == b"answer\n"


@pytest.mark.parametrize("stands_still_s", [0.0, WITHIN_S + 3 * LATE_S])
@pytest.mark.parametrize("loop", LOOPS)
def test_who_does_not_answer_is_not_waited_for(
    loop: Callable[[], asyncio.AbstractEventLoop], stands_still_s: float
) -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        run(loop, b"half an ans", stands_still_s)

    assert WITHIN_S <= time.monotonic() - began_s < WITHIN_S + stands_still_s + READING_S + 5.0


async def test_an_end_before_the_time_leaves_no_timer_and_other_errors_pass() -> None:
    with pytest.raises(KeyError):
        async with answer_within(0.05):
            raise KeyError
    async with answer_within(0.05):
        pass
    await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        async with answer_within(5.0):
            raise asyncio.CancelledError
