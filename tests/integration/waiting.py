"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], within_s: float, every_s: float = 0.05) -> Any:
    """Wait until the condition returns something true, and return that. Fails the test where it takes longer."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(every_s)
    return found
