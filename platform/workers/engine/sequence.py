"""A sequence: one request's tokens, blocks and progress. Plain data, changed only by the scheduler and by commit; no
torch."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from penstock.wire.frames import Finish, SamplingParams, TokenLogprobs


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Times:
    """When a traced sequence was computed; see `wire.frames.Timing`. Set by whoever computes it (`watch.Watch`)."""

    wait_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0


class Resident(Protocol):
    """An adapter in one of the replica's slots; what is in it is the runner's affair."""

    @property
    def digest(self) -> str: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence on its way through the engine.

    Invariants: `num_computed_tokens` <= len(token_ids); KV of tokens [0, num_computed_tokens) is in `block_table`;
    block_keys[i] is the key of the i-th full block of `token_ids`, for as many as are known; `num_published_blocks` of
    them are in the pool's cache.
    """

    request_id: str
    token_ids: list[int]
    """Prompt and output."""
    sampling: SamplingParams
    num_prompt_tokens: int
    """Without output, also for a resumed sequence."""
    block_keys: list[bytes]
    chain_key: bytes
    """Parent key for the block after the last one in `block_keys`."""
    arrival_s: float
    """Monotonic clock, when the engine got it."""
    deadline: float | None = None
    """Unix time."""
    adapter: str | None = None
    """Digest."""
    tenant: str = ""
    lora: Resident | None = None
    """The adapter itself, before the engine gets the sequence."""
    times: Times | None = None
    """Of a traced one."""

    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at first admission; None before it."""
    num_preemptions: int = 0
    acceptance: float | None = None
    """How likely its next draft token is accepted, as estimated by `speculation.lengths`; None before the first
    draft."""
    finish: Finish | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + num_tokens) of a sequence, to be computed in one step, and behind the last known one
    perhaps a draft."""

    seq: Sequence
    start: int
    num_tokens: int
    """Known tokens."""
    max_drafts: int = 0
    """Places for draft tokens behind them: budget and KV slots are there."""
    draft: list[int] | None = None
    """What is guessed to follow, at most `max_drafts` tokens; the runner sets it before it computes, if at all."""

    @property
    def end(self) -> int:
        """Behind the known tokens."""
        return self.start + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether the chunk reaches the last known token, so that its last row's logits choose the next one, and its
        draft's the ones after."""
        return self.end == len(self.seq.token_ids)


class StepShape(NamedTuple):
    """What a step costs depends on; fields as in `penstock.perf.model.step_time_s`."""

    rows: int
    """Sequences in the step."""
    decode_rows: int
    """Those of them with a single token to compute."""
    prefill_tokens: int
    query_context: float
    """Sum over the prefill tokens of the context each attends to."""
    kv_tokens: int
    """Context tokens that the decode rows read."""
    draft_tokens: int = 0
    """Guessed and verified behind the decode rows."""
    draft_rounds: int = 0
    """Tokens of the longest draft."""


@dataclass(frozen=True, slots=True)
class Step:
    """What `Scheduler.schedule` gives to `Runner.launch`: the chunks, in batch order, and who lost its blocks to make room."""

    chunks: list[Chunk]
    preempted: list[Sequence]

    @property
    def num_tokens(self) -> int:
        """What is taken of the budget."""
        return sum(chunk.num_tokens + chunk.max_drafts for chunk in self.chunks)

    @property
    def shape(self) -> StepShape:
        """With the drafts there are: the places for them before the step is run cost nothing."""
        decode_rows = prefill_tokens = kv_tokens = draft_tokens = draft_rounds = 0
        query_context = 0.0
        for chunk in self.chunks:
            count = chunk.num_tokens
            if count == 1:
                decode_rows += 1
                kv_tokens += chunk.start + 1
                if chunk.draft:
                    draft_tokens += len(chunk.draft)
                    draft_rounds = max(draft_rounds, len(chunk.draft))
            else:
                prefill_tokens += count
                query_context += count * (chunk.start + (count + 1) / 2)
        return StepShape(
            len(self.chunks), decode_rows, prefill_tokens, query_context, kv_tokens, draft_tokens, draft_rounds
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for a place; logprobs where the sequence asked for them; or why none could be chosen, and then
    `token_id` means nothing."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class SeqOutput(NamedTuple):
    """What one sequence gained in a step; with a `finish`, its last."""

    seq: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """Aligned with `token_ids`, where the sequence asked for them."""
    finish: Finish | None = None
