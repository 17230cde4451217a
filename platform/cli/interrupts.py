"""Ctrl-C and its relatives: the first one asks to stop, a second one to hurry."""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The request to stop; not an Exception, so that no library takes it for a failure of its own."""


class Interrupts:
    """Signal handlers that raise Interrupted in the main thread at the first signal; once stopping, a signal only sets
    `hurry`."""

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self._is_stopping = False

    def install(self) -> None:
        """Install the handlers. To be called again after a library that takes signals for itself. A SIGHUP that nohup
        ignores stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def begin_stopping(self) -> None:
        """Interrupt nothing any more from here on."""
        self._is_stopping = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_stopping:
            self.hurry.set()
            return
        self._is_stopping = True
        raise Interrupted
