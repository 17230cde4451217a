"""What is still to be sent to one router, and when: deltas of its sequences, block events, the load. Pure; times are
seconds of one clock.

Not the stream. Deltas wait until `interval_s` after the deltas before, so that quick steps share a frame while slow
ones lose nothing; an answer's first one and its last wait FRAME_S at most. What nobody waits for (block events, a load
that changed a little) goes along, or on its own when no deltas come. Invariants: deltas of a sequence and block events
keep their order; the owner bounds what is held, by `num_tokens` and `num_event_bytes`.
"""

from penstock.wire.frames import BlockEvents, Delta, DownFrame, Load

FRAME_S = 0.005
"""Least time between two frames of deltas by default: a frame costs each side about 100 us, whatever it holds."""
REPORT_S = 0.020
"""Least time between two loads, unless one brings credit to a router that had none."""
ALONE_S = 2 * REPORT_S
"""Longest time that a load and block events wait for deltas to go along with."""


class Outbox:
    """Everything held for one router, until `take` makes a frame of it. interval_s: least time between two frames of
    deltas."""

    def __init__(self, interval_s: float = FRAME_S) -> None:
        self._interval_s = interval_s
        self._edge_interval_s = min(FRAME_S, interval_s)
        self._has_edge = False
        """Whether the deltas that are held begin or end an answer."""
        self.num_tokens = 0
        """Tokens of the deltas that are held."""
        self.num_event_bytes = 0
        """Bytes of the block events that are held."""
        self._deltas: dict[int, Delta] = {}
        self._events: list[BlockEvents] = []
        self._is_load_stale = True
        self._is_load_urgent = True
        self._last_frame_s = self._last_deltas_s = self._last_load_s = float("-inf")

    def add(self, delta: Delta) -> None:
        before = self._deltas.get(delta.sid)
        self._deltas[delta.sid] = delta if before is None else merge_deltas(before, delta)
        self.num_tokens += len(delta.token_ids)
        if delta.finish is not None or delta.num_cached_tokens is not None:
            self._has_edge = True

    def add_events(self, events: BlockEvents) -> None:
        self._events.append(events)
        self.num_event_bytes += len(events.stored) + len(events.removed)

    def touch_load(self, *, is_urgent: bool = False) -> None:
        """Note that the load has changed. Urgent: the router can go on because of it."""
        self._is_load_stale = True
        self._is_load_urgent |= is_urgent

    def due_s(self) -> float | None:
        """Time at which the next frame should be sent. Returns None if there is nothing to send."""
        if self._is_load_urgent:
            return self._last_frame_s
        due_s = None
        if self._deltas:
            due_s = self._last_deltas_s + (self._edge_interval_s if self._has_edge else self._interval_s)
        if self._events or self._is_load_stale:
            alone_s = (self._last_frame_s if self._events else self._last_load_s) + ALONE_S
            due_s = alone_s if due_s is None else min(due_s, alone_s)
        return due_s

    def wants_load(self, now_s: float) -> bool:
        """Whether a frame taken now should carry a load."""
        return self._is_load_urgent or (self._is_load_stale and now_s >= self._last_load_s + REPORT_S)

    def take(self, now_s: float, load: Load | None) -> DownFrame | None:
        """Everything that is held, in one frame; None if that is nothing. load: the newest one, where `wants_load`."""
        if load is None and not self._deltas and not self._events:
            return None
        frame = DownFrame(list(self._deltas.values()), load, self._events or None)
        self._last_frame_s = now_s
        if self._deltas:
            self._last_deltas_s = now_s
        if load is not None:
            self._last_load_s = now_s
            self._is_load_stale = self._is_load_urgent = False
        self._deltas.clear()
        self._has_edge = False
        self._events = []
        self.num_tokens = self.num_event_bytes = 0
        return frame


def merge_deltas(first: Delta, second: Delta) -> Delta:
    """One delta of a sequence with the content of the two; `second` came later."""
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = second.logprobs if logprobs is None else logprobs + second.logprobs
    return Delta(
        sid=first.sid,
        token_ids=first.token_ids + second.token_ids,
        finish=second.finish,
        num_cached_tokens=first.num_cached_tokens if second.num_cached_tokens is None else second.num_cached_tokens,
        logprobs=logprobs,
        error=second.error,
        timing=first.timing if second.timing is None else second.timing,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        beams=second.beams,
        num_beam_tokens=second.num_beam_tokens,
        step_s=second.step_s,
    )
