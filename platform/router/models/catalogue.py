"""The model names of the API, from the pools and providers behind them. Pure.

Pools of one tier that share a name share the model; those of other tiers may have another one (a small one at the edge,
a large one behind).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from penstock.router.config import EscalationConfig, PoolSpec, ProviderConfig
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Route
from penstock.text.tokenizer import Tokenizer


class Checkpoint(NamedTuple):
    """The parts of a checkpoint that a gateway reads."""

    tokenizer: Tokenizer
    digest: str


Context = Callable[[Sequence[PoolSpec]], int]
"""A function that returns the longest context among pools, in tokens, as far as it is known now."""


def build_served_models(
    pools: Sequence[PoolSpec],
    providers: Sequence[ProviderConfig],
    checkpoints: Mapping[str, Checkpoint],
    context: Context,
) -> dict[str, ServedModel]:
    """The models of the API by served name. checkpoints: by `PoolSpec.model`."""
    names = dict.fromkeys(name for pool in pools for name in pool.served_names)
    return {
        name: _build_served_model(
            name,
            [pool for pool in pools if name in pool.served_names],
            [item for item in providers if name in item.served_names],
            checkpoints,
            context,
        )
        for name in names
    }


def _build_served_model(
    name: str,
    pools: Sequence[PoolSpec],
    providers: Sequence[ProviderConfig],
    checkpoints: Mapping[str, Checkpoint],
    context: Context,
) -> ServedModel:
    checkpoint_names = list(dict.fromkeys(pool.model for pool in pools))
    first, *others = (
        _build_model(name, [pool for pool in pools if pool.model == model], checkpoints[model], context)
        for model in checkpoint_names
    )
    escalation = next((pool.escalation for pool in pools if pool.escalation is not None), None)
    return _with_routes(first, tuple(others), _build_routes(pools, checkpoint_names, providers), escalation)


def _build_model(name: str, pools: Sequence[PoolSpec], checkpoint: Checkpoint, context: Context) -> ServedModel:
    return ServedModel(
        name=name,
        pools=tuple(pool.name for pool in pools),
        tokenizer=checkpoint.tokenizer.with_tool_parser(pools[0].tool_parser).with_reasoning_parser(
            pools[0].reasoning_parser
        ),
        max_model_len=partial(context, pools),
        digest=checkpoint.digest,
        exact=all(pool.exact for pool in pools),
    )


def _with_routes(
    model: ServedModel,
    others: tuple[ServedModel, ...],
    routes: tuple[Route, ...],
    escalation: EscalationConfig | None,
) -> ServedModel:
    return ServedModel(
        name=model.name,
        pools=model.pools,
        tokenizer=model.tokenizer,
        max_model_len=model.max_model_len,
        digest=model.digest,
        exact=model.exact and all(other.exact for other in others) and all(route.provider is None for route in routes),
        routes=routes,
        others=others,
        escalation=escalation,
    )


def _build_routes(
    pools: Sequence[PoolSpec], models: Sequence[str], providers: Sequence[ProviderConfig]
) -> tuple[Route, ...]:
    """One route for the pools of each tier and model, then one for each provider."""
    kinds = dict.fromkeys((pool.tier, pool.model) for pool in pools)
    local = [
        Route(tier, tuple(pool.name for pool in pools if (pool.tier, pool.model) == (tier, model)), models.index(model))
        for tier, model in kinds
    ]
    return (*local, *(Route(provider.tier, (), provider=provider.name) for provider in providers))
