"""What tenants are charged for tokens: tariffs by model and adapter, and money as whole numbers. Pure.

Not what a request costs (its share of the steps that it ran in), and not the counting of budgets (`limits`). Amounts
are in any one currency. Inside they are integers of 1e-9 of its unit (`_nano`), which add up without rounding; prices
are such amounts per million tokens, rounded to the nearest when the configuration is read. The one other rounding is
the charge of a request, up to the next whole number. Invariant: no request is charged more than `most_nano` says when
it begins, whatever the model or provider that answers counts.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import msgspec

from penstock.base.errors import ConfigError
from penstock.wire.money import TOKENS_OF_A_PRICE, to_nano

MAX_PRICE = 1e7
"""Highest price of a million tokens, in units of the currency."""
MAX_NANO = 2**53 - 1
"""Most that one request can come to, nine million units; a charge above it counts as this. Redis' scripts count in
doubles, exactly up to here."""


class TokenCounts(Protocol):
    """Tokens of a request, as `usage.Used` has them."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


class Tariff(NamedTuple):
    """Prices of a million tokens each, in 1e-9 of the currency's unit."""

    input: int = 0
    cached: int = 0
    """Price of prompt tokens whose KV was found in a cache."""
    output: int = 0


FREE = Tariff()


class TariffRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry of the setting `tariffs`: prices of the models and adapters that two patterns name (`*`, `?`, `[]`)."""

    model: str = "*"
    """Pattern of served names."""
    adapter: str = "*"
    """Pattern of adapters' names; empty: requests without an adapter, `?*`: those with one, `*`: both."""
    input: float
    """Price of a million prompt tokens, in any currency, the same everywhere."""
    cached: float | None = None
    """Price of a million prompt tokens that were found in a cache; None: as input."""
    output: float
    """Price of a million output tokens."""

    @property
    def tariff(self) -> Tariff:
        cached = self.input if self.cached is None else self.cached
        return Tariff(to_nano(self.input), to_nano(cached), to_nano(self.output))

    def __post_init__(self) -> None:
        for name in ("input", "cached", "output"):
            price = getattr(self, name)
            if price is not None and not 0 <= price <= MAX_PRICE:
                raise ConfigError(
                    f"tariffs: {name} of the models {self.model!r} must lie in 0..{MAX_PRICE:.0f}, the price of a "
                    f"million tokens, not {price:g}"
                )


class Tariffs:
    """The tariffs of all models. rules: in their order; the first that fits counts, and where none does, what is used
    is free."""

    def __init__(self, rules: Sequence[TariffRule] = ()) -> None:
        self._rules = [(rule.model, rule.adapter, rule.tariff) for rule in rules]

    def find(self, model: str, adapter: str = "") -> Tariff:
        """Tariff of a served name. adapter: its name; empty: none."""
        for models, adapters, tariff in self._rules:
            if fnmatchcase(model, models) and fnmatchcase(adapter, adapters):
                return tariff
        return FREE


NO_TARIFFS = Tariffs()


def charge_nano(tariff: Tariff, used: TokenCounts) -> int:
    """Charge for what was used, rounded up to the next 1e-9 of the unit."""
    cached = min(used.cached_tokens, used.prompt_tokens)
    return price_nano(tariff, used.prompt_tokens - cached, cached, used.completion_tokens)


def most_nano(tariff: Tariff, prompt_tokens: int, output_tokens: int) -> int:
    """Most that a request can be charged. prompt_tokens: of all its prompts, each once; output_tokens: bounds of all
    choices together."""
    return price_nano(tariff._replace(input=max(tariff.input, tariff.cached)), prompt_tokens, 0, output_tokens)


def price_nano(tariff: Tariff, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Price of so many tokens, rounded up, at least 0 and at most MAX_NANO. A provider may report any number."""
    sum_nano = tariff.input * input_tokens + tariff.cached * cached_tokens + tariff.output * output_tokens
    return min(max(0, -(-sum_nano // TOKENS_OF_A_PRICE)), MAX_NANO)
