"""The client of one HTTP request: its body, and whether it is still there.

Not the answer (`exchange`). Waiting for a replica, for the next token or for the client to read takes most of a
request's life, and a client may hang up at any moment of it: inside `watched()` that cancels the request's task,
wherever it is, so that every `finally` runs. Invariant: outside of `watched()` no task and no timer of it is left.
"""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from starlette.types import Receive

from penstock.router.transport.budgets import Budget
from penstock.wire.errors import BodyTooLarge, BodyTooSlow

STALL_GRACE_S = 5.0
"""Time beyond its deadline after which a request is given up: it hangs on a client that does not read."""


class ClientGone(Exception):
    """The client hung up, or stopped reading: there is nobody to answer."""


class Client:
    """The sender of one request. receive: ASGI's."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._budget: Budget | None = None
        self._tenant = ""
        self._num_held = 0

    def charge_to(self, budget: Budget, tenant: str) -> None:
        """Count the bytes of `body` in a budget, as a tenant's, until `drop_body`: the body itself, or what it was
        decoded to."""
        self._budget, self._tenant = budget, tenant

    def drop_body(self) -> None:
        """Note that nobody holds the body any more, nor what it was decoded to. May be called again, or without a
        body."""
        if self._num_held and self._budget is not None:
            self._budget.give_back(self._tenant, self._num_held)
            self._num_held = 0

    async def body(self, content_length: int | None, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body; `drop_body` must follow. Raises BodyTooLarge, BodyTooSlow, ClientGone, and what a budget
        raises for the part that does not fit into it."""
        if content_length is not None and content_length > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(max_bytes)
        except TimeoutError:
            raise BodyTooSlow(f"The request body was not complete within {timeout_s:g} seconds.") from None

    async def parts(
        self, content_length: int | None, max_bytes: int, stall_s: float, timeout_s: float
    ) -> AsyncIterator[bytes]:
        """The body in parts as they arrive, for one that is too large to be held. stall_s: longest wait for the next
        part. Raises as `body` does."""
        if content_length is not None and content_length > max_bytes:
            raise _too_large(max_bytes)
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        size = 0
        while True:
            try:
                async with asyncio.timeout(min(stall_s, max(0.0, until_s - clock()))):
                    message = await self._receive()
            except TimeoutError:
                raise BodyTooSlow(
                    f"The request body stopped for {stall_s:g} seconds, or was not complete within {timeout_s:g}."
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            yield part
            if not message.get("more_body", False):
                return

    async def _read(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            if self._budget is not None and part:
                self._budget.take(self._tenant, len(part))
                self._num_held = size
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def watched(self, timeout_s: float) -> "Watch":
        """A context that ends in ClientGone when the client hangs up, or `timeout_s` and a grace later. Only after
        `body`."""
        return Watch(self._receive, timeout_s + STALL_GRACE_S)


class Watch:
    """Cancels the task that entered it; the cancellation becomes ClientGone where the context ends, as in
    asyncio.timeout."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._is_gone = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._wait_for_hangup())
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._watcher.cancel()
        del self._watcher  # its CancelledError refers to this: a circle that the garbage collector would have to find
        # a second cancellation is somebody else's: it stays one
        if self._is_gone and self._task.uncancel() == 0:
            raise ClientGone from None

    async def _wait_for_hangup(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._give_up()

    def _give_up(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._task.cancel()


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body exceeds the limit of {max_bytes} bytes.")
