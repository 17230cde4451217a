"""Escalation of hard requests: the first tokens of an edge pool are held back, and where the model was unsure of them,
or the pool can't make the answer what it must be, the cloud answers instead, before anything was shown.

Not the choice of a replica or tier (dispatch makes that for each of the two attempts), and not the threshold
(`penstock tiers tune` finds one). The measure is the mean log probability of the tokens that were chosen, of the
model's own distribution, before temperature, truncation, penalties and masks; what stands behind a stop string does not
count. Invariants: a request goes only where `Escalation.routes` leads, which its tenant's policy allows; nothing of a
sequence is given out before it is decided; once it is, the stream is like any other. Where the cloud gives no answer
the edge's goes on, if need be from its beginning: same seed, same tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import msgspec

from penstock.base.errors import PenstockError
from penstock.router.completions.candidates import Candidates
from penstock.router.completions.text_assembly import Assembler
from penstock.router.config import EscalationConfig
from penstock.router.routing.deltas import merge_deltas
from penstock.router.routing.request import Generation, Receipt, Route, Stream
from penstock.router.routing.tiers import Tier, TierReason
from penstock.wire.errors import CapReached, InvalidRequest, NoPlace, RequestError
from penstock.wire.frames import Delta, TokenLogprobs

EDGE: Tier = "edge"
AWAY: Tier = "cloud"
"""The tier that an escalated request goes to."""
FAILED = "failed"
"""Reason of a receipt: another tier took the request, and gave no answer."""
LIMIT = "limit"
"""Reason of a receipt: an attempt at the edge beside the answer could never fit into the tenant's limits."""


class Outcome(StrEnum):
    """What became of a request at a pool that escalates; label of penstock_escalations_total."""

    KEPT = "kept"
    """The edge's answer was sure enough."""
    ESCALATED = "escalated"
    """The edge was not sure, and the cloud answered."""
    NOT_ALLOWED = "not_allowed"
    """The request may not leave the edge, so nothing was held back."""
    NO_CLOUD = "no_cloud"
    """The edge's answer went on, sure or not, because the cloud could not take the request."""
    CONSTRAINT = "constraint"
    """The edge can't make the answer what it must be, and the cloud answered."""


class Escalation(NamedTuple):
    """The places that one request may be sent to, and the rule."""

    rule: EscalationConfig
    routes: tuple[Route, ...]
    """Routes of other tiers, in the order of the tenant's policy, as the generation numbers their models; empty: none,
    for `obstacle`."""
    patience_s: float = 1.0
    """Longest wait for a place there, while the edge's answer is held."""
    obstacle: Outcome | None = None
    """NOT_ALLOWED, or NO_CLOUD where no route can do what the request asks for or two attempts would exceed what its
    tenant may use at all; None: it may be sent."""
    reason: str = ""
    """A receipt's reason for the obstacle."""


def find_escalation(
    rule: EscalationConfig | None, candidates: Candidates, patience_s: float, *, may_leave: bool
) -> Escalation | None:
    """What the rule of a model's edge pools makes of a request with these candidates; None where there is no rule.
    patience_s: longest wait for a place in another tier. may_leave: whether the tenant's policy and the request itself
    let it leave the edge."""
    if rule is None:
        return None
    routes = [_narrow(route, rule.to) for route in candidates.routes if route.tier != EDGE]
    found = tuple(route for route in routes if route.pools or route.provider is not None)
    if not may_leave:
        return Escalation(rule, found, patience_s, Outcome.NOT_ALLOWED)
    if not found:
        return Escalation(rule, found, patience_s, Outcome.NO_CLOUD, TierReason.CAPABILITY)
    return Escalation(rule, found, patience_s)


def _narrow(route: Route, place: str | None) -> Route:
    """The route with only the pool or provider that is named, if one is; without any, if it is another's."""
    if place is None or route.provider == place:
        return route
    return route._replace(pools=tuple(pool for pool in route.pools if pool == place), provider=None)


class EdgeAttempt(NamedTuple):
    """An attempt at the edge of which nothing was shown."""

    receipt: Receipt
    num_prompt_tokens: int
    num_tokens: int

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were in the replica's cache."""
        return self.receipt.cached_tokens if self.num_prompt_tokens else 0


@dataclass(slots=True)
class Trial:
    """One sequence at a pool that escalates, and what has become of it so far. Receipts keep it long after the answer,
    so it holds nothing of the prompt or the text."""

    escalation: Escalation
    outcome: Outcome | None = None
    """None: it is not decided yet, or another tier answered at once."""
    reason: str = ""
    """Why the cloud did not get a request that was to be sent there."""
    mean_logprob: float | None = None
    num_held: int = 0
    """Tokens that were held back and judged, at most as many as the rule says."""
    held_s: float = 0.0
    """Time from the first of them to the decision."""
    first_token_s: float | None = None
    """Monotonic time of the first token that was held back and then shown, seconds; None: there is none such."""
    edge: EdgeAttempt | None = None
    """What the edge did for an answer that is another attempt's."""
    vain: list[Receipt] = field(default_factory=list)
    """Receipts of all attempts that did not give the answer, whose costs are the request's too."""

    @property
    def num_unshown_tokens(self) -> int:
        """Tokens that count although they are no part of the answer: what is held back still, or was in vain."""
        if self.edge is not None:
            return self.edge.num_tokens
        return self.num_held if self.outcome is None else 0

    @property
    def is_away(self) -> bool:
        """Whether another tier was found to be the request's place."""
        return self.outcome in (Outcome.ESCALATED, Outcome.CONSTRAINT)

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the edge may compute in vain at most, those of the prompt left out."""
        return 0 if self.escalation.obstacle is not None else self.escalation.rule.tokens

    def drop_held(self) -> None:
        """Have nothing counted of what was held back, where the request ends for a fault of the platform's before it
        is decided. What it has cost stays."""
        if self.outcome is None:
            self.num_held, self.edge = 0, None

    def note_placed(self, receipt: Receipt, *, is_constrained: bool) -> None:
        """Note where the first attempt was placed."""
        if receipt.tier == EDGE:
            self.outcome, self.reason = self.escalation.obstacle, self.escalation.reason
        elif is_constrained and receipt.tier_reason == TierReason.CAPABILITY:
            self.outcome = Outcome.CONSTRAINT


def away(generation: Generation, escalation: Escalation) -> Generation:
    """The same sequence for the routes of other tiers only."""
    return replace(
        generation,
        routes=escalation.routes,
        pools=_places(escalation.routes),
        skipped=TierReason.ESCALATED,
        num_judged_tokens=0,
    )


def away_first(generation: Generation, escalation: Escalation) -> Generation:
    """The same sequence with the routes of other tiers before the edge's: for the siblings of one that was sent."""
    rest = tuple(route for route in generation.routes if route.tier == EDGE)
    return replace(generation, routes=(*escalation.routes, *rest), num_judged_tokens=0)


def at_edge(generation: Generation) -> Generation:
    """The same sequence for the edge only, where it is not judged again."""
    routes = tuple(route for route in generation.routes if route.tier == EDGE)
    return replace(generation, routes=routes, pools=_places(routes), num_judged_tokens=0)


def _places(routes: Sequence[Route]) -> tuple[str, ...]:
    """Names of the pools and providers on the routes."""
    return tuple(
        dict.fromkeys(
            place for route in routes for place in ((route.provider,) if route.provider is not None else route.pools)
        )
    )


class HeldStream:
    """The `penstock.router.routing.request.Stream` of a sequence whose first tokens may be held back. It owns the
    streams of both attempts, of which one is open at a time but for the moment in which the second begins."""

    def __init__(
        self,
        stream: Stream,
        generation: Generation,
        trial: Trial,
        make_probe: Callable[[Receipt], Assembler],
        start: Callable[[Generation], Awaitable[Stream]],
        take_receipt: Callable[[Receipt], None],
        clock: Callable[[], float],
    ) -> None:
        """stream: the first attempt's, wherever it is. make_probe: makes an assembler of the answer's text, for the
        model that a receipt names; it only tells where a stop string ends the answer. start: starts a sequence.
        take_receipt: called when another attempt gives the answer. clock: monotonic, seconds."""
        self._stream = stream
        self._generation = generation
        self._trial = trial
        self._make_probe = make_probe
        self._start = start
        self._take_receipt = take_receipt
        self._clock = clock
        self._hides_logprobs = generation.sampling.logprobs is None
        self._is_decided = False
        self._held_since_s: float | None = None

    @property
    def receipt(self) -> Receipt:
        return self._stream.receipt

    def listen(self, listener: Callable[[Delta], bool]) -> None:
        self._stream.listen(listener)

    def close(self) -> None:
        self._stream.close()

    async def next(self) -> Delta:
        """The first delta is all that was held back, or the first one of the other attempt."""
        delta = await self._stream.next() if self._is_decided else await self._decide()
        self._is_decided = True
        if self._hides_logprobs and delta.logprobs is not None:
            delta = msgspec.structs.replace(delta, logprobs=None)
        return delta

    async def _decide(self) -> Delta:
        trial, rule = self._trial, self._trial.escalation.rule
        try:
            first = await self._stream.next()
        except InvalidRequest as refusal:
            if self._generation.constraint is None or self.receipt.tier != EDGE:
                raise
            return await self._leave(Outcome.CONSTRAINT, refusal)
        if self.receipt.tier != EDGE:  # known now only: what a request is placed on may fail before its first token
            return first
        held = await self._hold(first)
        if trial.mean_logprob is None or trial.mean_logprob >= rule.min_mean_logprob:
            trial.outcome, trial.first_token_s = Outcome.KEPT, self._held_since_s
            return held
        return await self._leave(Outcome.ESCALATED, held)

    async def _hold(self, delta: Delta) -> Delta:
        """All that there is when enough has come to be judged, or the answer has ended."""
        trial, bound = self._trial, self._trial.escalation.rule.tokens
        began_s, probe = self._clock(), self._make_probe(self.receipt)
        self._held_since_s = began_s
        held, judged = [delta], list[TokenLogprobs]()
        while True:
            piece, logprobs = probe.push(delta), delta.logprobs or []
            # nobody asked for what stands behind a stop string
            judged += logprobs if piece.stop_string is None else logprobs[: len(piece.token_ids)]
            trial.num_held = min(bound, trial.num_held + len(delta.token_ids))
            if piece.finish is not None or trial.num_held >= bound:
                break
            delta = await self._stream.next()
            held.append(delta)
        trial.held_s = self._clock() - began_s
        trial.mean_logprob = mean_logprob(judged[:bound])
        return held[0] if len(held) == 1 else merge_deltas(held)

    async def _leave(self, outcome: Outcome, held: Delta | InvalidRequest) -> Delta:
        """The first delta of another tier, or what the edge has said where no other takes the request. held: that, or
        the edge's refusal, which is raised then."""
        trial, edge = self._trial, self._stream
        try:
            async with asyncio.timeout(trial.escalation.patience_s):
                away_stream = await self._start(away(self._generation, trial.escalation))
        except (PenstockError, TimeoutError) as error:
            return self._stay(held, _reason_of(error, TierReason.TIER_FULL))
        edge.close()
        trial.edge = EdgeAttempt(edge.receipt, self._count_prompt(edge.receipt), trial.num_held)
        trial.vain.append(edge.receipt)
        self._switch(away_stream)
        try:
            delta = await away_stream.next()
        except PenstockError as error:
            away_stream.close()
            return await self._return(edge, held, _reason_of(error, FAILED))
        trial.outcome = outcome
        return delta

    def _stay(self, held: Delta | InvalidRequest, reason: str) -> Delta:
        self._trial.outcome, self._trial.reason = Outcome.NO_CLOUD, reason
        if isinstance(held, InvalidRequest):
            raise held
        self._trial.first_token_s = self._held_since_s
        return held

    async def _return(self, edge: Stream, held: Delta | InvalidRequest, reason: str) -> Delta:
        """The edge's answer, when another tier had taken the request and gave none."""
        trial = self._trial
        trial.vain.append(self.receipt)
        trial.edge = None  # the answer is the edge's own: what comes of it again counts, and once
        if isinstance(held, InvalidRequest) or held.finish is not None:
            trial.vain.remove(edge.receipt)
            self._switch(edge)
            return self._stay(held, reason)
        trial.outcome, trial.reason = Outcome.NO_CLOUD, reason
        self._switch(await self._start(at_edge(self._generation)))
        return await self._stream.next()

    def _switch(self, stream: Stream) -> None:
        self._stream = stream
        self._take_receipt(stream.receipt)

    def _count_prompt(self, receipt: Receipt) -> int:
        """Tokens of the prompt that the attempt has used."""
        if not receipt.is_taken:
            return 0
        return self._generation.num_prompt_tokens if receipt.num_prompt_tokens is None else receipt.num_prompt_tokens


def mean_logprob(judged: Sequence[TokenLogprobs]) -> float | None:
    """The mean; None where a replica told none."""
    return sum(each.logprob for each in judged) / len(judged) if judged else None


def _reason_of(error: PenstockError | TimeoutError, otherwise: str) -> str:
    """Why another tier gave no answer, in a word of receipts. otherwise: the word for what is no fault of the
    request."""
    if isinstance(error, NoPlace):
        return error.reason
    if isinstance(error, CapReached):
        return TierReason.PROVIDER_CAP
    return str(TierReason.REFUSED if isinstance(error, RequestError) else otherwise)
