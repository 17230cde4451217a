"""A model name of the API: the checkpoint behind it, the pools that serve it, and what adapts it."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.router.routing.request import Route
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """A model name of the API."""

    name: str
    pools: tuple[str, ...]
    tokenizer: Tokenizer
    max_model_len: Callable[[], int]
    """Tokens, prompt and answer: the longest context among the pools, as far as it is known now."""
    digest: str
    """Of the checkpoint; its beginning is the API's system_fingerprint."""
    exact: bool = False
    """All its pools compute in exact mode."""
    created: int = 0
    """Unix time, seconds."""
    owned_by: str = "penstock"
    routes: tuple[Route, ...] = ()
    """All of the name, policies aside: pools by tier and model, then providers. None: the pools are one."""
    others: tuple["ServedModel", ...] = ()
    """Further models under the same name, of other tiers."""

    base: str | None = None
    """Of an adapter: the served name of the model it adapts."""
    adapter: str | None = None
    """Digest of the adapter; None: the model is the checkpoint itself."""

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.digest[:12]}" if self.adapter is None else f"fp_{self.digest[:12]}_{self.adapter[:12]}"

    @property
    def label(self) -> str:
        """What metrics call it: the served name, without what tenants have named themselves."""
        return self.base or self.name
