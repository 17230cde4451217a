"""Compilation of the constraints of submitted sequences, in threads: the engine gets a sequence when its grammar is
there, and no step waits for one.

Tenants take turns, so that one with slow grammars delays mostly itself. All state belongs to one event loop. Invariant:
a wait ends once: with `ready`, with `failed`, or by `cancel`.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from penstock.base.errors import PenstockError
from penstock.wire.frames import Constraint
from penstock.workers.engine.sequence import Grammar

NUM_THREADS = 2
FAILED = "The constraint of this request could not be compiled."

Compile = Callable[[Constraint, str, list[int]], Grammar]
"""Compiles a constraint for a tenant, behind the tokens that the answer has already. Any thread may call it. Raises
PenstockError."""

log = logging.getLogger("penstock.stream")


class PendingGrammar:
    """A sequence's wait for its grammar."""

    __slots__ = ("constraint", "failed", "is_over", "output", "ready", "tenant")

    def __init__(
        self,
        constraint: Constraint,
        tenant: str,
        output: list[int],
        ready: Callable[[Grammar], None],
        failed: Callable[[str], None],
    ) -> None:
        self.constraint = constraint
        self.tenant = tenant
        self.output = output
        self.ready = ready
        self.failed = failed
        self.is_over = False


class Grammars:
    """Compiles grammars, a few at a time."""

    def __init__(self, compile_grammar: Compile, num_threads: int = NUM_THREADS) -> None:
        self._compile = compile_grammar
        self._num_free = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._lines: OrderedDict[str, deque[PendingGrammar]] = OrderedDict()
        """Waits that have not begun, by tenant; the tenant whose turn is next comes first."""

    def want(
        self,
        constraint: Constraint,
        tenant: str,
        output: list[int],
        ready: Callable[[Grammar], None],
        failed: Callable[[str], None],
    ) -> PendingGrammar:
        """Request a grammar; `ready` or `failed` is called later, on the event loop. output: token ids that the answer
        has already."""
        pending = PendingGrammar(constraint, tenant, output, ready, failed)
        self._lines.setdefault(tenant, deque()).append(pending)
        self._begin_next()
        return pending

    def cancel(self, pending: PendingGrammar) -> None:
        """End a wait: neither `ready` nor `failed` will be called."""
        pending.is_over = True
        line = self._lines.get(pending.tenant, ())
        if pending in line:
            assert isinstance(line, deque)
            line.remove(pending)
            if not line:
                del self._lines[pending.tenant]

    def stop(self) -> None:
        self._lines.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while self._num_free and self._lines:
            tenant, line = self._lines.popitem(last=False)
            pending = line.popleft()
            if line:
                self._lines[tenant] = line
            self._num_free -= 1
            running = self._executor.submit(self._compile, pending.constraint, tenant, pending.output)
            running.add_done_callback(partial(self._pass_on, asyncio.get_running_loop(), pending))

    def _pass_on(self, loop: asyncio.AbstractEventLoop, pending: PendingGrammar, done: "Future[Grammar]") -> None:
        """Called in a thread."""
        if not done.cancelled():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._end, pending, done)

    def _end(self, pending: PendingGrammar, done: "Future[Grammar]") -> None:
        self._num_free += 1
        self._begin_next()
        if pending.is_over:
            return
        pending.is_over = True
        error = done.exception()
        if error is None:
            pending.ready(done.result())
        elif isinstance(error, PenstockError):
            pending.failed(error.message)
        else:
            log.error("grammar failed", exc_info=error)
            pending.failed(FAILED)
