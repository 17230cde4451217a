"""One request in service, or waiting for a slot: plays its frames at their due times."""

from collections.abc import Callable, Iterator

from penstock_loadtest.client.schedule import Schedule
from penstock_loadtest.fake.answer import Frame
from penstock_loadtest.fake.connection import Connection
from penstock_loadtest.fake.truth import Truth


class Exchange:
    """Sends one answer. `shift_due` turns a due time into the time when something due then goes out; `on_ended` is
    called once all is sent, with the last frame's time."""

    def __init__(
        self,
        connection: Connection,
        truth: Truth,
        script: Iterator[Frame],
        *,
        schedule: Schedule,
        shift_due: Callable[[float], float],
        on_ended: Callable[["Exchange", float], None],
    ) -> None:
        self.truth = truth
        self.connection = connection
        self._script = script
        self._schedule, self._shift_due, self._on_ended = schedule, shift_due, on_ended
        self._next: Frame | None = None
        self._due_s = 0.0

    def begin(self, start_s: float) -> None:
        self.truth.start_s = start_s
        self._pull(start_s)
        if self._next is not None:
            self._schedule.at(self._due_s, self._send)

    def cut(self) -> None:
        """Send nothing more."""
        self._next, self._script = None, iter(())

    def _pull(self, start_s: float) -> None:
        """Find the next frame and its time."""
        self._next = next(self._script, None)
        if self._next is not None:
            self._due_s = self._shift_due(start_s + self._next.offset_s)

    def _send(self, now_s: float) -> None:
        """Send what is due, in one piece: after a stall that may be much, and others wait for theirs."""
        truth = self.truth
        if self._next is None or truth.start_s is None:
            return
        truth.late_s = max(truth.late_s, now_s - self._due_s)
        data: list[bytes] = []
        closes = False
        while self._next is not None and self._due_s <= now_s:
            data.append(self._next.data)
            truth.sent_tokens += self._next.tokens
            closes = self._next.closes
            self._pull(truth.start_s)
        self.connection.write(data[0] if len(data) == 1 else b"".join(data))
        if self._next is not None:
            self._schedule.at(self._due_s, self._send)
        else:
            self._on_ended(self, self._due_s)
            self.connection.finish_answer(closes=closes)
