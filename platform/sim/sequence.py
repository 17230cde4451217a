"""A sequence on a modelled replica: lengths and block keys instead of tokens. Plain data, changed by the replica's
batching alone."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ModelledSequence:
    """One request on its way through a replica."""

    sid: int
    """Number of the sequence on its stream."""
    num_prompt_tokens: int
    max_tokens: int
    """Tokens of the answer: made-up answers never end sooner."""
    keys: list[bytes]
    """Keys of the leading full blocks that other requests may have too, those of the answer included; all blocks behind
    them are this request's alone."""
    tenant: str = ""
    weight: float = 0.0
    """Rows of a step that the tenant may have for one of a tenant with weight 1; 0: rows are not divided by tenant."""
    is_batch: bool = False
    tpot_s: float | None = None
    """Seconds per output token that its class should have at the most; None: it has no such target."""

    num_tokens: int = field(init=False)
    """Tokens known when it was last admitted, or when its first token since then came."""
    num_computed_tokens: int = 0
    """Tokens computed, while its prompt is computed."""
    is_decoding: bool = False
    """Whether its prompt is computed: from then on each step adds a token."""
    offset: int = 0
    """Tokens less the number of steps, while it decodes."""
    first_step: int = 0
    """Number of the step that brought its first token since it was last admitted."""
    num_placed_tokens: int = 0
    """Tokens for which it was given blocks when it was last admitted."""
    held_keys: list[bytes | None] = field(default_factory=list)
    """Keys of its leading blocks that it holds; None: a block whose key another block had already."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at first admission; None before it."""
    num_preemptions: int = 0
    num_bypasses: int = 0
    is_passable: bool = False
    token_times_s: list[float] = field(default_factory=list)
    """Time of each token that came before the latest admission, and from the end on of every token."""
    num_ended_steps: int = 0
    """Number of the step with which it ended."""
    is_refused: bool = False
    """Whether the replica did not take it: its context is too short."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def num_lacking(self) -> int:
        """Tokens that the next step has to compute before the next one can be chosen."""
        return 1 if self.is_decoding else self.num_tokens - self.num_computed_tokens

    def num_known_blocks(self, block_size: int) -> int:
        """Full blocks of its tokens by which others can know it: those of the prompt, and of the answer as computed."""
        return max(self.num_prompt_tokens, self.num_tokens - 1) // block_size

    def last_step(self, max_len: int) -> int:
        """Number of the step that brings its last token, while it decodes. max_len: longest sequence."""
        return min(self.num_prompt_tokens + self.max_tokens, max_len) - self.offset

    def next_step(self, max_len: int, block_size: int) -> int:
        """Number of the next step behind which it ends, or has filled a block that others may want."""
        last = self.last_step(max_len)
        if len(self.held_keys) >= len(self.keys):
            return last
        return min(last, (len(self.held_keys) + 1) * block_size + 1 - self.offset)
