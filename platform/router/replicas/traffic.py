"""What has gone through this gateway to a pool since it began; see `penstock.wire.scaling.PoolFlow`, which is what is
told of it."""

from dataclasses import dataclass

from penstock.wire.scaling import PoolFlow


@dataclass(slots=True)
class Flow:
    """Counted by the pool's remotes: `output_tokens` is on the path of every token."""

    num_started: int = 0
    num_ended: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def told(self) -> PoolFlow:
        return PoolFlow(self.num_started, self.num_ended, self.prefill_tokens, self.cached_tokens, self.output_tokens)
