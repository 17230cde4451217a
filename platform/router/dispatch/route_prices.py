"""What an answer would cost on a route, predicted: of a pool its request's share of the replica's time, of a provider
tokens at their prices.

Not what it has cost in the end, and not the choice (`routing.tiers`). Read for tenants whose policy goes by it alone.
Invariant: a route without a price has no cost, which is not the same as a cost of nothing.
"""

from typing import NamedTuple

from penstock.perf.model import predict_tpot_s
from penstock.perf.share import predict_share_s
from penstock.router.config import ProviderConfig
from penstock.router.providers.prices import prices_of
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.tenancy.tariffs import price_nano
from penstock.wire.money import price_of_time_nano


class ReplicaPrice(NamedTuple):
    """What a request would have at a replica."""

    tpot_s: float
    """Seconds per output token, predicted."""
    cost_nano: int | None
    """Cost in 1e-9 of the prices' unit; None: the pool has no price."""


def price_at_replica(
    client: ReplicaClient, num_tokens: int, cached_tokens: int, output_tokens: float, price_per_hour: float | None
) -> ReplicaPrice:
    """What a request of `num_tokens`, so many of them cached there, from which `output_tokens` come, would have at a
    replica that is ready, as that is now."""
    view = client.view(cached_tokens)
    costs, work = view.load.costs, view.work
    tpot_s = predict_tpot_s(costs, work, num_tokens)
    if price_per_hour is None:
        return ReplicaPrice(tpot_s, None)
    share_s = predict_share_s(
        costs, work, num_tokens - cached_tokens, cached_tokens, output_tokens, view.load.max_batched_tokens
    )
    return ReplicaPrice(tpot_s, price_of_time_nano(share_s, price_per_hour))


def price_at_provider(config: ProviderConfig, num_tokens: int, cached_share: float, output_tokens: float) -> int | None:
    """Cost of an answer of a provider, in 1e-9 of its prices' unit. cached_share: part of a prompt that is expected in
    its cache. Returns None if it has no prices."""
    if config.input_price is None or config.output_price is None:
        return None
    num_cached = round(cached_share * num_tokens)
    return price_nano(prices_of(config), num_tokens - num_cached, num_cached, round(output_tokens))
