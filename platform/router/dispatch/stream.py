"""The answer to one Generation: a mailbox that a replica's frames fill and one reader empties, across replicas.

Not a transport, and not a choice of replica (dispatch places it). Invariants: `output` is exactly what the reader has
been given; a stream is on at most one replica; after `close` nothing of it is left anywhere.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from penstock.base.errors import PenstockError
from penstock.router.dispatch import spans
from penstock.router.routing.chains import Chain, ChainKind
from penstock.router.routing.request import Generation, LazyPrompt, Receipt, TextDelta
from penstock.wire.errors import DeadlineExceeded, EngineFault, InvalidRequest, Overloaded, ReplicaLost
from penstock.wire.frames import Delta, Finish

MAX_ATTEMPTS = 4
"""Replicas tried for one answer, the first included."""
DEADLINE_GRACE_S = 1.0
"""The replica ends a sequence at its deadline; this much later the router does it without it."""

log = logging.getLogger("penstock.stream")


class Carrier(Protocol):
    """Who computes it: a replica, or a provider."""

    def abort(self, sid: int) -> None: ...


class Placer(Protocol):
    async def place(self, stream: "RoutedStream") -> None:
        """Find a replica, waiting for one if need be, and submit what the stream has so far; ends with
        `RoutedStream.begin`."""

    def ended(self, stream: "RoutedStream", error: PenstockError | None) -> None:
        """The answer is complete, or has failed."""

    def slow(self) -> None:
        """A reader let too much pile up; its stream fails."""


class RoutedStream:
    """See `penstock.router.routing.request.Stream`. One reader; `close` not while a `next` is awaited."""

    def __init__(self, generation: Generation, arrival: int, placer: Placer, max_buffered_deltas: int) -> None:
        self.generation = generation
        self.receipt = Receipt(generation.request_id)
        self.arrival = arrival
        self.output: list[int] = []
        self.refused_by: set[str] = set()
        self.chains: dict[ChainKind, Chain] = {}
        """Of the prompt."""
        self.tokenized = generation.tokenized
        """For the model it is on; until the first token another one may get it."""
        self.model = 0
        """Of its route."""
        self.unread: list[LazyPrompt] = []
        """What must be read before a place can be chosen."""
        self.refusal: PenstockError | None = None
        """A provider's, the latest."""
        self.trace = spans.of_stream(generation, self.receipt)
        self.is_closed = False
        self._placer = placer
        self._max_buffered_deltas = max_buffered_deltas
        self._remote: Carrier | None = None
        self._is_text = False
        self._sid = 0
        self._deltas: list[Delta] = []
        self._listener: Callable[[Delta], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: PenstockError | None = None
        self._is_finished = False
        self._has_first = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, remote: Carrier, sid: int, seconds_left: float, is_text: bool = False) -> None:
        """It has been submitted. is_text: what comes are TextDeltas."""
        self._remote, self._sid, self._is_text = remote, sid, is_text
        self.receipt.is_taken = True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds_left + DEADLINE_GRACE_S, self._expire)

    def push(self, delta: Delta) -> None:
        if self._listener is not None and not self._deltas and delta.finish is None and delta.num_cached_tokens is None:
            try:
                is_taken = self._listener(delta)
            except Exception as error:  # the top for one answer: what called `push` is the link, which carries every other answer of the replica too
                log.error("listener failed", extra={"request_id": self.generation.request_id}, exc_info=error)
                self._listener = None
                self._fail(EngineFault("the answer could not be passed on"))
                return
            if is_taken:
                self.output += delta.token_ids
                return
        self._deltas.append(delta)
        waiter = self._waiter
        if waiter is not None:
            if not waiter.done():
                waiter.set_result(None)
        elif len(self._deltas) > self._max_buffered_deltas:
            self._placer.slow()
            self._fail(Overloaded(f"the answer was aborted: {self._max_buffered_deltas} parts of it wait to be read"))

    def lose(self) -> None:
        self._remote = None
        self.receipt.is_taken = False
        self._wake()

    def refused(self, error: PenstockError) -> None:
        """The provider gives no answer; another route may."""
        self._trace_attempt(error)
        self.refused_by.add(self.receipt.replica)
        self.refusal = error
        self.lose()

    def broken(self, error: PenstockError) -> None:
        """The provider's answer ends in the middle: its text has no tokens with which a replica could go on."""
        self._trace_attempt(error)
        self._remote = None
        self._fail(error)

    async def next(self) -> Delta:
        while True:
            if self.is_closed or self._is_finished:
                raise RuntimeError("next() after the end of the stream")
            if self._deltas:
                delta = self._take()
                if delta is not None:
                    return delta
            elif self._error is not None:
                raise self._error
            elif self._remote is None:
                await self._go_on()
            else:
                await self._wait()

    def listen(self, listener: Callable[[Delta], bool]) -> None:
        if not self._is_text:  # a listener takes token ids
            self._listener = listener

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._trace_attempt()
        self._listener = None
        self._deltas.clear()
        self._release()
        self._wake()
        if self._timer is not None:
            self._timer.cancel()

    def _take(self) -> Delta | None:
        """All that has come, as one delta; None if it was but the end of an attempt."""
        deltas, self._deltas = self._deltas, []
        delta = deltas[0] if len(deltas) == 1 else merged(deltas)
        self.output += delta.token_ids
        if delta.num_cached_tokens is not None:
            delta = self._first(delta, delta.num_cached_tokens)
        if self.trace is not None:
            self.trace.told(delta)
        if delta.finish is None:
            return delta
        self._remote = None
        if delta.finish is Finish.STOP or delta.finish is Finish.LENGTH:
            self._is_finished = True
            if isinstance(delta, TextDelta):
                self.receipt.num_prompt_tokens = delta.num_prompt_tokens
            self._placer.ended(self, None)
            return delta
        self._end_attempt(delta.finish, delta.error)
        return msgspec.structs.replace(delta, finish=None, error=None) if delta.token_ids else None

    def _first(self, delta: Delta, num_cached_tokens: int) -> Delta:
        """An attempt's first delta: the reader is told once what was cached, by the first replica that answered."""
        if self._has_first:
            return msgspec.structs.replace(delta, num_cached_tokens=None)
        self._has_first = True
        self.receipt.cached_tokens = num_cached_tokens
        return delta

    def _end_attempt(self, finish: Finish, error: str | None) -> None:
        """A replica gave the sequence up: some ends are final, after the others another replica goes on."""
        self.receipt.is_taken = finish is Finish.DEADLINE
        if finish is Finish.DEADLINE:
            self._fail(DeadlineExceeded("the request's deadline passed before it was finished"))
        elif finish is Finish.ERROR:
            self._fail(EngineFault(error or "the engine failed on this request"))
        elif finish is Finish.INVALID:
            self._fail(InvalidRequest(error or "this pool's engine does not take such a request"))
        elif finish is Finish.REFUSED:
            self.refused_by.add(self.receipt.replica)

    def _trace_attempt(self, error: PenstockError | None = None) -> None:
        """An attempt is over. error: the provider's."""
        if self.trace is not None:
            self.trace.over(self.tokenized.num_prompt_tokens, len(self.output), self._is_text, error)

    async def _go_on(self) -> None:
        """On another replica, from the last token delivered."""
        if len(self.output) >= self.tokenized.sampling.max_tokens:
            self._deltas.append(
                Delta(self._sid, [], finish=Finish.LENGTH)
            )  # only the word that it was the last one got lost
            return
        try:
            if self.receipt.attempts >= MAX_ATTEMPTS:
                raise ReplicaLost(f"{self.receipt.attempts} replicas were tried, and none finished the answer")
            self._trace_attempt()
            self.receipt.attempts += 1
            await self._placer.place(self)
        except Overloaded as error:
            if not self.output:
                self._fail(error)
            else:
                self._fail(ReplicaLost("the replica was lost, and no other could go on with the answer in time"))
        except PenstockError as error:
            self._fail(error)

    def _fail(self, error: PenstockError) -> None:
        """What has come is still delivered; then the error."""
        if self._error is None and not self._is_finished:
            self._error = error
            self._placer.ended(self, error)
        self._release()
        self._wake()

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("the request's deadline passed before it was finished"))

    def _release(self) -> None:
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.abort(self._sid)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one sequence as one."""
    first, last = deltas[0], deltas[-1]
    logprobs = (
        None
        if all(delta.logprobs is None for delta in deltas)
        else list(chain.from_iterable(delta.logprobs or () for delta in deltas))
    )
    if isinstance(last, TextDelta):
        return _merged_text(last, [delta for delta in deltas if isinstance(delta, TextDelta)])
    return Delta(
        sid=first.sid,
        token_ids=list(chain.from_iterable(delta.token_ids for delta in deltas)),
        finish=last.finish,
        num_cached_tokens=first.num_cached_tokens,
        logprobs=logprobs,
        error=last.error,
        timing=next((delta.timing for delta in reversed(deltas) if delta.timing is not None), None),
    )


def _merged_text(last: TextDelta, deltas: Sequence[TextDelta]) -> TextDelta:
    return msgspec.structs.replace(
        last, text="".join([delta.text for delta in deltas]), num_tokens=sum(delta.num_tokens for delta in deltas)
    )
