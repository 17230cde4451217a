"""The traffic of this gateway with one pool since it began.

The autoscaler gets it as `penstock.wire.scaling.PoolFlow`.
"""

from dataclasses import dataclass

from penstock.wire.scaling import PoolFlow


@dataclass(slots=True)
class PoolTraffic:
    """Sums counted by the clients of the pool's replicas: `output_tokens` is on the path of every token."""

    num_started: int = 0
    num_ended: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_passed: int = 0
    num_interactive: int = 0
    num_batch: int = 0

    def begin(self, service_class: str, uncached_tokens: int, cached_tokens: int) -> None:
        """Count a sequence that is submitted, with the tokens of its prompt."""
        self.num_started += 1
        self.num_interactive += service_class == "interactive"
        self.num_batch += service_class == "batch"
        self.prefill_tokens += uncached_tokens
        self.cached_tokens += cached_tokens

    def to_wire(self) -> PoolFlow:
        return PoolFlow(
            self.num_started,
            self.num_ended,
            self.prefill_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.num_passed,
            self.num_interactive,
            self.num_batch,
        )
