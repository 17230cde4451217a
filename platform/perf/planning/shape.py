"""The shape of a decoder with grouped heads and a gated MLP: what its memory and its work follow from.

Not a configuration that something computes by (`workers.compute.model_config`), and no weights. Invariant: the numbers
of parameters add up; where a shape names its parameters itself, what its tables don't hold is in its layers.
"""

import math
from dataclasses import dataclass

from penstock.base.errors import ConfigError

MOST = 10**15
"""Highest number that a shape may name: more than any model has of anything, and sums stay numbers."""
MOST_TOKENS = 10**8
"""Longest context that is planned for."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int | None = None
    """Inner size of the MLP. None: not known, and `given_params` is."""
    vocab_size: int = 0
    """Rows of the embedding table; 0: not known, then all parameters count as the layers'."""
    is_tied: bool = False
    """Whether the output head is the embedding table."""
    max_context: int | None = None
    """Longest context that the model was made for, tokens; None: not known."""
    num_vector_params: int = 0
    """Parameters in vectors: norms and biases."""
    given_params: int | None = None
    """Number of all parameters, where that is what is known."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a model's {name} must be at least 1, not {getattr(self, name)}")
        if self.max_context is not None and self.max_context < 1:
            raise ConfigError(f"a model's max_context must be at least 1, not {self.max_context}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads can't share {self.num_kv_heads} key/value heads evenly")
        if self.intermediate_size is None and self.given_params is None:
            raise ConfigError("a shape needs inner=N, the inner size of the MLP, or params=N, all parameters")
        if self.layer_params <= 0:
            raise ConfigError(f"params={self.given_params} are fewer than the embedding and the head alone have")

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """[outputs, inputs] of the matrices of a layer. One that stands for all, where the inner size is not known."""
        hidden, query, shared = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = ((query, hidden), (shared, hidden), (shared, hidden), (hidden, query))
        if self.intermediate_size is None:
            return ((self.layer_params // self.num_layers // hidden, hidden),)
        inner = self.intermediate_size
        return (*attention, (inner, hidden), (inner, hidden), (hidden, inner))

    @property
    def layer_params(self) -> int:
        """Parameters of the layers' matrices."""
        if self.given_params is not None:
            return self.given_params - self.table_params - self.num_vector_params
        return self.num_layers * sum(outputs * inputs for outputs, inputs in self.matrices)

    @property
    def head_params(self) -> int:
        """Parameters of the output head, which every step reads."""
        return self.vocab_size * self.hidden_size

    @property
    def table_params(self) -> int:
        """Parameters of embedding and head, counted once where they are one."""
        return self.head_params * (1 if self.is_tied else 2)

    @property
    def num_params(self) -> int:
        return self.layer_params + self.table_params + self.num_vector_params

    @property
    def kv_heads_of_all_layers(self) -> int:
        """Vectors of keys and values that a token has."""
        return 2 * self.num_layers * self.num_kv_heads


_KEYS: dict[str, str] = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "inner": "intermediate_size",
    "vocab": "vocab_size",
    "params": "given_params",
    "context": "max_context",
    "tied": "is_tied",
}
"""What `--shape` calls the fields."""


def parse_shape(text: str) -> ModelShape:
    """Read `layers=80,hidden=8192,heads=64,kv_heads=8,params=70e9`. head_dim is hidden / heads where it is not given,
    kv_heads as many as heads. Raises ConfigError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS:
            raise ConfigError(f"--shape has {key!r}, which is none of {', '.join(_KEYS)}")
        found[key] = _integer(f"{key}=", value, MOST)
    for key in ("layers", "hidden", "heads"):
        if key not in found:
            raise ConfigError(f"--shape lacks {key}=N; layers, hidden, heads and inner or params are needed")
    heads = found["heads"]
    found.setdefault("kv_heads", heads)
    found.setdefault("head_dim", found["hidden"] // max(1, heads))
    is_tied = bool(found.pop("tied", 0))
    vectors = (2 * found["layers"] + 1) * found["hidden"] if "params" not in found else 0
    fields = {_KEYS[key]: value for key, value in found.items()}
    return ModelShape(name="shape", is_tied=is_tied, num_vector_params=vectors, **fields)


def _integer(name: str, value: str, most: int) -> int:
    """A whole number from 0 to `most`, 70e9 and 8k (of 1024) too. Raises ConfigError."""
    try:
        number = float(value[:-1]) * 1024 if value[-1:] in ("k", "K") else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number != int(number) or number < 0:
        raise ConfigError(f"{name}{value} is no whole number")
    if number > most:
        raise ConfigError(f"{name}{value} is more than can be planned for, {most:g}")
    return int(number)


def parse_tokens(text: str, option: str = "--context") -> int:
    """A number of tokens, at most MOST_TOKENS: 8192, or 8k for the same. option: who asks. Raises ConfigError."""
    found = _integer(f"{option} ", text, MOST_TOKENS)
    if found < 1:
        raise ConfigError(f"{option} {text} holds nothing: it must be a token at least")
    return found
