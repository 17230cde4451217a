"""The receipt of an attempt, from the route that was chosen and the policy's decision in it.

Not the counts that follow (seconds in the queue, attempts, cached tokens, whether it is taken still): the dispatcher
keeps those.
"""

from collections.abc import Mapping, Sequence

from penstock.router.config import PoolSpec
from penstock.router.dispatch.route_states import RouteState
from penstock.router.routing.request import AnsweringModel, Generation, Receipt, RouteAttempt
from penstock.router.routing.tiers import TierReason

PROVIDER_REASON = "provider"
"""A receipt's reason where no replica was chosen."""


def fill_receipt(
    receipt: Receipt,
    generation: Generation,
    chosen: RouteState,
    routes: Sequence[RouteState],
    reason: TierReason,
    pools: Mapping[str, PoolSpec],
) -> None:
    """Write the latest attempt. routes: those that were compared, in the policy's order, `chosen` among them."""
    route, decision = chosen.route, chosen.decision
    receipt.is_taken = True
    receipt.tier_reason = reason.value
    receipt.predicted_ttft_s, receipt.predicted_cost_nano = chosen.forecast.ttft_s, chosen.forecast.cost_nano
    if decision is None:
        assert route.provider is not None
        receipt.pool = receipt.replica = route.provider
        receipt.tier, receipt.reason, receipt.predicted_cached_tokens = route.tier, PROVIDER_REASON, 0
        receipt.answering_model, receipt.num_prompt_tokens = AnsweringModel(f"fp_{route.provider}", None), None
    else:
        member = chosen.chosen.client.member
        receipt.pool, receipt.replica, receipt.tier = member.pool, member.replica_id, pools[member.pool].tier
        receipt.reason, receipt.predicted_cached_tokens = decision.reason.value, decision.cached_tokens
        receipt.answering_model, receipt.num_prompt_tokens = None, None
        if route.model:
            receipt.answering_model = generation.lazy_prompts[route.model - 1].answering_model
            receipt.num_prompt_tokens = chosen.tokenized.num_prompt_tokens
    receipt.basis = None if decision is None else decision.basis
    receipt.scores = decision.scores if decision is not None and len(routes) == 1 else _merge_scores(routes)
    receipt.considered = [_describe(each) for each in routes] if len(routes) > 1 else []


def _merge_scores(routes: Sequence[RouteState]) -> dict[str, float]:
    """Predicted TTFT in seconds of every replica and provider of the routes."""
    scores: dict[str, float] = {}
    for state in routes:
        if state.decision is not None:
            scores |= state.decision.scores
        elif state.route.provider is not None and state.forecast.ttft_s is not None:
            scores[state.route.provider] = state.forecast.ttft_s
    return scores


def _describe(state: RouteState) -> RouteAttempt:
    route, forecast = state.route, state.forecast
    places = (route.provider,) if route.provider is not None else route.pools
    return RouteAttempt(route.tier, places, forecast.ttft_s, forecast.obstacle, forecast.cost_nano, forecast.tpot_s)
