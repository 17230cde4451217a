"""The state of one request: where it is, where it has been, and how it ended. Plain data.

Invariant: the dispatcher alone writes it, but for the obstruction, which `obstruction` keeps true. The mailbox,
the trace and the forecasts of routes read it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from penstock.base.errors import PenstockError
from penstock.router.dispatch.quarantine import LossRecord
from penstock.router.dispatch.spans import StreamTrace
from penstock.router.routing.chains import RequestChains
from penstock.router.routing.request import Generation, HoldListener, LazyPrompt, Receipt, Route, TokenizedPrompt
from penstock.router.routing.reserved import Reservation
from penstock.wire.frames import Ability, SamplingParams, needed_abilities, pack_token_ids


class Carrier(Protocol):
    """The source of an answer: a replica, or a provider."""

    def abort(self, sid: int) -> None: ...


class ProviderReservation(NamedTuple):
    """What a call of a provider may cost, reserved before it is made."""

    provider: str
    reservation: Reservation


class ObstructedRoute(NamedTuple):
    """A route that a request waits for."""

    route: Route
    tokenized: TokenizedPrompt
    is_below_share: bool
    """Whether the request's tenant had less than its share of the places there."""


class Obstruction(NamedTuple):
    """Why the latest attempt to place a request had to wait, where it was for room; see `obstruction`."""

    routes: tuple[ObstructedRoute, ...]
    is_kept: bool = False
    """Whether there were places, which are kept for other tenants."""


@dataclass(slots=True)
class RequestState:
    generation: Generation
    arrival: int
    """Number of the request in the order of arrival: its place in a lane of the queue, also when it comes back."""
    begun_s: float
    """Time of its arrival, on the router's clock."""
    receipt: Receipt
    trace: StreamTrace | None
    """Recorder of the request's spans; None if the request is not traced."""
    chains: RequestChains

    # before and between attempts
    tokenized: TokenizedPrompt
    """The prompt for the model of the latest attempt; until the first token another model may get it."""
    hold_listener: HoldListener | None = None
    """Told of each wait for a first replica, also of one in the middle of the answer; None: nobody is."""
    model_index: int = 0
    """`Route.model` of the latest attempt."""
    obstruction: Obstruction | None = None
    """Why the latest attempt had to wait; None: it did not, or for a reason that any change may end."""
    may_be_overdue: bool = False
    """Whether others may go first where its first token would come too late: not once it has waited for a first
    replica, or has been placed."""
    is_overdue: bool = False
    """Whether an attempt of this wait has found that the first token would come too late."""
    unread_prompts: Sequence[LazyPrompt] = ()
    """Prompts that must be tokenized before a route can be chosen."""
    reservation: ProviderReservation | None = None
    """What is reserved for a call that is not made yet."""
    wanted_provider: str = ""
    """Provider that the latest attempt has chosen, where its cost must be reserved first."""
    cap_refusals: dict[str, PenstockError] = field(default_factory=dict)
    """Why providers, by name, can't be asked for what they might cost."""
    is_held: bool = False
    """Whether the request waits for a first replica that is started for it."""
    output: Sequence[int] = ()
    """Token ids that the attempts before have delivered; the next attempt goes on behind them."""
    refused_by: set[str] = field(default_factory=set)
    """Replicas, by id, and providers, by name, that gave no answer and are not tried again."""
    refusal: PenstockError | None = None
    """A provider's reason for its refusal, the latest."""

    losses: LossRecord = field(init=False)
    """Replicas that were lost with the request; `quarantine` writes and weighs them."""
    goes_alone: bool = False
    """Whether it is tried again only when no other such request is without a token (`trials`)."""
    alone_until_s: float | None = None
    """Time until which it waits for those, on the dispatcher's clock; None: none has held it up."""
    num_text_tokens: int = 0
    """Output tokens that were delivered as text."""
    num_beam_tokens: int = 0
    """Output tokens that a search has computed, of the attempt that came furthest."""

    # the latest attempt
    carrier: Carrier | None = None
    """Replica or provider that has the sequence; None while no attempt is under way."""
    sid: int = 0
    """Number of the sequence at its carrier."""
    is_text: bool = False
    """The carrier answers in text (TextDelta), without token ids."""

    # the answer
    has_begun: bool = False
    """A replica's first delta has been delivered."""
    is_finished: bool = False
    """The last delta has been delivered."""
    error: PenstockError | None = None
    """Why the answer fails; raised behind the deltas that have come."""
    deadline_timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.losses = LossRecord(self.generation.request_id)

    @property
    def packed_output(self) -> bytes:
        return pack_token_ids(self.output) if self.output else b""

    def num_tokens(self, tokenized: TokenizedPrompt) -> int:
        """Tokens of prompt and output so far."""
        return tokenized.num_prompt_tokens + len(self.output)

    def sampling(self, tokenized: TokenizedPrompt) -> SamplingParams:
        """Parameters of the next attempt: once there is a token, the prompt's log probabilities have been delivered."""
        sampling = tokenized.sampling
        if self.output and sampling.prompt_logprobs is not None:
            return msgspec.structs.replace(sampling, prompt_logprobs=None)
        return sampling

    def num_tokens_to_score(self, tokenized: TokenizedPrompt) -> int:
        """Tokens of the prompt whose log probabilities the next attempt is asked for."""
        return 0 if self.sampling(tokenized).prompt_logprobs is None else tokenized.num_prompt_tokens

    def needed_abilities(self, tokenized: TokenizedPrompt) -> frozenset[Ability]:
        """What a replica must be able to do for the next attempt."""
        needed = needed_abilities(self.sampling(tokenized))
        return needed if self.generation.constraint is None else needed | {Ability.CONSTRAINTS}
