"""What each tenant's prompts may take of a step's token budget: max-min fair by weight. Pure; no torch, no clock.

Whoever wants less than its share gets all that it wants, and the others divide the rest by weight. So a short prompt is
computed in the next step, however many long ones of another tenant are under way.
"""

from collections.abc import Iterable

from penstock.workers.engine.sequence import Sequence


def tenant_of(seq: Sequence) -> str:
    """The tenant whose share a sequence uses; sequences without a weight have one together."""
    return seq.tenant if seq.weight else ""


def divide(budget: int, prompts: Iterable[Sequence]) -> dict[str, int] | None:
    """Tokens for each tenant with prompts to be computed, 1 at least; together the budget at the most, but for that.
    Returns None where one tenant alone has any."""
    wanted: dict[str, int] = {}
    weights: dict[str, float] = {}
    for seq in prompts:
        tenant = tenant_of(seq)
        wanted[tenant] = wanted.get(tenant, 0) + seq.num_uncomputed_tokens
        weights[tenant] = seq.weight or 1.0
    if len(wanted) < 2:
        return None
    shares: dict[str, int] = {}
    total, left = sum(weights.values()), budget
    for tenant in sorted(wanted, key=lambda tenant: wanted[tenant] / weights[tenant]):
        shares[tenant] = min(wanted[tenant], max(1, int(left * weights[tenant] / total)))
        left -= shares[tenant]
        total -= weights[tenant]
    return shares
