"""The choice of a tier, with its reason: routes in the order of the tenant's policy, each with its prediction or its
obstacle. Pure.

Most policies have an order, and leave a route only for a sooner one. One goes by money: of the routes that are
predicted to meet the target it takes the cheapest, and of none the soonest. Costs within TIE_SHARE of the cheapest are
the same, as far as can be told: then the policy's order decides, the edge first. It remembers nothing: what would make
it flap makes the route that it has chosen cheaper instead (a fuller batch divides its steps further, a longer prefix is
cached there).

Not the choice of a replica inside a tier (policy). Invariants: what a policy does not allow is no route, so no state of
the others can lead there; the same input always gives the same decision; a route that has an obstacle is never chosen.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol, TypeVar

from penstock.router.routing.policy import Wait

Tier = Literal["edge", "cloud"]


class TierPolicy(StrEnum):
    """Where a tenant's requests may be answered."""

    EDGE_FIRST = "edge_first"
    CLOUD_FIRST = "cloud_first"
    EDGE_ONLY = "edge_only"
    """Nothing ever leaves: neither to a pool of another tier nor to a provider."""
    CHEAPEST_WITHIN_TARGET = "cheapest_within_target"
    """The cheapest route, whatever its tier, that is predicted to meet the target."""


NEVER_LEAVE = "never_leave"
"""Another name for EDGE_ONLY."""
STAY: Tier = "edge"
"""The tier on which a request that says so stays."""

_ORDER: dict[TierPolicy, tuple[Tier, ...]] = {
    TierPolicy.EDGE_FIRST: ("edge", "cloud"),
    TierPolicy.CLOUD_FIRST: ("cloud", "edge"),
    TierPolicy.EDGE_ONLY: ("edge",),
    TierPolicy.CHEAPEST_WITHIN_TARGET: ("edge", "cloud"),
}
_STAYING: dict[TierPolicy, tuple[Tier, ...]] = {
    policy: tuple(tier for tier in order if tier == STAY) for policy, order in _ORDER.items()
}
TIE_SHARE = 0.03
"""Part of the least cost by which costs may differ and are the same: the model is not better than that."""


class TierRule(NamedTuple):
    """Where one request may be answered: what its tenant's policy allows, and of that what the request itself does."""

    policy: TierPolicy = TierPolicy.EDGE_FIRST
    stays: bool = False
    """Whether the request asks to stay on the edge. It narrows the policy and never widens it."""

    @property
    def goes_by_cost(self) -> bool:
        """Whether routes are compared by what they cost, each pool being one."""
        return self.policy is TierPolicy.CHEAPEST_WITHIN_TARGET

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Allowed tiers, the first one first."""
        return (_STAYING if self.stays else _ORDER)[self.policy]


DEFAULT_RULE = TierRule()
"""The rule of a request of whose tenant nothing is known."""


def may_leave(rule: TierRule, tier: Tier) -> bool:
    """Whether a request may be sent to a tier, by whoever sends it: routing, a retry, an escalation. What is sent to a
    tier for which this is False is a breach of the tenant's policy."""
    return tier in rule.tiers


class TierReason(StrEnum):
    """Why this tier answers; where it is not the policy's first, what was wrong with the first. Of a policy that goes
    by cost, the first is the cheapest."""

    ONLY_TIER = "only_tier"
    """Model and policy leave one route."""
    PREFERRED = "preferred"
    """The policy's first, and its prediction meets the target."""
    CHEAPEST = "cheapest"
    """The cheapest that could take it, and its prediction meets the target."""
    NONE_BETTER = "none_better"
    """The policy's first; it misses the target, but no other route that is allowed is sooner. By cost: all miss it, and
    no other is sooner."""
    PREDICTED_TTFT = "predicted_ttft"
    """The first would miss the target, and this one is sooner."""
    PREDICTED_TPOT = "predicted_tpot"
    """The cheapest would be too slow after its first token."""
    TIER_DOWN = "tier_down"
    """No replica of the first is connected."""
    TIER_FULL = "tier_full"
    """The first can take nothing at the moment: no credit, no KV blocks, or as many requests there as a provider may
    have."""
    BREAKER_OPEN = "breaker_open"
    """The first is a provider that failed lately, or demanded a pause."""
    PROVIDER_CAP = "provider_cap"
    """The first is a provider, and what it may cost in this month is spent or reserved."""
    CONTEXT_TOO_LONG = "context_too_long"
    REFUSED = "refused"
    """The first was tried, and refused or failed before its first token."""
    ESCALATED = "escalated"
    """The edge had it, and its model was unsure of its first tokens or could not keep to a constraint."""
    CAPABILITY = "capability"
    """The request needs what the first can't do: token ids of another vocabulary, a parameter that a provider does not
    know, or an answer that keeps to a constraint."""


UNFORCED = (TierReason.PREFERRED, TierReason.CHEAPEST, TierReason.NONE_BETTER)
"""Reasons of a choice that nothing else forced; where there is one route only, they say nothing."""

OBSTACLE: dict[Wait, TierReason] = {
    Wait.NO_REPLICA: TierReason.TIER_DOWN,
    Wait.CONTEXT: TierReason.CONTEXT_TOO_LONG,
    Wait.NO_CREDIT: TierReason.TIER_FULL,
    Wait.NO_BLOCKS: TierReason.TIER_FULL,
    Wait.NO_ADAPTER_SLOT: TierReason.TIER_FULL,
}


class HasTier(Protocol):
    @property
    def tier(self) -> Tier: ...


P = TypeVar("P", bound=HasTier)


class RouteForecast(NamedTuple):
    """What a route promises now: a predicted time to first token, or an obstacle."""

    ttft_s: float | None = None
    obstacle: TierReason | None = None
    cost_nano: int | None = None
    """Predicted cost in 1e-9 of the prices' unit. None: the route has no price, or nobody goes by it."""
    tpot_s: float | None = None
    """Predicted time per further token. None: it can't be predicted, or nobody goes by it."""
    is_slow: bool = False
    """Whether that misses the target of the request's class."""


class TierDecision(NamedTuple):
    """The choice of a route, by its index. If every route has an obstacle, `route` is None and `reason` is the first
    obstacle."""

    route: int | None
    reason: TierReason


def parse_policy(name: str) -> TierPolicy:
    """Raises ValueError for a name that is none."""
    return TierPolicy.EDGE_ONLY if name == NEVER_LEAVE else TierPolicy(name)


def in_order(routes: Iterable[P], rule: TierRule) -> list[P]:
    """The routes that are allowed, the policy's first tier first; inside a tier as they came."""
    order = rule.tiers
    return sorted((route for route in routes if may_leave(rule, route.tier)), key=lambda route: order.index(route.tier))


def decide(
    forecasts: Iterable[RouteForecast],
    target_s: float,
    skipped: TierReason | None = None,
    *,
    by_cost: bool = False,
) -> TierDecision:
    """The first route while it meets the target, else the first sooner one that does, else the soonest; by cost the
    cheapest that meets it, else the soonest.

    forecasts: of the routes, in the policy's order; taken one by one, and no further than needed, which by cost is all
    of them. skipped: why a route before all of these was left out beforehand.
    """
    if by_cost:
        return _decide_by_cost(list(forecasts), target_s, skipped)
    compared: list[RouteForecast] = []
    best: int | None = None
    best_s = float("inf")
    for index, forecast in enumerate(forecasts):
        compared.append(forecast)
        if forecast.obstacle is not None or forecast.ttft_s is None or forecast.ttft_s >= best_s:
            continue
        best, best_s = index, forecast.ttft_s
        if best_s <= target_s:
            break
    return TierDecision(best, _find_reason(compared, best, best_s <= target_s, skipped))


def _find_reason(
    compared: Sequence[RouteForecast], chosen: int | None, is_in_time: bool, skipped: TierReason | None
) -> TierReason:
    if skipped is not None:
        return skipped
    if not compared:
        return TierReason.TIER_DOWN
    if chosen == 0:
        return TierReason.PREFERRED if is_in_time else TierReason.NONE_BETTER
    return compared[0].obstacle or TierReason.PREDICTED_TTFT


def _decide_by_cost(compared: Sequence[RouteForecast], target_s: float, skipped: TierReason | None) -> TierDecision:
    """A route without a price comes behind all that have one: nobody can say that it is cheaper. No route is the
    policy's first, so that one was skipped explains nothing, unless the edge has sent the request on."""
    skipped = skipped if skipped is TierReason.ESCALATED else None
    able = {
        index: each.ttft_s for index, each in enumerate(compared) if each.obstacle is None and each.ttft_s is not None
    }
    if not able:
        return TierDecision(None, _find_reason(compared, None, is_in_time=False, skipped=skipped))
    in_time = [index for index, ttft_s in able.items() if ttft_s <= target_s and not compared[index].is_slow]
    if not in_time:
        return TierDecision(min(able, key=lambda index: able[index]), skipped or TierReason.NONE_BETTER)
    priced = {index: cost for index in in_time if (cost := compared[index].cost_nano) is not None}
    if not priced:
        chosen, cost_nano = in_time[0], None
    else:
        cost_nano = min(priced.values())
        chosen = next(index for index, cost in priced.items() if cost <= cost_nano * (1 + TIE_SHARE))
    passed = [compared[index] for index in able if index not in in_time]
    return TierDecision(chosen, skipped or _explain_cost(passed, cost_nano, target_s))


def _explain_cost(passed: Iterable[RouteForecast], cost_nano: int | None, target_s: float) -> TierReason:
    """passed: the routes that miss the target. cost_nano: the least cost of those that meet it; None: they have
    none."""
    cheaper = [
        (each.cost_nano, each)
        for each in passed
        if each.cost_nano is not None and (cost_nano is None or each.cost_nano < cost_nano)
    ]
    if cheaper:
        _, first = min(cheaper, key=lambda pair: pair[0])
        is_late = first.ttft_s is not None and first.ttft_s > target_s
        return TierReason.PREDICTED_TTFT if is_late else TierReason.PREDICTED_TPOT
    return TierReason.PREFERRED if cost_nano is None else TierReason.CHEAPEST
