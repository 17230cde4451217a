"""The policies that a gateway of this bench may route with: the rivals of the simulated contest, and sessions pinned by
hand.

Each forgets what it remembers when nothing was asked for `IDLE_S`: that is the end of a run, and nobody begins the next
one with what an earlier one left.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final

from bench.routing.rivals import POLICIES
from penstock.router.replicas.routing_policy import RoutedRequest, RoutingPolicy
from penstock.router.routing.policy import Decision, Reason, ReplicaView, Wait

OURS: Final = "ours"
PINNED: Final = "pinned"
IDLE_S: Final = 3.8
"""Shorter than the rest before a run, `live_platform.SETTLE_S`, and longer than the pauses within one."""
MAX_SESSIONS: Final = 10_000


def find_maker(name: str) -> Callable[[], RoutingPolicy] | None:
    """What a gateway is given to route by a policy of this name. Returns None for ours, which is what a gateway does by
    itself. Raises KeyError for a name that there is not."""
    if name == OURS:
        return None
    if name not in POLICIES and name != PINNED:
        raise KeyError(name)
    return partial(make_policy, name)


def make_policy(name: str) -> RoutingPolicy:
    """A policy that begins anew with each run."""
    numbers = itertools.count()
    return Forgetful(lambda: _make(name, Random(f"{name} {next(numbers)}")))


def _make(name: str, random: Random) -> RoutingPolicy:
    return pin_sessions() if name == PINNED else POLICIES[name](random)


class Forgetful:
    """A policy that is made anew when nothing was asked for `IDLE_S`."""

    def __init__(self, make: Callable[[], RoutingPolicy]) -> None:
        self._make = make
        self._policy = make()
        self._asked_s = float("-inf")

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if request.now_s - self._asked_s > IDLE_S:
            self._policy = self._make()
        self._asked_s = request.now_s
        return self._policy(request, views)


def pin_sessions() -> RoutingPolicy:
    """Sessions pinned by hand: each goes to the next replica in turn, and its later turns go there too. A session is
    known by the last full block of its prompt before, which no other has: so much of a first prompt must be its own.
    """
    turns = itertools.count()
    pinned: OrderedDict[bytes, str] = OrderedDict()

    def choose(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        if not views:
            return Decision(None, Wait.NO_REPLICA)
        by_id = {view.replica_id: view for view in views}
        known = next((pinned[key] for key in reversed(request.keys) if pinned.get(key) in by_id), None)
        replica_id = known or sorted(by_id)[next(turns) % len(by_id)]
        if request.keys:
            pinned[request.keys[-1]] = replica_id
            if len(pinned) > MAX_SESSIONS:
                pinned.popitem(last=False)
        return Decision(replica_id, Reason.PREFIX, cached_tokens=by_id[replica_id].cached_tokens)

    return choose
