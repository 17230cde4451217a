"""Where one request may be answered: what model and tenant allow, less what can't do what it asks for; and how other
models read it.

Not the choice among those (tiers, by dispatch), for it rests on the state of things when the request's turn comes.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from penstock.router.completions.parameters import bounded, sibling
from penstock.router.config import ProviderConfig
from penstock.router.models.served_model import ServedModel
from penstock.router.providers.provider_api import is_bound_to_tokens, is_understood
from penstock.router.routing.request import AnsweringModel, LazyPrompt, Route, TokenizedPrompt
from penstock.router.routing.tiers import TierPolicy, TierReason, in_order, parse_policy
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import Forbidden
from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.wire.openai import ChatRequest, CompletionRequest

Read = Callable[[Tokenizer], Awaitable[list[list[int]]]]
"""A request's prompts as token ids."""


class Candidates(NamedTuple):
    model: ServedModel
    """Its tokenizer reads the request first."""
    routes: tuple[Route, ...]
    """In the order of the policy; empty: all pools of the model are one."""
    others: tuple[ServedModel, ...] = ()
    """Models of further routes."""
    skipped: TierReason | None = None
    """Why the policy's first route is not among these."""

    @property
    def pools(self) -> tuple[str, ...]:
        """And providers, by name."""
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
    def has_provider(self) -> bool:
        return any(route.provider is not None for route in self.routes)

    def max_model_len(self) -> int:
        """Of the first model; what a provider's is, only it can tell."""
        is_computed_here = not self.routes or any(route.provider is None for route in self.routes)
        return self.model.max_model_len() if is_computed_here else sys.maxsize

    def beyond_first_model(self) -> "Candidates | None":
        """For a request that is too long for it; None: there is nothing else."""
        rest = [route for route in self.routes if route.provider is not None or route.model]
        if not rest or len(rest) == len(self.routes):
            return None
        skipped = self.skipped or (TierReason.CONTEXT_TOO_LONG if rest[0] is not self.routes[0] else None)
        return _indexed((self.model, *self.others), rest, skipped)


def find_candidates(
    model: ServedModel, policy: str, request: ChatRequest | CompletionRequest, providers: Mapping[str, ProviderConfig]
) -> Candidates:
    """policy: as a tenant's settings name it. Raises Forbidden where the policy leaves nothing."""
    order = parse_policy(policy)
    if len(model.routes) <= 1 and order is not TierPolicy.EDGE_ONLY:
        return Candidates(model, model.routes)
    allowed = in_order(model.routes, order)
    if not allowed:
        raise Forbidden(
            f"The model '{model.name}' is only served outside of the tier that your organization's policy '{policy}' allows.",
            param="model",
        )
    able = _able(allowed, request, providers)
    return _indexed((model, *model.others), able, None if able[0] is allowed[0] else TierReason.CAPABILITY)


def _able(
    routes: Sequence[Route], request: ChatRequest | CompletionRequest, providers: Mapping[str, ProviderConfig]
) -> list[Route]:
    """There is a pool for every served name, so something is left."""
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


def _indexed(models: Sequence[ServedModel], routes: Sequence[Route], skipped: TierReason | None) -> Candidates:
    """With the models that the routes name, in the order in which they are come to."""
    named = list(dict.fromkeys(route.model for route in routes if route.provider is None))
    renamed = tuple(
        route._replace(model=named.index(route.model)) if route.provider is None else route._replace(model=0)
        for route in routes
    )
    found = [models[index] for index in named]
    return Candidates(found[0] if found else models[0], renamed, tuple(found[1:]), skipped)


class LazyPrompts:
    """A request for its further models: tokenized once for each, and only when somebody wants it."""

    def __init__(
        self, models: Sequence[ServedModel], read: Read, sampling: SamplingParams, default_max_tokens: int
    ) -> None:
        """sampling: as asked, not yet bounded by a context."""
        self._models = models
        self._read = read
        self._sampling = sampling
        self._default_max_tokens = default_max_tokens
        self._token_ids: dict[int, list[list[int]]] = {}

    def of(self, prompt: int, choice: int) -> tuple[LazyPrompt, ...]:
        """For one sequence."""
        return tuple(
            LazyPrompt(
                partial(self._reading, index, prompt, choice), AnsweringModel(model.fingerprint, model.tokenizer)
            )
            for index, model in enumerate(self._models)
        )

    async def _reading(self, index: int, prompt: int, choice: int) -> TokenizedPrompt:
        """Raises RequestError where that model can't take it."""
        model = self._models[index]
        if index not in self._token_ids:
            self._token_ids[index] = await self._read(model.tokenizer)
        ids = self._token_ids[index][prompt]
        fitting = bounded(self._sampling, len(ids), model.max_model_len(), self._default_max_tokens)
        return TokenizedPrompt(pack_token_ids(ids), len(ids), sibling(fitting, choice))
