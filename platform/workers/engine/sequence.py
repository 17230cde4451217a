"""A sequence: one request's tokens, blocks and progress. Plain data, changed only by the scheduler and by commit; no
torch."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from penstock.wire.frames import BeamOutput, Finish, PromptLogprobs, SamplingParams, TokenLogprobs, needs_sampling
from penstock.workers.engine.beams import BeamSearch
from penstock.workers.engine.lookups import Packed


class Status(Enum):
    """Where a sequence is on its way through the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Times:
    """Times of a traced sequence, Unix time but for `wait_s`; `wire.frames.Timing` on the stream. Set by
    `timing.TimingRecorder`."""

    wait_s: float = 0.0
    """Seconds from arrival to admission."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0


class Resident(Protocol):
    """An adapter in one of the replica's slots; its contents are the runner's affair."""

    @property
    def digest(self) -> str: ...


class Grammar(Protocol):
    """A compiled constraint, and how far one sequence's answer has come in it; its contents are the runner's affair."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole, and no token can follow."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence on its way through the engine.

    Invariants: `num_computed_tokens` <= len(token_ids); KV of tokens [0, num_computed_tokens) is in `block_table`;
    block_keys[i] is the key of the i-th full block of `token_ids`, for as many as are known; `num_published_blocks` of
    them are in the pool's cache.
    """

    request_id: str
    token_ids: list[int]
    """The sequence's token ids, prompt and output. The last one may be negative, -1 - row: the token of that row of a
    step that is under way (see `steps_ahead`)."""
    sampling: SamplingParams
    num_prompt_tokens: int
    """Tokens of the prompt; the output of a resumed sequence is not counted."""
    block_keys: list[bytes]
    chain_key: bytes
    """Parent key for the block after the last one in `block_keys`."""
    arrival_s: float
    """Time of arrival at the engine, seconds of the monotonic clock."""
    deadline: float | None = None
    """Time of the monotonic clock at which the sequence ends unfinished, seconds; None: it has no limit."""
    adapter: str | None = None
    """Digest of the adapter; None: the base model alone."""
    tenant: str = ""
    is_batch: bool = False
    """Whether it comes behind all others, as the class batch does until enough were admitted past it."""
    weight: float = 0.0
    """Rows of a step that the tenant may have for one of a tenant with weight 1; 0: its rows are not divided by tenant,
    but by arrival."""
    tpot_s: float | None = None
    """Seconds per output token that its class should have at the most; None: it has no such target."""
    lora: Resident | None = None
    """The loaded adapter, set before the engine gets the sequence."""
    grammar: Grammar | None = None
    """What the answer keeps to, set by `constrain` before the engine gets the sequence; None: anything is allowed."""
    times: Times | None = None
    """Times of a traced sequence; None: it is not traced."""
    cache_scope: str = ""
    """Part of the tenant's sequences that share KV, where `block_keys` do not say it; empty: all of them."""
    prediction: list[int] = field(default_factory=list)
    """Token ids of what the answer may be, from its first on: drafts; empty: nobody knows."""

    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    num_found_blocks: int | None = None
    """Leading blocks that others had computed, found in the cache at first admission; None before it."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at first admission; None before it."""
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Sequences of other classes that were admitted past this one of the class batch."""
    num_bypasses: int = 0
    """Sequences that were admitted past this one because its blocks were not free."""
    is_passable: bool = False
    """Whether its blocks are not free, and others may be admitted past it."""
    paced_since_s: float | None = None
    """Time at which the scheduler saw its first token here, seconds of the clock of `Scheduler.schedule`; None before
    it. Of sequences with a target."""
    num_unpaced_tokens: int = 0
    """Output tokens that it had then."""
    num_skipped: int = 0
    """Steps since its last row in one, in which it could have had one and yielded to others."""
    acceptance: float | None = None
    """Estimated chance that its next draft token is accepted, by `draft_lengths`; None before the first draft."""
    draft_gain: float | None = None
    """Mean of the tokens that an attempt to draft gains, where the drafter knows their chances; None: none yet."""
    packed: Packed = field(default_factory=Packed)
    """The tokens, as far as they have been looked up."""
    search: BeamSearch | None = None
    """The search that the sequence leads, set when the engine takes it; None: its tokens are chosen one by one."""
    beams: list["Sequence"] = field(default_factory=list)
    """The beams of its search, once the prompt is computed: each a row with a block table of its own, whose blocks may
    be others' too. The sequence itself then holds none."""
    leader: "Sequence | None" = None
    """The sequence whose beam this is."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens from the second on, as far as they are computed, where they are wanted.
    A sequence that starts over keeps them."""
    finish: Finish | None = None
    error: str | None = None
    step_s: float = 0.0
    """Seconds of the engine's steps that are its share, by `time_shares`."""
    needs_sampling: bool = field(init=False)
    """Whether its tokens take more than the largest logit."""

    def __post_init__(self) -> None:
        self.needs_sampling = needs_sampling(self.sampling)

    def constrain(self, grammar: Grammar) -> None:
        """Make the answer keep to a grammar, which is where the output so far leads."""
        self.grammar, self.needs_sampling = grammar, True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def unknown_row(self) -> int | None:
        """Row of the step under way that chooses the last token; None: all tokens are known."""
        return -1 - self.token_ids[-1] if self.token_ids and self.token_ids[-1] < 0 else None

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_rows(self) -> int:
        """Rows that it takes of a step."""
        return self.sampling.num_beams or 1

    @property
    def num_context_tokens(self) -> int:
        """Tokens of all its rows."""
        return sum([len(beam.token_ids) for beam in self.beams]) if self.beams else len(self.token_ids)

    @property
    def block_tables(self) -> "list[list[int]]":
        return [self.block_table, *[beam.block_table for beam in self.beams]]

    def make_beam(self, token_ids: list[int], num_computed_tokens: int, block_table: list[int]) -> "Sequence":
        """A beam of the search that this sequence leads."""
        return Sequence(
            self.request_id,
            token_ids,
            self.sampling,
            self.num_prompt_tokens,
            [],
            b"",
            self.arrival_s,
            adapter=self.adapter,
            tenant=self.tenant,
            lora=self.lora,
            block_table=block_table,
            num_computed_tokens=num_computed_tokens,
            leader=self,
        )

    @property
    def num_scored_tokens(self) -> int:
        """Leading tokens of the prompt whose rows have given a log probability."""
        return sum([part.num_tokens for part in self.prompt_logprobs])

    @property
    def lacks_scores(self) -> bool:
        """Whether rows of prompt tokens are still to be computed for log probabilities."""
        return self.sampling.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + num_tokens) of a sequence, to be computed in one step, and behind the last known one
    perhaps a draft."""

    seq: Sequence
    start: int
    num_tokens: int
    """Known tokens to compute, 1 or more."""
    max_drafts: int = 0
    """Places for draft tokens behind the known ones; budget and KV slots are reserved for them."""
    draft: list[int] | None = None
    """Token ids guessed to follow, at most `max_drafts`; the runner sets it before it computes, if at all, unless they
    were looked up."""
    num_matched: int = 0
    """Tokens of the sequence's end that stood where the draft was looked up; 0: it was not."""
    keep_from: float = 0.0
    """Least chance, as far as the drafter knows it, that a draft is right up to a token, for which that is proposed."""
    go_from: float = 0.0
    """Least one for which another is computed behind it."""
    is_observed: bool = True
    """Whether the drafter may see what the model computes for it, where it wants to."""
    num_rounds: int | None = None
    """Tokens that the drafter computed for the draft, those not proposed too, where it says so."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the tokens behind those at `scored`; the runner sets it."""
    row: int | None = None
    """Place of its choice among those of the step, set by `steps_ahead.assume`; None: it chooses nothing, or has not
    been assumed."""
    is_assumed: bool = False
    """Whether what it computes counts as computed before it is known."""

    @property
    def end(self) -> int:
        """Position after the last known token of the chunk."""
        return self.start + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether the chunk reaches the last known token, so that its last row's logits choose the next one, and its
        draft's the ones after; never where no output is wanted."""
        return self.row is not None or (self.end == len(self.seq.token_ids) and self.seq.sampling.max_tokens > 0)

    @property
    def scored(self) -> range:
        """Positions whose rows give a log probability of the prompt's next token that is wanted and not known."""
        seq = self.seq
        if seq.sampling.prompt_logprobs is None:
            return range(0)
        return range(max(self.start, seq.num_scored_tokens), min(self.end, seq.num_prompt_tokens - 1))


class StepShape(NamedTuple):
    """Numbers that a step's time depends on; fields as in `penstock.perf.model.step_time_s`."""

    rows: int
    """Sequences in the step, tokens of prompts whose log probabilities it computes, and drafts that were looked up,
    which take what a row does."""
    decode_rows: int
    """Sequences of the step with a single token to compute."""
    prefill_tokens: int
    query_context: float
    """Sum over the prefill tokens of the context tokens that each attends to."""
    kv_tokens: int
    """Context tokens that the decode rows read."""
    draft_tokens: int = 0
    """Tokens that a drafter guessed, verified behind the decode rows."""
    draft_rounds: int = 0
    """Tokens of the longest draft, those that were computed and not proposed too."""
    sampled_rows: int = 0
    """Rows from which a token is chosen by more than the largest logit, or a log probability is taken."""
    shortest_prompt: int = 0
    """Tokens of the shortest prompt that the step reads to its end for one row of logits; 0: there is none."""
    looked_up_rows: int = 0
    """Sequences whose drafts were looked up."""


@dataclass(frozen=True, slots=True)
class Step:
    """Work of one step, from `Scheduler.schedule` to `Runner.launch`: the chunks, in batch order, the sequences that
    lost their blocks to make room, and the blocks to be copied."""

    chunks: list[Chunk]
    preempted: list[Sequence]
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks whose KV is to be copied before anything is computed, and where to: beams that go apart."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step takes of the budget."""
        return sum(chunk.num_tokens + chunk.max_drafts for chunk in self.chunks)

    @property
    def shape(self) -> StepShape:
        """Shape of the step with the drafts it has: places that hold no draft cost nothing."""
        decode_rows = prefill_tokens = kv_tokens = draft_tokens = draft_rounds = sampled_rows = scored_rows = 0
        shortest_prompt = looked_up_rows = looked_up_tokens = 0
        query_context = 0.0
        for chunk in self.chunks:
            count = chunk.num_tokens
            if count == 1:
                decode_rows += 1
                kv_tokens += chunk.start + 1
                if chunk.num_matched:
                    looked_up_rows += 1
                    looked_up_tokens += len(chunk.draft or ())
                elif chunk.draft is not None:
                    draft_tokens += len(chunk.draft)
                    draft_rounds = max(draft_rounds, len(chunk.draft), chunk.num_rounds or 0)
            else:
                prefill_tokens += count
                query_context += count * (chunk.start + (count + 1) / 2)
                if chunk.is_sampled and chunk.seq.sampling.prompt_logprobs is None:
                    shortest_prompt = min(shortest_prompt or chunk.end, chunk.end)
            if chunk.seq.needs_sampling and chunk.is_sampled:
                sampled_rows += 1 + len(chunk.draft or ())
            if chunk.seq.sampling.prompt_logprobs is not None:
                scored_rows += len(chunk.scored)
        return StepShape(
            len(self.chunks) + scored_rows + looked_up_tokens,
            decode_rows,
            prefill_tokens,
            query_context,
            kv_tokens,
            draft_tokens,
            draft_rounds,
            sampled_rows + scored_rows,
            shortest_prompt,
            looked_up_rows,
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for a place, with logprobs where the sequence wants them; or the reason why none could be chosen
    (`error`), and then `token_id` means nothing."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    is_last: bool = False
    """Whether the sequence's grammar lets nothing follow."""
    is_at_fault: bool = False
    """Whether the `error` is that of the request, and not of what was computed."""


class SeqOutput(NamedTuple):
    """Tokens that one sequence gained in a step; with a `finish`, its last."""

    seq: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """Log probabilities aligned with `token_ids`; None where the sequence does not want them."""
    finish: Finish | None = None
    beams: list[BeamOutput] | None = None
    """The answers of a search, with its end."""
    num_beam_tokens: int = 0
    """Tokens that the search has computed so far in all its beams."""
