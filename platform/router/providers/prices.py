"""What providers take for their tokens, from their configuration. Pure."""

from penstock.router.config import ProviderConfig
from penstock.tenancy.tariffs import Tariff
from penstock.wire.money import to_nano


def prices_of(provider: ProviderConfig) -> Tariff:
    """What a provider takes for its tokens; nothing where no prices are known."""
    if provider.input_price is None or provider.output_price is None:
        return Tariff()
    cached = provider.input_price if provider.cached_price is None else provider.cached_price
    return Tariff(to_nano(provider.input_price), to_nano(cached), to_nano(provider.output_price))
