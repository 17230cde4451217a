"""Which replicas have an adapter in memory, and telling them to load or drop it: over the streams there are, from their
load reports."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from penstock.wire.frames import Load

LOOK_EVERY_S = 0.01
NEWS = 2
"""Load reports after which a failure that is still reported is not an older one."""


class Told(Protocol):
    """A ready replica."""

    @property
    def load(self) -> Load | None: ...
    @property
    def num_reports(self) -> int: ...
    def load_adapter(self, digest: str) -> None: ...
    def drop_adapter(self, digest: str) -> None: ...


class Spread(NamedTuple):
    """Of one adapter over the ready replicas of some pools."""

    live: int
    loaded: int
    error: str | None
    """Why one could not load it."""


class Spreader:
    def __init__(self, remotes: Callable[[Iterable[str]], Iterable[Told]]) -> None:
        """remotes: the ready replicas of pools."""
        self._remotes = remotes

    def look(self, pools: Iterable[str], digest: str) -> Spread:
        loads = [remote.load for remote in self._remotes(pools) if remote.load is not None]
        errors = [sentence for load in loads for failed, sentence in load.failed_adapters if failed == digest]
        return Spread(
            len(loads), sum(digest in load.resident_adapters for load in loads), errors[0] if errors else None
        )

    async def load(self, pools: Iterable[str], digest: str, timeout_s: float) -> Spread:
        """Have every replica load it, and wait until each has or could not; after `timeout_s` it is told how far that
        came."""
        pools = tuple(pools)
        asked: dict[int, int] = {}
        for remote in self._remotes(pools):
            asked[id(remote)] = remote.num_reports
            remote.load_adapter(digest)
        try:
            async with asyncio.timeout(timeout_s):
                while any(self._is_pending(remote, digest, asked.get(id(remote))) for remote in self._remotes(pools)):  # noqa: ASYNC110 loads come every 20 ms and tell nobody in particular
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            pass
        return self.look(pools, digest)

    def drop(self, pools: Iterable[str], digest: str) -> None:
        for remote in self._remotes(pools):
            remote.drop_adapter(digest)

    def _is_pending(self, remote: Told, digest: str, asked: int | None) -> bool:
        """One that came meanwhile was not asked, and is not waited for."""
        if asked is None or remote.load is None or digest in remote.load.resident_adapters:
            return False
        has_failed = any(failed == digest for failed, _ in remote.load.failed_adapters)
        return not has_failed or remote.num_reports < asked + NEWS
