"""Parts of a model's weights that each rank holds: whole heads, channels of the MLP, ranges of token ids. Pure.

Matrices whose outputs belong to heads, channels or token ids are cut by rows (qkv, gate_up, embedding, head); o and
down, which read these, by columns, so that their products are parts of a sum (Shoeybi et al. 2019, Megatron-LM, arXiv
1909.08053). All else is on every rank, but biases of o and down, which the sum must hold once.

Where there are as many ranks as key/value heads or fewer, each key/value head is on one rank, with all query heads that
read it. Where there are more ranks, each key/value head is on several, which share its query heads. So on every rank
all key/value heads have equally many query heads, and ranks differ by one key/value head or by one query head at most.

Invariant: put together, the shares are the whole; only key/value heads are on more than one rank.
"""

from dataclasses import dataclass, replace

from penstock.base.errors import ConfigError
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.quantization_config import Awq, PackQuantized

ALIGNED = 32
"""Channels and token ids are dealt in so many, which tensor cores and groups of 32 like; one by one where that is too
many."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds. The ranges are of the whole model's numbers."""

    rank: int
    queries: range
    """Query heads."""
    shared: range
    """Key/value heads."""
    channels: range
    """Numbers between gate_up and down."""
    token_ids: range
    """Rows of the embedding and of the output head."""

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        """The model as the rank computes it: with the rank's heads, and all else as in the whole one."""
        return replace(whole, num_heads=len(self.queries), num_kv_heads=len(self.shared))

    def rows_of(self, name: str, whole: ModelConfig) -> list[range] | None:
        """Rows of a parameter (`weights.layout` names them), in order; None: all of them. A name may also be that of a
        matrix alone ("qkv")."""
        match name.rpartition(".")[2].removesuffix("_bias"):
            case "qkv":
                head_dim, queries = whole.head_dim, whole.num_heads
                keys, values = queries, queries + whole.num_kv_heads
                return [
                    _scaled(heads, first, head_dim)
                    for heads, first in ((self.queries, 0), (self.shared, keys), (self.shared, values))
                ]
            case "gate_up":
                return [self.channels, _scaled(self.channels, whole.intermediate_size, 1)]
            case "embed" | "lm_head":
                return [self.token_ids]
        return None

    def columns_of(self, name: str, whole: ModelConfig) -> range | None:
        """Columns of a matrix; None: all of them."""
        match name.rpartition(".")[2]:
            case "o":
                return _scaled(self.queries, 0, whole.head_dim)
            case "down":
                return self.channels
        return None

    def has(self, name: str) -> bool:
        """Whether the rank has any of a parameter: of what is added to a sum over ranks, one has all."""
        return self.rank == 0 or name.rpartition(".")[2] not in ("o_bias", "down_bias")


def make_shares(config: ModelConfig, size: int) -> list[Share]:
    """The shares of so many ranks, in order. Raises ConfigError where one would have no head or no channel."""
    heads = deal_heads(config.num_heads, config.num_kv_heads, size)
    unit = _group_size(config) or _unit(config.intermediate_size, size)
    channels = deal(config.intermediate_size, size, unit)
    token_ids = deal(config.vocab_size, size, _unit(config.vocab_size, size))
    if not all(map(len, channels)) or not all(map(len, token_ids)):
        raise ConfigError(
            f"engine.tensor_parallel_size: {size} is too much for the checkpoint's {config.intermediate_size} channels "
            f"of an MLP in groups of {unit}, or its {config.vocab_size} token ids"
        )
    return [Share(rank, *heads[rank], channels[rank], token_ids[rank]) for rank in range(size)]


def deal_heads(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[range, range]]:
    """Query heads and key/value heads of each rank. Raises ConfigError where a rank would have none."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        return [(range(part.start * group, part.stop * group), part) for part in deal(num_kv_heads, size)]
    found: list[tuple[range, range]] = []
    for head, ranks in enumerate(deal(size, num_kv_heads)):
        if len(ranks) > group:
            raise ConfigError(
                f"engine.tensor_parallel_size: {size} is too much for the checkpoint's {num_heads} attention heads "
                f"over {num_kv_heads} key/value heads: a rank would have none; at most {num_heads} ranks share them"
            )
        found += [
            (range(head * group + part.start, head * group + part.stop), range(head, head + 1))
            for part in deal(group, len(ranks))
        ]
    return found


def deal(count: int, size: int, unit: int = 1) -> list[range]:
    """Ranges that follow each other and cover `count`, as equal as they can be in whole units, longer ones first; the
    last unit may be short."""
    num_units = -(-count // unit)
    each, more = divmod(num_units, size)
    ends = [min(count, unit * (each * rank + min(rank, more))) for rank in range(size + 1)]
    return [range(*ends[rank : rank + 2]) for rank in range(size)]


def largest_config(whole: ModelConfig, size: int) -> ModelConfig:
    """The model as the rank computes it that has most key/value heads, by which a block of the KV cache is measured.
    Raises ConfigError as `make_shares`."""
    configs = [share.config_of(whole) for share in make_shares(whole, size)]
    return max(configs, key=lambda config: config.num_kv_heads)


def _unit(count: int, size: int) -> int:
    return ALIGNED if count >= size * ALIGNED else 1


def _group_size(config: ModelConfig) -> int | None:
    """Columns of down's groups, which stay together; None where it has none, or a row is one."""
    match config.quantization:
        case Awq(group_size) | PackQuantized(group_size=int(group_size)) if group_size < config.intermediate_size:
            return group_size
    return None


def _scaled(part: range, first: int, each: int) -> range:
    """Numbers of the rows of parts [first + part.start, first + part.stop) that have `each` rows."""
    return range((first + part.start) * each, (first + part.stop) * each)
