"""A model name of the API: the checkpoint behind it, the pools that serve it, and its adapter if it has one."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.router.config import EscalationConfig
from penstock.router.routing.request import Route
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """A model name of the API."""

    name: str
    pools: tuple[str, ...]
    tokenizer: Tokenizer
    max_model_len: Callable[[], int]
    """Longest context among the pools, prompt and answer, in tokens, as far as it is known now."""
    digest: str
    """Digest of the checkpoint; its first 12 characters are the API's system_fingerprint."""
    exact: bool = False
    """Whether all its pools compute in exact mode."""
    created: int = 0
    """Unix time at which an adapter was registered, seconds; 0: this is no adapter."""
    owned_by: str = "penstock"
    routes: tuple[Route, ...] = ()
    """All routes of the name, whatever a tenant's policy: pools by tier and model, then providers. Empty: all pools are
    one route."""
    others: tuple["ServedModel", ...] = ()
    """Further models under the same name, of other tiers."""

    escalation: EscalationConfig | None = None
    """The rule by which its edge pools send requests to another tier; None: they send none."""
    base: str | None = None
    """Served name of the model that an adapter is for; None: this is no adapter."""
    adapter: str | None = None
    """Digest of the adapter; None: the model is the checkpoint itself."""

    @property
    def fingerprint(self) -> str:
        """The API's system_fingerprint."""
        return f"fp_{self.digest[:12]}" if self.adapter is None else f"fp_{self.digest[:12]}_{self.adapter[:12]}"

    @property
    def label(self) -> str:
        """Value of the label `model` in metrics: the served name, never a name that a tenant has given."""
        return self.base or self.name

    @property
    def adapter_name(self) -> str:
        """The tenant's own name of the adapter; empty: this is no adapter."""
        return "" if self.adapter is None else self.name.rpartition(":")[2]
