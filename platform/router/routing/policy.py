"""The choice of a replica for a request: filter, predict, choose. Pure; randomness comes in as a parameter.

Not the queue, and not the tier policy: the candidates are what the tenant may use. Invariant: a chosen replica had
credit, room and a long enough context, and the same input always gives the same decision.

The cost of a replica is the latency, summed over everybody there, that the request would add, in seconds:

    cost = ttft
         + expected_output_tokens * tpot
         + rows * own_prefill
         + rows * expected_output_tokens / 2 * (tpot - tpot before)

that is: its own first token, behind the prefill outstanding there; its own further tokens, at the pace of the batch
that it joins; the sequences decoding there, which stand still during its prefill, and are slower while it runs (on
average they are half done).

A cached prefix lowers `ttft` and `own_prefill`; load raises everything else. All is in one unit, so a hot prefix draws
requests to its replica only until the queue and the batch there cost more than computing the prefix again somewhere
else.
"""

from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import NamedTuple

from penstock.perf.blend import blend_costs
from penstock.perf.model import Work, predict_prefill_s, predict_tpot_s, predict_ttft_s
from penstock.wire.frames import Load, StepCosts

TIE_S = 0.001
"""Costs closer than this are the same: the load report is older than that."""
TIE_SHARE = 0.03
"""Share of the best candidate's TTFT below which costs are the same too: the model is not better than that."""
MAX_WAITING = 0.25
"""Sequences that wait at a replica, as a part of the credit there, from which on no tenant may overdraw it."""


class Reason(StrEnum):
    ONLY_REPLICA = "only_replica"
    """One candidate was left."""
    TIE = "tie"
    """All candidates cost the same: the one with fewer requests, of two drawn ones."""
    PREFIX = "prefix"
    """The cheapest one, and no candidate holds more of the prompt."""
    LEAST_LOADED = "least_loaded"
    """The cheapest one, because it has less to do."""


class Wait(StrEnum):
    """Why no replica is chosen."""

    NO_REPLICA = "no_replica"
    """None is connected, or each is draining or has refused this request."""
    CONTEXT = "context"
    """Each one's context is too short for it."""
    NO_CREDIT = "no_credit"
    NO_BLOCKS = "no_blocks"
    """Credit, but not enough free KV blocks."""
    NO_ADAPTER_SLOT = "no_adapter_slot"
    """Credit, but enough of the tenant's requests wait there for adapters that are in no slot."""


class UnreportedWork(NamedTuple):
    """Work of a replica that this router knows of and the replica's last load report didn't."""

    num_sent: int = 0
    """Sequences sent and not over."""
    prefill_tokens: int = 0
    """Tokens of those sequences that are not cached."""
    num_ended: int = 0
    """Sequences in the report that are over."""


class ReplicaView(NamedTuple):
    """A candidate, as far as the policy needs to know it."""

    replica_id: str
    pool: str
    load: Load
    unreported: UnreportedWork
    num_inflight: int
    """Live sequences of this router at the replica."""
    block_size: int
    max_model_len: int
    cached_tokens: int
    """Leading tokens of the request that the replica holds, in full blocks."""
    adapter_load_s: float = 0.0
    """Seconds until the request can begin, because its adapter has to be loaded; 0: it is there."""
    lacks_adapter_slot: bool = False
    """Whether its adapter has to be loaded, and enough of its tenant's requests wait for that already."""
    may_overdraw: bool = False
    """Whether neither credit nor free blocks are needed, as long as few wait there (`MAX_WAITING`): the tenant has less
    than its share, and rows of others will give way."""

    @property
    def work(self) -> Work:
        """All that there is to do by now. Sequences that ended are taken as running ones of average context."""
        load, unreported = self.load, self.unreported
        num_running = max(0, load.num_running - unreported.num_ended)
        return Work(
            num_running=num_running,
            num_waiting=load.num_waiting + unreported.num_sent,
            prefill_tokens=load.prefill_tokens_outstanding + unreported.prefill_tokens,
            kv_tokens=load.kv_tokens
            if not unreported.num_ended
            else load.kv_tokens * num_running // max(1, load.num_running),
            num_sampled=min(load.num_sampled, num_running),
        )


class Score(NamedTuple):
    cost_s: float
    ttft_s: float


class Decision(NamedTuple):
    """The choice of a replica. If no replica can take the request now, `replica_id` is None and `reason` is a Wait."""

    replica_id: str | None
    reason: Reason | Wait
    predicted_ttft_s: float | None = None
    cached_tokens: int = 0
    scores: dict[str, float] = {}
    """Predicted TTFT in seconds of each candidate."""


def choose(
    num_tokens: int,
    expected_output_tokens: float,
    replicas: Sequence[ReplicaView],
    random: Random,
    scored_tokens: int = 0,
) -> Decision:
    """The cheapest replica for a request of `num_tokens`; see the module for the cost. scored_tokens: those whose log
    probabilities are wanted."""
    candidates = [view for view in replicas if blocked_by(view, num_tokens) is None]
    if not candidates:
        return Decision(None, why_none(replicas, num_tokens))
    scores = [
        score_replica(view, costs, num_tokens, expected_output_tokens, scored_tokens)
        for view, costs in zip(candidates, _costs(candidates), strict=True)
    ]
    best = min(scores)
    within_s = max(TIE_S, TIE_SHARE * best.ttft_s)
    tied = [index for index, (cost_s, _) in enumerate(scores) if cost_s - best.cost_s <= within_s]
    chosen = tied[0] if len(tied) == 1 else _draw_better_of_two(candidates, tied, random)
    view = candidates[chosen]
    return Decision(
        replica_id=view.replica_id,
        reason=_explain_choice(candidates, view, all_tied=len(tied) == len(candidates)),
        predicted_ttft_s=scores[chosen].ttft_s,
        cached_tokens=view.cached_tokens,
        scores={candidate.replica_id: ttft_s for candidate, (_, ttft_s) in zip(candidates, scores, strict=True)},
    )


def blocked_by(view: ReplicaView, num_tokens: int) -> Wait | None:
    """Why a replica can't take a request of `num_tokens` now. Returns None if it can."""
    load = view.load
    if load.is_draining:
        return Wait.NO_REPLICA
    if num_tokens >= view.max_model_len:
        return Wait.CONTEXT
    work = view.work
    is_overdrawn = view.may_overdraw and work.num_waiting < MAX_WAITING * load.max_inflight
    if view.num_inflight >= load.max_inflight and not is_overdrawn:
        return Wait.NO_CREDIT
    if view.lacks_adapter_slot:
        return Wait.NO_ADAPTER_SLOT
    is_idle = not (work.num_running or work.num_waiting)
    needed_blocks = 1 + (num_tokens - view.cached_tokens + view.unreported.prefill_tokens) // view.block_size
    # an idle replica takes anything: what doesn't fit even there, it refuses
    return Wait.NO_BLOCKS if needed_blocks > load.free_blocks and not is_idle and not is_overdrawn else None


def why_none(replicas: Sequence[ReplicaView], num_tokens: int) -> Wait:
    """The mildest of the replicas' obstacles: what goes away soonest names the wait."""
    found = {blocked_by(view, num_tokens) for view in replicas}
    mildest_first = (Wait.NO_BLOCKS, Wait.NO_ADAPTER_SLOT, Wait.NO_CREDIT, Wait.CONTEXT)
    return next((wait for wait in mildest_first if wait in found), Wait.NO_REPLICA)


def score_replica(
    view: ReplicaView, costs: StepCosts, num_tokens: int, expected_output_tokens: float, scored_tokens: int = 0
) -> Score:
    """Cost and predicted TTFT of one candidate."""
    work = view.work
    max_batched_tokens = view.load.max_batched_tokens
    uncached_tokens = num_tokens - view.cached_tokens
    ttft_s = view.adapter_load_s + predict_ttft_s(
        costs, work, uncached_tokens, view.cached_tokens, max_batched_tokens, scored_tokens
    )
    tpot_s = predict_tpot_s(costs, work, num_tokens)
    rows = work.num_running + work.num_waiting
    cost_s = ttft_s + expected_output_tokens * tpot_s
    if rows:
        own_prefill_s = predict_prefill_s(
            costs,
            work._replace(prefill_tokens=0),
            uncached_tokens,
            view.cached_tokens,
            max_batched_tokens,
            scored_tokens,
        )
        tpot_before_s = predict_tpot_s(costs, work._replace(num_waiting=work.num_waiting - 1))
        cost_s += rows * (own_prefill_s + expected_output_tokens / 2 * (tpot_s - tpot_before_s))
    return Score(cost_s, ttft_s)


def _costs(candidates: Sequence[ReplicaView]) -> list[StepCosts]:
    """Step costs of each candidate, less the noise between replicas of a pool."""
    found: dict[str, StepCosts] = {}
    for pool in {view.pool for view in candidates}:
        views = [view for view in candidates if view.pool == pool]
        costs = blend_costs([view.load.costs for view in views], [view.work for view in views])
        found.update(zip((view.replica_id for view in views), costs, strict=True))
    return [found[view.replica_id] for view in candidates]


def _draw_better_of_two(candidates: Sequence[ReplicaView], tied: list[int], random: Random) -> int:
    """Power of two choices: of two candidates drawn at random, the one with fewer requests of this router, then with
    fewer sequences, then with the fuller cache."""
    first, second = random.sample(tied, 2)
    return min(first, second, key=lambda index: _crowd(candidates[index]))


def _crowd(view: ReplicaView) -> tuple[int, int, int]:
    work = view.work
    return view.num_inflight, work.num_running + work.num_waiting, -view.cached_tokens


def _explain_choice(candidates: Sequence[ReplicaView], chosen: ReplicaView, all_tied: bool) -> Reason:
    if len(candidates) == 1:
        return Reason.ONLY_REPLICA
    if all_tied:
        return Reason.TIE
    cached = [view.cached_tokens for view in candidates]
    holds_most = chosen.cached_tokens == max(cached) > min(cached)
    return Reason.PREFIX if holds_most else Reason.LEAST_LOADED
