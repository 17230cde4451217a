"""Settings of the engine and of a pool's replicas. Loaded once at start; unknown keys and impossible values are refused with a sentence."""

from typing import Literal

import msgspec

from penstock.wire.errors import ConfigError
from penstock.wire.frames import StepCosts


class TimedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Step times of the timed runner: a table, or constants. Seconds."""

    base_s: float = 0.010
    """Fixed part of a step."""
    row_s: float = 0.0
    """Per decode row."""
    prefill_token_s: float = 0.0
    kv_token_s: float = 0.0
    """Per context token of the decode rows."""
    table: str | None = None
    """Path of a measured step table (JSON), instead of the constants."""
    vocab_size: int = 49152
    num_blocks: int = 4096
    """KV blocks the replica plays to have."""
    max_model_len: int = 8192

    @property
    def costs(self) -> StepCosts:
        return StepCosts(base_s=self.base_s, row_s=self.row_s, prefill_token_s=self.prefill_token_s, kv_token_s=self.kv_token_s)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    runner: Literal["torch", "timed"] = "torch"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the device computes in it, else float32."""
    exact: bool = False
    """Bit-identical output whatever runs beside a request; slower."""
    threads: int | None = None
    """CPU threads of one replica; None: the machine's cores divided by the replicas on it."""
    block_size: int = 16
    """Tokens to a KV block."""
    kv_memory_bytes: int = 512 * 2**20
    """KV cache of one replica."""
    max_num_seqs: int = 64
    """Sequences running at once."""
    max_batched_tokens: int = 512
    """Token budget of a step: decode rows first, then prefill chunks."""
    max_model_len: int | None = None
    """Tokens, prompt and output; None: what the checkpoint says, as far as the KV cache holds it."""
    admission_lookahead: int = 4
    """Sequences granted to routers beyond max_num_seqs, so that a freed place is filled without a round trip."""
    stall_s: float = 60.0
    """A step that takes longer than this fails the health check, and Serve replaces the replica."""
    timed: TimedConfig = msgspec.field(default_factory=TimedConfig)

    def __post_init__(self) -> None:
        for name in ("block_size", "kv_memory_bytes", "max_num_seqs", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"engine.block_size must be a power of two, not {self.block_size}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_batched_tokens ({self.max_batched_tokens}) must be at least engine.max_num_seqs ({self.max_num_seqs}): "
                "a step must hold a row of every sequence"
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"engine.threads must be at least 1, not {self.threads}")
        if self.device != "cpu":
            raise ConfigError(f"engine.device: {self.device} is not available yet; this version computes on the cpu")
