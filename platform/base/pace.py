"""A steady rate with bursts, for each of many names: what comes faster waits, or is not within it.

The generic cell rate algorithm (ITU-T I.371): one time for each name, at which its latest event would have come at the
steady rate. Pure: `now_s` is given. Invariant: memory is bounded; the name that was longest without an event is
forgotten first.
"""

from collections import OrderedDict


class Pace:
    """rate: events per second of one name, above 0. burst: how many may come at once. max_names: how many names are
    remembered."""

    def __init__(self, rate: float, burst: float, max_names: int = 16384) -> None:
        self._step_s = 1 / rate
        self._burst_s = burst / rate
        self._max_names = max_names
        self._due_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due_s)

    def count(self, name: str, now_s: float, max_wait_s: float) -> float:
        """Count an event; returns how long it has to wait for its turn, in seconds, at most `max_wait_s`."""
        due_s = max(self._due_s.pop(name, now_s), now_s) + self._step_s
        due_s = min(due_s, now_s + self._burst_s + max_wait_s)
        self._remember(name, due_s)
        return max(0.0, due_s - now_s - self._burst_s)

    def take(self, name: str, now_s: float) -> bool:
        """Count an event that is within the rate. Returns False for one that is not; it does not count."""
        due_s = max(self._due_s.pop(name, now_s), now_s)
        is_within = due_s + self._step_s <= now_s + max(self._burst_s, self._step_s)
        self._remember(name, due_s + self._step_s if is_within else due_s)
        return is_within

    def _remember(self, name: str, due_s: float) -> None:
        self._due_s[name] = due_s
        if len(self._due_s) > self._max_names:
            self._due_s.popitem(last=False)
