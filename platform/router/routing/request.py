"""The seam between the HTTP surface and dispatch: what is wanted, what comes back, and why from there.

The HTTP side builds a `Generation`, awaits `Dispatcher.start` (queueing happens in there), reads the stream until a
delta has a `finish`, and closes the stream whatever happened. Retries, other replicas and resumption are invisible from
here.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock.base.tracing import NOT_TRACED, StartedTrace
from penstock.router.routing.policy import LazyBasis
from penstock.router.routing.spending import Spending
from penstock.router.routing.tiers import DEFAULT_RULE, Tier, TierReason, TierRule
from penstock.tenancy.share import DEFAULT_SHARE, Share
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.frames import Constraint, Delta, SamplingParams
from penstock.wire.openai import ChatRequest, CompletionRequest


class ProviderRequest(NamedTuple):
    """One sequence of a request, as the caller wrote it: what a provider is sent."""

    request: ChatRequest | CompletionRequest
    prompt: int = 0
    """Index of the prompt in a completion request; 0 is the first, and a chat's only one."""


class Route(NamedTuple):
    """Where a request may be answered: by pools of one tier and one model, or by a provider."""

    tier: Tier
    pools: tuple[str, ...]
    model: int = 0
    """Model whose tokens they need: 0 is the generation's own prompt, n its `lazy_prompts[n - 1]`."""
    provider: str | None = None


class TokenizedPrompt(NamedTuple):
    """The prompt in the tokens of one model, with the parameters that follow from its context."""

    packed_token_ids: bytes
    """Ids as 4 bytes each, little-endian: the form in which a Submit carries them."""
    num_prompt_tokens: int
    sampling: SamplingParams
    constraint: Constraint | None = None
    """What the answer must be, where each model has words of its own for it; None: what the generation says."""


class AnsweringModel(NamedTuple):
    """The model that answers, where it is not the generation's first one."""

    fingerprint: str
    tokenizer: Tokenizer | None
    """Tokenizer of the model; None for a provider, which answers in text."""


class LazyPrompt:
    """The prompt for another model of the same name, tokenized when it is first wanted: `tokenized` or `error` is set
    then."""

    __slots__ = ("_tokenize", "answering_model", "error", "tokenized")

    def __init__(self, tokenize: Callable[[], Awaitable[TokenizedPrompt]], answering_model: AnsweringModel) -> None:
        self._tokenize = tokenize
        self.answering_model = answering_model
        self.tokenized: TokenizedPrompt | None = None
        self.error: RequestError | None = None

    @property
    def is_known(self) -> bool:
        return self.tokenized is not None or self.error is not None

    async def load(self) -> None:
        if not self.is_known:
            try:
                self.tokenized = await self._tokenize()
            except RequestError as error:
                self.error = error


class CallDelta(NamedTuple):
    """A part of a tool call in an answer: it begins with its id and name, and its arguments come after that."""

    number: int
    """Number of the call within the answer; 0 is the first."""
    arguments: str = ""
    """The next part of the arguments, which are JSON."""
    id: str | None = None
    name: str | None = None


class TextDelta(Delta, frozen=True, array_like=True):
    """A part of an answer that comes as text, from a provider. It has no token ids, and never leaves this process."""

    text: str = ""
    num_tokens: int = 0
    """Estimated, and corrected by the last one (which may be negative) where the provider gives the sum."""
    num_prompt_tokens: int | None = None
    """Tokens of the prompt as the provider counts them; set on the last delta only."""
    calls: tuple[CallDelta, ...] = ()
    """Parts of tool calls, as the provider has found them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence that a caller waits for; `n` choices are n generations."""

    request_id: str
    pools: tuple[str, ...]
    """Names of the candidate pools and providers, in no order."""
    packed_token_ids: bytes
    """Ids of the prompt, 4 bytes each, little-endian."""
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant: str
    salt: bytes
    """What makes the KV blocks the tenant's own, or of a part of its requests; derived by the server."""
    deadline: float
    """Time of the monotonic clock at which the sequence ends, finished or not, seconds."""
    adapter: str | None = None
    """Digest; None: the base model."""
    traced: StartedTrace = NOT_TRACED
    """The request's trace, and the headers that pass it on to whoever else works on the request, if any."""
    routes: tuple[Route, ...] = ()
    """The same places in the order of the tenant's tier policy; none: all of the pools are one route."""
    tier_rule: TierRule = DEFAULT_RULE
    """Where it may be answered; the routes keep to it."""
    lazy_prompts: tuple[LazyPrompt, ...] = ()
    """The prompt for the other models of the routes, in the order of `Route.model`."""
    skipped: TierReason | None = None
    """Why a route before all of these was left out."""
    provider_request: ProviderRequest | None = None
    """The request as the caller wrote it; set where a provider is among the routes."""
    share: Share = DEFAULT_SHARE
    """What the tenant may have of the replicas where others want them too."""
    cache_scope: str = ""
    """Name of that part of the tenant's requests; empty: all of them."""
    ttft_target_s: float | None = None
    """Target of the time to first token of the request's class, seconds; None: the gateway's."""
    priority: int = 0
    """Place in the queue among the tenant's own requests: lower goes first."""
    constraint: Constraint | None = None
    """What the answer must be; None: anything."""
    prediction: bytes = b""
    """Packed ids of what the answer may be, in tokens of the first model."""
    num_judged_tokens: int = 0
    """First tokens of an edge pool's answer whose log probabilities are wanted, whatever the parameters say; 0: none.
    See `completions.escalation`."""

    @property
    def account(self) -> str:
        """Name under which the fair order counts the sequence: its tenant, or its tenant's batches."""
        return self.share.account(self.tenant)

    @property
    def tokenized(self) -> TokenizedPrompt:
        return TokenizedPrompt(self.packed_token_ids, self.num_prompt_tokens, self.sampling)


class RouteAttempt(NamedTuple):
    """A route as it was when one was chosen: its forecast at that moment."""

    tier: Tier
    places: tuple[str, ...]
    """Pools, or the provider."""
    predicted_ttft_s: float | None
    obstacle: str | None
    predicted_cost_nano: int | None = None
    """Predicted cost in 1e-9 of the prices' unit; None: it is not known, or nobody goes by it."""
    predicted_tpot_s: float | None = None


@dataclass(slots=True)
class Receipt:
    """Where a sequence was answered, and why; what is known at the first token goes into the response's headers.

    Written by dispatch alone, and filled anew by each attempt.
    """

    request_id: str
    tier: str = ""
    tier_reason: str = ""
    pool: str = ""
    replica: str = ""
    reason: str = ""
    predicted_ttft_s: float | None = None
    predicted_cost_nano: int | None = None
    """Predicted cost in 1e-9 of the prices' unit; None: the place has no price, or the policy does not go by it."""
    predicted_cached_tokens: int = 0
    cached_tokens: int = 0
    queued_s: float = 0.0
    attempts: int = 1
    stays: bool = False
    """The request asked to stay on the edge."""
    is_taken: bool = False
    """A replica or provider has the sequence, or had it to its end; not where it refused, failed or was lost."""
    placed_s: float | None = None
    """Time of the latest attempt, monotonic, seconds: `predicted_ttft_s` is told from there. None: there was none."""
    scores: dict[str, float] = field(default_factory=dict)
    """Predicted TTFT in seconds of each candidate replica, and provider."""
    basis: LazyBasis | None = None
    """What the choice of the replica rested on; None: a provider answers."""
    considered: list[RouteAttempt] = field(default_factory=list)
    """The routes compared, in the policy's order, where there was more than one."""
    answering_model: AnsweringModel | None = None
    """The model that answers, if it is not the generation's own; else None."""
    num_prompt_tokens: int | None = None
    """Tokens of the prompt as the answering model counts them; None: unknown, or the generation's own."""
    spendings: list[Spending] = field(default_factory=list)
    """What each attempt has cost, the latest last; it may grow for a moment after the answer's end."""

    @property
    def step_s(self) -> float:
        """Seconds of steps that were the sequence's share, on all replicas."""
        return sum([spending.step_s for spending in self.spendings])

    @property
    def cost_nano(self) -> int:
        """Cost of all attempts at places that have a price, 1e-9 of the unit of prices."""
        return sum([spending.cost_nano or 0 for spending in self.spendings])

    @property
    def has_cost(self) -> bool:
        """Whether every place that has computed it has a price."""
        return bool(self.spendings) and all(spending.cost_nano is not None for spending in self.spendings)

    @property
    def is_settled(self) -> bool:
        """Whether its cost is what it will be."""
        return all(spending.is_settled for spending in self.spendings)

    @property
    def is_provided(self) -> bool:
        """A provider answers, which reports no tokens in a cache."""
        return self.answering_model is not None and self.answering_model.tokenizer is None


class Stream(Protocol):
    """The answer to one Generation."""

    @property
    def receipt(self) -> Receipt: ...

    async def next(self) -> Delta:
        """All that has come since the last call, merged into one delta; waits until there is something.

        The delta with a `finish` is the last. Raises ReplicaLost, EngineFault, InvalidRequest, Overloaded,
        DeadlineExceeded, or where it has to be placed again what `Dispatcher.start` raises, instead of a delta whose
        finish says so: what is returned finished as stop or length.
        """

    def listen(self, listener: Callable[[Delta], bool]) -> None:
        """Offer plain deltas (tokens, no end) to `listener` as they come, which saves waking the reader for each.

        What the listener declines (False), and whatever is not a plain delta, waits for `next`; so does what comes
        while something waits.
        """

    def close(self) -> None:
        """Release everything; aborts the sequence unless it finished. Safe to call twice."""


class HoldListener(Protocol):
    """The one that is told when a request waits for the first replica of its pool."""

    def begin_hold(self, ready_in_s: Callable[[], float | None]) -> None:
        """A wait begins. ready_in_s: seconds until the replica should be there, as known when it is called; None:
        nobody knows."""

    def end_hold(self) -> None:
        """A wait is over, however it ended."""


class Dispatcher(Protocol):
    async def start(self, generation: Generation, listener: HoldListener | None = None) -> Stream:
        """Queue, route and submit. listener: told when the request is held for a first replica. Raises RateLimited
        where the tenant has its share of the queue or of what is held, Overloaded (both with retry_after_s),
        DeadlineExceeded, ContextTooLong, or a provider's refusal of the request itself."""
