"""Signals while a load runs: SIGTERM means to send no more, Ctrl-C to stop, a further signal to exit at once."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_by_signals(
    stop: asyncio.Event, *, hurry: Callable[[], None], enough: asyncio.Event | None = None
) -> Iterator[None]:
    """The first SIGTERM sets `enough`, where there is one; else it is as SIGINT, of which the first sets `stop` and a
    second one calls `hurry`.

    In another thread than the main one, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            hurry()
        stop.set()

    def on_term() -> None:
        if enough is None or enough.is_set():
            on_signal()
        else:
            enough.set()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    loop.add_signal_handler(signal.SIGTERM, on_term)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
