"""Redis that does not answer, as the error that a request gets; and the end of tasks that ask it."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisError

from penstock.wire.errors import Overloaded

RETRY_AFTER_S = 1.0
REPEAT_S = 1.0


@contextmanager
def raising_overloaded() -> Iterator[None]:
    """Turn what a call of Redis raises into Overloaded; but a cancellation, which a client may turn into an error of
    its own, stays one."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        raise Overloaded("Files and batches can't be reached at the moment.", retry_after_s=RETRY_AFTER_S) from error


async def end_tasks(tasks: Collection["asyncio.Task[Any]"], repeat_s: float = REPEAT_S) -> None:
    """Cancel tasks and wait for their ends. A cancellation that gets lost on its way is repeated after `repeat_s`.
    Where the caller is cancelled, it raises CancelledError when they have ended."""
    pending, is_cancelled = {task for task in tasks if not task.done()}, False
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=repeat_s)
        except asyncio.CancelledError:
            is_cancelled = True
        pending = {task for task in pending if not task.done()}
    if is_cancelled:
        raise asyncio.CancelledError
