"""Ctrl-C while a load runs: the first one asks to stop, a second one to hurry."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopped_by_signals(stop: asyncio.Event, *, hurry: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`, a second one calls `hurry`. In another thread than the main one, signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            hurry()
        stop.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
