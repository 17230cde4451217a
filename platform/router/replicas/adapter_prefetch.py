"""Adapters of requests that wait in the gateway's queue: one replica is asked to load each, so that the load is over
when a place falls free.

Not a reservation: the request goes wherever the policy sends it, which counts a load as time. The replica takes only a
slot that the request's tenant might have (`workers.serving.residency`), so no tenant loses one by it. Pure, but for the
request to the replica; times are monotonic seconds.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock.wire.frames import Load

AGAIN_S = 1.0
"""Least time between two requests to load the same adapter."""
MAX_ASKED = 1024
"""Adapters whose last request is remembered."""


class Replica(Protocol):
    """A ready replica, as far as the adapters that it is asked for go."""

    @property
    def load(self) -> Load | None: ...
    def load_adapter(self, digest: str, tenant: str = "") -> None: ...


class AdapterPrefetch:
    def __init__(
        self, ready_replicas: Callable[[Iterable[str]], Sequence[Replica]], clock: Callable[[], float]
    ) -> None:
        """ready_replicas: finds those of some pools."""
        self._ready_replicas = ready_replicas
        self._clock = clock
        self._asked_s: OrderedDict[str, float] = OrderedDict()

    def ask(self, pools: Iterable[str], digest: str, tenant: str) -> None:
        """Have the replica with the least to do load an adapter, if none of these pools has it. tenant: whose request
        waits for it."""
        now = self._clock()
        if now < self._asked_s.get(digest, float("-inf")) + AGAIN_S:
            return
        found = [(replica, replica.load) for replica in self._ready_replicas(pools)]
        open_to = [(replica, load) for replica, load in found if load is not None and not load.is_draining]
        if not open_to or any(digest in load.resident_adapters for _, load in open_to):
            return
        self._asked_s[digest] = now
        self._asked_s.move_to_end(digest)
        if len(self._asked_s) > MAX_ASKED:
            self._asked_s.popitem(last=False)
        replica, _ = min(open_to, key=lambda each: each[1].num_running + each[1].num_waiting)
        replica.load_adapter(digest, tenant)
