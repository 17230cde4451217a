"""The places where one request may be answered: what its model and its tenant allow, less what cannot do what the
request asks for; and the prompt in the tokens of each further model.

Not the choice among those (`routing.tiers`, called by dispatch), for it rests on the state of things when the request's
turn comes.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from penstock.router.completions.parameters import sampling_for_choice
from penstock.router.completions.prompts import fit_prompt
from penstock.router.config import ProviderConfig
from penstock.router.models.served_model import ServedModel
from penstock.router.providers.provider_api import is_bound_to_tokens, is_understood
from penstock.router.routing.request import AnsweringModel, LazyPrompt, Route, TokenizedPrompt
from penstock.router.routing.tiers import STAY, TierReason, TierRule, in_order, may_leave
from penstock.router.transport.stay import STAY_HEADER
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import Forbidden, RequestError
from penstock.wire.frames import Constraint, SamplingParams
from penstock.wire.openai import ChatRequest, CompletionRequest

Tokenize = Callable[[Tokenizer, int | None], Awaitable[list[list[int]]]]
"""A function that returns the prompts of one request in a tokenizer's token ids, at most so many each, or raises
ContextTooLong; None: no bound."""


class Candidates(NamedTuple):
    """The routes that are open to one request, and the models behind them."""

    model: ServedModel
    """The model whose tokenizer reads the request first."""
    routes: tuple[Route, ...]
    """Open routes in the order of the tenant's policy; empty: all pools of the model are one route."""
    others: tuple[ServedModel, ...] = ()
    """Models of further routes: `Route.model` n is `others[n - 1]`."""
    skipped: TierReason | None = None
    """Why the policy's first route is not among these; None: it is."""

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of all pools and providers on the routes."""
        if not self.routes:
            return self.model.pools
        return tuple(
            dict.fromkeys(
                place
                for route in self.routes
                for place in ((route.provider,) if route.provider is not None else route.pools)
            )
        )

    @property
    def has_pool(self) -> bool:
        return not self.routes or any(route.provider is None for route in self.routes)

    @property
    def has_provider(self) -> bool:
        return any(route.provider is not None for route in self.routes)

    def max_prompt_tokens(self) -> int | None:
        """Longest prompt that is of any use to the first model, in tokens. None if it must be counted to its end: a
        provider may take what is too long here."""
        return None if self.has_provider else self.model.max_model_len()

    def max_model_len(self) -> int:
        """Context of the first model, in tokens; where only providers are left no bound, for theirs is not known
        here."""
        return self.model.max_model_len() if self.has_pool else sys.maxsize

    def beyond_first_model(self) -> "Candidates | None":
        """The candidates without the first model's route, for a request that is too long for it. Returns None if no
        route is left, or if none was the first model's."""
        rest = [route for route in self.routes if route.provider is not None or route.model]
        if not rest or len(rest) == len(self.routes):
            return None
        skipped = self.skipped or (TierReason.CONTEXT_TOO_LONG if rest[0] is not self.routes[0] else None)
        return _renumber_models((self.model, *self.others), rest, skipped)


def find_candidates(
    model: ServedModel,
    rule: TierRule,
    request: ChatRequest | CompletionRequest,
    providers: Mapping[str, ProviderConfig],
) -> Candidates:
    """The routes on which a request may be answered. Raises Forbidden if its rule leaves none."""
    if len(model.routes) <= 1 and len(rule.tiers) > 1 and not rule.goes_by_cost:
        return Candidates(model, model.routes)
    allowed = in_order(_by_pool(model.routes) if rule.goes_by_cost else model.routes, rule)
    if not allowed:
        raise Forbidden(_explain_none(model, rule), param="model")
    capable = _select_capable(allowed, request, providers)
    skipped = None if capable[0] is allowed[0] else TierReason.CAPABILITY
    return _renumber_models((model, *model.others), capable, skipped)


def _by_pool(routes: Iterable[Route]) -> list[Route]:
    """Each pool as a route of its own: prices are the pools'."""
    return [
        part
        for route in routes
        for part in ([route] if route.provider is not None else [route._replace(pools=(pool,)) for pool in route.pools])
    ]


def _explain_none(model: ServedModel, rule: TierRule) -> str:
    """A sentence about a rule that leaves no route, which is the tenant's policy unless that alone would leave one."""
    policy = rule._replace(stays=False)
    if any(may_leave(policy, route.tier) for route in model.routes):
        return (
            f"The model '{model.name}' is not served on the edge, where the request's header"
            f" '{STAY_HEADER.decode()}: {STAY}' keeps it."
        )
    return (
        f"The model '{model.name}' is only served outside of the tier that your organization's policy '{rule.policy}'"
        " allows."
    )


def _select_capable(
    routes: Sequence[Route], request: ChatRequest | CompletionRequest, providers: Mapping[str, ProviderConfig]
) -> list[Route]:
    """The routes that can do what the request asks for; never empty, since every served name has a pool."""
    home = next(route.model for route in routes if route.provider is None)
    is_bound = is_bound_to_tokens(request)
    return [
        route
        for route in routes
        if (
            is_understood(request, providers[route.provider])
            if route.provider is not None
            else route.model == home or not is_bound
        )
    ]


def _renumber_models(models: Sequence[ServedModel], routes: Sequence[Route], skipped: TierReason | None) -> Candidates:
    """Candidates with the models that the routes name, numbered in the order in which the routes name them."""
    named = list(dict.fromkeys(route.model for route in routes if route.provider is None))
    renumbered = tuple(
        route._replace(model=named.index(route.model)) if route.provider is None else route._replace(model=0)
        for route in routes
    )
    found = [models[index] for index in named]
    return Candidates(found[0] if found else models[0], renumbered, tuple(found[1:]), skipped)


class LazyPrompts:
    """The prompts of a request for its further models: tokenized once for each model, and only when one is wanted."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        tokenize: Tokenize,
        sampling: SamplingParams,
        default_max_tokens: int,
        constrain: Callable[[Tokenizer], Constraint | None] | None = None,
    ) -> None:
        """sampling: as the request has it, not yet bounded by a context. constrain: what an answer in a tokenizer's
        tokens must be, where that differs."""
        self._models = models
        self._tokenize = tokenize
        self._sampling = sampling
        self._default_max_tokens = default_max_tokens
        self._constrain = constrain
        self._read: dict[int, list[list[int]] | RequestError] = {}
        """Token ids of all prompts, or why there are none, by number of the model."""
        self._constraints: dict[int, Constraint | None] = {}
        """What the answer must be, by number of the model."""
        self._reading = asyncio.Lock()

    def for_sequence(self, prompt: int, choice: int) -> tuple[LazyPrompt, ...]:
        """One for each further model. prompt: number of the prompt in the request; choice: number within the prompt."""
        return tuple(
            LazyPrompt(partial(self._load, index, prompt, choice), AnsweringModel(model.fingerprint, model.tokenizer))
            for index, model in enumerate(self._models)
        )

    async def _load(self, index: int, prompt: int, choice: int) -> TokenizedPrompt:
        """Raises RequestError where that model cannot take the prompt."""
        model = self._models[index]
        async with self._reading:  # many sequences may want it at the same moment
            if index not in self._read:
                self._constraints[index] = None if self._constrain is None else self._constrain(model.tokenizer)
                self._read[index] = await self._tokenize_all(model)
        read = self._read[index]
        if isinstance(read, RequestError):
            raise read
        fitted = fit_prompt(read[prompt], self._sampling, model.max_model_len(), self._default_max_tokens)
        sampling = sampling_for_choice(fitted.sampling, choice)
        return fitted._replace(sampling=sampling, constraint=self._constraints[index])

    async def _tokenize_all(self, model: ServedModel) -> list[list[int]] | RequestError:
        try:
            return await self._tokenize(model.tokenizer, model.max_model_len())
        except RequestError as error:
            return error
