"""Numbers of the load report to one router: what all of them repeat, and the credit, which is how many sequences the
router may have. Pure."""

from typing import NamedTuple

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import EngineLoad


class StreamInfo(NamedTuple):
    """Constants of a replica that every load report repeats."""

    epoch: str
    """Identity of this replica's life; another one starts with an empty cache."""
    num_places: int
    """Sequences in the engine at once, waiting ones included."""
    block_size: int
    max_batched_tokens: int
    max_running: int
    """Sequences that run at once."""

    @classmethod
    def of(cls, epoch: str, config: EngineConfig) -> "StreamInfo":
        return cls(epoch, config.num_places, config.block_size, config.token_budget, config.max_num_seqs)


def grant_credit(num_inflight: int, total_inflight: int, num_routers: int, num_places: int, *, is_closed: bool) -> int:
    """Live sequences a router may have at once: its own and its share of the free places, at least one while any is
    free.

    num_inflight: the router's own. total_inflight: those of all routers, without those that can't begin before an
    adapter makes room. is_closed: nothing more is admitted (draining, or no KV for those that wait already).
    """
    free = num_places - total_inflight
    if is_closed or free <= 0:
        return num_inflight
    return num_inflight + max(1, free // num_routers)


def lacks_kv(load: EngineLoad, block_size: int) -> bool:
    """Whether sequences wait that others may not pass, and whose tokens are more than the free KV blocks hold."""
    return load.unplaced_tokens > load.free_blocks * block_size
