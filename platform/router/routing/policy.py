"""The choice of a replica for a request: filter, predict, choose. Pure; randomness comes in as a parameter.

Not the queue, and not the tier policy: the candidates are what the tenant may use. Invariant: a chosen replica had
credit, room and a long enough context, and the same input always gives the same decision.

The cost of a replica is the latency that the request would have and add there, in seconds:

    cost = ttft
         + expected_output_tokens * tpot
         + (weight * rows + NUM_FOLLOWING) * own_prefill
         + weight * rows * expected_output_tokens / 2 * (tpot - tpot before)

that is: its own first token, which waits for its adapter or, where all rows are taken, until as many sequences have
ended as are before it, and comes behind the prefill outstanding there; its own further tokens, at the pace of the batch
that it joins; the sequences decoding there, which stand still during its prefill, and are slower while it runs (on
average they are half done); and those to come, for which its prefill is time that the replica does not have.

The weight of those that decode follows the load: the geometric mean of the seconds of prefill outstanding there and of
the mean over all candidates, as a part of FULL_BACKLOG_S. Where there is little to do, those that decode have time to
spare, and a prompt goes where it begins soonest, before all to a replica that computes no other. Where more waits
everywhere than can be computed in time, their delays count in full: long prompts are kept together at few replicas, and
the others answer in time.

A cached prefix lowers `ttft` and `own_prefill`; load raises everything else. All is in one unit, so a hot prefix draws
requests to its replica only until the queue and the batch there cost more than computing the prefix again somewhere
else.

Decisions: docs/decisions/gateway.md
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import NamedTuple, Protocol

from penstock.perf.blend import blend_costs
from penstock.perf.model import Work, predict_prefill_s, predict_row_wait_s, predict_tpot_s, predict_ttft_s
from penstock.wire.frames import Load, StepCosts

TIE_S = 0.001
"""Costs closer than this are the same: the load report is older than that."""
TIE_SHARE = 0.03
"""Share of the best candidate's TTFT below which costs are the same too: the model is not better than that."""
NUM_FOLLOWING = 4.0
"""Requests to come that a request's prefill holds up."""
FULL_BACKLOG_S = 3.0
"""Seconds of prefill outstanding from which on others' delays count in full."""
LEAST_WEIGHT = 0.03
"""Weight of the delays of those that decode where nothing is outstanding."""
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


MILDEST_FIRST = (Wait.NO_BLOCKS, Wait.NO_ADAPTER_SLOT, Wait.NO_CREDIT, Wait.CONTEXT, Wait.NO_REPLICA)


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
    def row_wait_s(self) -> float:
        """Seconds until a row is free for the request; 0 where others make room for it."""
        load = self.load
        return 0.0 if self.may_overdraw else predict_row_wait_s(self.work, load.max_running, load.row_hold_s)

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


class Compared(NamedTuple):
    """A candidate of a decision, with all that its cost was computed from."""

    replica_id: str
    work: Work
    costs: StepCosts
    """Less the noise between the replicas of its pool."""
    max_batched_tokens: int
    num_inflight: int
    cached_tokens: int
    start_wait_s: float = 0.0
    """Seconds until the request could begin: a row is free, and its adapter there."""


class Basis(NamedTuple):
    """What a decision rested on, enough to make it again (`replay`)."""

    num_tokens: int
    expected_output_tokens: float
    scored_tokens: int
    compared: Sequence[Compared]
    """Candidates in their order: all of them, or of many the chosen one, those drawn, the cheapest, and those that hold
    the most and the least of the prompt."""
    num_candidates: int
    num_tied: int
    """Candidates whose costs were the same as the least one."""
    drawn: tuple[str, str] | None
    """The two drawn among those."""
    mean_backlog_s: float
    """Seconds of prefill outstanding at a candidate, the mean of all of them."""

    def read(self) -> "Basis":
        """The basis itself."""
        return self


class LazyBasis(Protocol):
    """A decision's basis that may be made when it is asked for: of most decisions nobody asks."""

    def read(self) -> Basis: ...


class Decision(NamedTuple):
    """The choice of a replica. If no replica can take the request now, `replica_id` is None and `reason` is a Wait."""

    replica_id: str | None
    reason: Reason | Wait
    predicted_ttft_s: float | None = None
    cached_tokens: int = 0
    scores: dict[str, float] = {}
    """Predicted TTFT in seconds of each candidate, of many of those in the basis."""
    basis: LazyBasis | None = None
    """None: no replica was chosen."""


def choose(
    num_tokens: int,
    expected_output_tokens: float,
    replicas: Sequence[ReplicaView],
    random: Random,
    scored_tokens: int = 0,
) -> Decision:
    """The cheapest replica for a request of `num_tokens`; see the module for the cost. scored_tokens: those whose log
    probabilities are wanted."""
    works = [view.work for view in replicas]
    blocked = [_blocked_by(view, work, num_tokens) for view, work in zip(replicas, works, strict=True)]
    candidates = [place for place, wait in enumerate(blocked) if wait is None]
    if not candidates:
        return Decision(None, _mildest(blocked))
    costs = _costs(replicas, works)
    compared = [_compare(replicas[place], works[place], costs[place]) for place in candidates]
    mean_s = mean_backlog_s(compared)
    scores = [score(each, num_tokens, expected_output_tokens, scored_tokens, mean_s) for each in compared]
    tied = find_tied(scores)
    drawn = None if len(tied) == 1 else draw_two(tied, random)
    chosen = tied[0] if drawn is None else min(drawn, key=lambda index: _crowd(compared[index]))
    ids = None if drawn is None else (compared[drawn[0]].replica_id, compared[drawn[1]].replica_id)
    return Decision(
        replica_id=compared[chosen].replica_id,
        reason=explain_choice(compared, compared[chosen], len(compared), len(tied)),
        predicted_ttft_s=scores[chosen].ttft_s,
        cached_tokens=compared[chosen].cached_tokens,
        scores={each.replica_id: ttft_s for each, (_, ttft_s) in zip(compared, scores, strict=True)},
        basis=Basis(num_tokens, expected_output_tokens, scored_tokens, compared, len(compared), len(tied), ids, mean_s),
    )


def replay(basis: Basis) -> Decision:
    """The decision that was made on this basis, computed again."""
    scores = [score_again(basis, each) for each in basis.compared]
    chosen = basis.compared[find_tied(scores)[0]]
    if basis.drawn is not None:
        by_id = {each.replica_id: each for each in basis.compared}
        chosen = min((by_id[replica_id] for replica_id in basis.drawn), key=_crowd)
    ttfts_s = {each.replica_id: ttft_s for each, (_, ttft_s) in zip(basis.compared, scores, strict=True)}
    reason = explain_choice(basis.compared, chosen, basis.num_candidates, basis.num_tied)
    return Decision(chosen.replica_id, reason, ttfts_s[chosen.replica_id], chosen.cached_tokens, ttfts_s, basis)


def blocked_by(view: ReplicaView, num_tokens: int) -> Wait | None:
    """Why a replica can't take a request of `num_tokens` now. Returns None if it can."""
    return _blocked_by(view, view.work, num_tokens)


def _blocked_by(view: ReplicaView, work: Work, num_tokens: int) -> Wait | None:
    load = view.load
    if load.is_draining:
        return Wait.NO_REPLICA
    if num_tokens >= view.max_model_len:
        return Wait.CONTEXT
    is_overdrawn = view.may_overdraw and not is_crowded(load, work)
    if view.num_inflight >= load.max_inflight and not is_overdrawn:
        return Wait.NO_CREDIT
    if view.lacks_adapter_slot:
        return Wait.NO_ADAPTER_SLOT
    is_idle = not (work.num_running or work.num_waiting)
    needed_blocks = 1 + (num_tokens - view.cached_tokens + view.unreported.prefill_tokens) // view.block_size
    # an idle replica takes anything: what doesn't fit even there, it refuses
    return Wait.NO_BLOCKS if needed_blocks > load.free_blocks and not is_idle and not is_overdrawn else None


def is_crowded(load: Load, work: Work) -> bool:
    """Whether so many wait at a replica that no tenant may overdraw it."""
    return work.num_waiting >= MAX_WAITING * load.max_inflight


def _mildest(found: Sequence[Wait | None]) -> Wait:
    """The mildest of the replicas' obstacles: what goes away soonest names the wait."""
    return next((wait for wait in MILDEST_FIRST if wait in found), Wait.NO_REPLICA)


def mean_backlog_s(candidates: Sequence[Compared]) -> float:
    """Seconds of prefill outstanding at a candidate, the mean of all of them."""
    total_s = 0.0
    for each in candidates:
        total_s += backlog_s(each.work, each.costs)
    return total_s / len(candidates)


def backlog_s(work: Work, costs: StepCosts) -> float:
    """Seconds of prefill outstanding at a replica."""
    return work.prefill_tokens * costs.prefill_token_s


def weigh_others(own_backlog_s: float, mean_s: float) -> float:
    """The weight of others' delays at a replica, from LEAST_WEIGHT to 1. mean_s: the candidates' mean backlog."""
    return min(1.0, max(LEAST_WEIGHT, math.sqrt(own_backlog_s * mean_s) / FULL_BACKLOG_S))


def score(
    compared: Compared,
    num_tokens: int,
    expected_output_tokens: float,
    scored_tokens: int,
    mean_s: float,
) -> Score:
    """Cost and predicted TTFT of one candidate. mean_s: the candidates' mean backlog."""
    costs, work, max_batched_tokens = compared.costs, compared.work, compared.max_batched_tokens
    prompt = num_tokens - compared.cached_tokens, compared.cached_tokens, max_batched_tokens, scored_tokens
    begun_s = own_prefill_s = predict_ttft_s(costs, work, *prompt)
    if work.num_running or work.prefill_tokens:
        own_prefill_s = predict_prefill_s(costs, work._replace(prefill_tokens=0), *prompt)
    ttft_s = compared.start_wait_s + begun_s
    tpot_s = predict_tpot_s(costs, work, num_tokens)
    cost_s = ttft_s + expected_output_tokens * tpot_s + NUM_FOLLOWING * own_prefill_s
    rows = work.num_running + work.num_waiting
    if rows:
        tpot_before_s = predict_tpot_s(costs, work._replace(num_waiting=work.num_waiting - 1))
        weight = weigh_others(backlog_s(work, costs), mean_s)
        cost_s += weight * (rows * (own_prefill_s + expected_output_tokens / 2 * (tpot_s - tpot_before_s)))
    return Score(cost_s, ttft_s)


def score_again(basis: Basis, compared: Compared) -> Score:
    """Cost and predicted TTFT of one of the candidates that the basis compares."""
    return score(compared, basis.num_tokens, basis.expected_output_tokens, basis.scored_tokens, basis.mean_backlog_s)


def find_tied(scores: Sequence[Score]) -> list[int]:
    """Places of the candidates that cost as little as the cheapest, as far as can be told."""
    best = min(scores)
    within_s = max(TIE_S, TIE_SHARE * best.ttft_s)
    return [index for index, (cost_s, _) in enumerate(scores) if cost_s - best.cost_s <= within_s]


def draw_two(tied: Sequence[int], random: Random) -> tuple[int, int]:
    """Power of two choices: two of the candidates that cost the same. The one with fewer requests of this router is to
    be taken, then with fewer sequences, then with the fuller cache."""
    first, second = int(random.random() * len(tied)), int(random.random() * (len(tied) - 1))
    return tied[first], tied[second + (second >= first)]


def explain_choice(candidates: Sequence[Compared], chosen: Compared, num_candidates: int, num_tied: int) -> Reason:
    """candidates: as of `Basis.compared`."""
    if num_candidates == 1:
        return Reason.ONLY_REPLICA
    if num_tied == num_candidates:
        return Reason.TIE
    cached = [each.cached_tokens for each in candidates]
    holds_most = chosen.cached_tokens == max(cached) > min(cached)
    return Reason.PREFIX if holds_most else Reason.LEAST_LOADED


def _compare(view: ReplicaView, work: Work, costs: StepCosts) -> Compared:
    return Compared(
        view.replica_id,
        work,
        costs,
        view.load.max_batched_tokens,
        view.num_inflight,
        view.cached_tokens,
        max(view.adapter_load_s, view.row_wait_s),
    )


def _costs(replicas: Sequence[ReplicaView], works: Sequence[Work]) -> list[StepCosts]:
    """Step costs of each replica, less the noise between replicas of a pool: of all that are compared, for one that has
    no room tells as much of its pool's pace. works: of each."""
    costs = [view.load.costs for view in replicas]
    pools = {view.pool for view in replicas}
    if len(pools) == 1:
        return blend_costs(costs, works)
    for pool in pools:
        places = [place for place, view in enumerate(replicas) if view.pool == pool]
        blended = blend_costs([costs[place] for place in places], [works[place] for place in places])
        for place, each in zip(places, blended, strict=True):
            costs[place] = each
    return costs


def _crowd(compared: Compared) -> tuple[int, int, int]:
    work = compared.work
    return compared.num_inflight, work.num_running + work.num_waiting, -compared.cached_tokens
