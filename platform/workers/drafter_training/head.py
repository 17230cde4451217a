"""The head as it is trained: float32 parameters, and the loss over an answer, several tokens ahead.

The layers that serve are in `compute.speculation.head`; both are held against each other by a test. Training sees what
drafting will (the training-time test of EAGLE-3): behind the first token ahead the head goes on from its own output,
with keys and values of its own in place of those that the target's features give. Under autocast products are in
bfloat16; the residual stream, attention weights, logits and gradients of parameters stay float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.operators import gated, rotate
from penstock.workers.compute.speculation.head_file import MATRICES, VECTORS
from penstock.workers.drafter_training.features import Example, unit

PASS_WEIGHT = 0.8
"""Weight of each token further ahead, of that of the one before."""
INITIAL_NOISE, INITIAL_NORM = 0.01, 0.2


class Loss(NamedTuple):
    total: Tensor
    num_bases: int
    """Tokens from which was drafted."""
    num_kept: list[int]
    """Number of them whose first so many tokens ahead, 1 or more, are all what the answer says."""


class TrainedHead(nn.Module):
    """Parameters by the names of `head_file`."""

    first: Tensor
    chained: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    lm_head: Tensor
    input_norm: Tensor
    post_norm: Tensor
    norm: Tensor

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self._config = config
        self._rope = rope
        for name in (*MATRICES, *VECTORS):
            self.register_parameter(name, nn.Parameter(weights[name].float().clone()))

    def loss(self, example: Example, embed: Tensor, target: Tensor, places: Tensor, depth: int) -> Loss:
        """How far the head's scores are from the target's distribution, `depth` tokens ahead.

        embed: float32 [vocab_size, hidden], the target's table, rows of unit root mean square. target: float32
        [V, hidden], rows of its output matrix, the last norm in them. places: int64 [vocab_size], where a token stands
        in the vocabulary of the head, -1: nowhere.
        """
        ids, num_prompt = example.token_ids, example.num_prompt
        with torch.no_grad():
            wanted = functional.softmax(functional.linear(example.states[1:], target).float(), dim=1)
        said = places[ids[num_prompt + 1 :]]
        total, weight, kept = target.new_zeros(()), 1.0, torch.ones(len(said), dtype=torch.bool)
        num_kept: list[int] = []
        for ahead, logits in enumerate(self.passes(example, embed, depth)):
            is_known = said[ahead:] >= 0
            losses = functional.cross_entropy(logits, wanted[ahead:], reduction="none")
            total = total + weight * (losses * is_known).sum()
            weight *= PASS_WEIGHT
            kept = kept[: len(logits)] & (logits.detach().argmax(1) == said[ahead:])
            num_kept.append(int(kept.sum()))
        return Loss(total / len(said), len(said), num_kept)

    def passes(self, example: Example, embed: Tensor, depth: int) -> Iterator[Tensor]:
        """Scores of the head's vocabulary for each token of the answer but its last, [n, V]: of the token behind it;
        then, for all that have so many behind them, of the second one, and so on, `depth` times at most."""
        ids, num_prompt = example.token_ids, example.num_prompt
        num_bases = len(ids) - 1 - num_prompt
        e = embed[ids[:-1]]
        before = torch.cat((torch.zeros_like(example.features[:1]), example.features[:-2]))
        x = functional.linear(torch.cat((e, before.flatten(1)), dim=1), self.first).float()
        keys, values, queries = self._project(x, torch.arange(len(x)), num_prompt)
        x = x[num_prompt:]
        allowed = torch.arange(keys.shape[1]) <= torch.arange(num_prompt, num_prompt + num_bases)[:, None]
        chain: list[tuple[Tensor, Tensor]] = []
        for ahead in range(min(depth, num_bases)):
            if ahead:
                count = num_bases - ahead
                parts = torch.cat((e[num_prompt + ahead :], unit(x[:count])), dim=1)
                x = functional.linear(parts, self.chained).float()
                positions = torch.arange(num_prompt + ahead, num_prompt + num_bases)
                key, value, queries = self._project(x, positions, 0)
                chain = [(k[:, :count], v[:, :count]) for k, v in chain] + [(key, value)]
                allowed = allowed[:count]
            x = self._layer(x, queries, keys, values, allowed, chain)
            normed = functional.rms_norm(x, x.shape[1:], self.norm, self._config.rms_norm_eps)
            yield functional.linear(normed, self.lm_head).float()

    def _project(self, x: Tensor, positions: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of x [T, hidden] and queries of those from `first` on, [heads, T, dim]."""
        c = self._config
        normed = functional.rms_norm(x, x.shape[1:], self.input_norm, c.rms_norm_eps)
        query, shared = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        cos, sin = (table[positions] for table in self._rope)
        kv = functional.linear(normed, self.qkv[query:]).view(len(x), 2 * c.num_kv_heads, c.head_dim)
        q = functional.linear(normed[first:], self.qkv[:query]).view(len(x) - first, c.num_heads, c.head_dim)
        assert kv.shape[1] * c.head_dim == 2 * shared
        k = rotate(kv[:, : c.num_kv_heads], cos, sin)
        groups = c.num_heads // c.num_kv_heads
        keys, values = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (k, kv[:, c.num_kv_heads :]))
        return keys, values, rotate(q, cos[first:], sin[first:]).transpose(0, 1)

    def _layer(
        self,
        x: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor,
        chain: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        c = self._config
        scores = (queries @ keys.transpose(1, 2)).float().masked_fill(~allowed, -torch.inf)
        own = [(queries * key).sum(2, keepdim=True) for key, _ in chain]
        shares = functional.softmax(torch.cat((scores, *own), dim=2) * c.head_dim**-0.5, dim=2)
        attended = shares[..., : keys.shape[1]] @ values
        for place, (_, value) in enumerate(chain):
            attended = attended + shares[..., keys.shape[1] + place, None] * value
        x = x + functional.linear(attended.transpose(0, 1).flatten(1), self.o)
        normed = functional.rms_norm(x, x.shape[1:], self.post_norm, c.rms_norm_eps)
        out: Tensor = x + functional.linear(gated(functional.linear(normed, self.gate_up)), self.down)
        return out


def initial_weights(
    layer: dict[str, Tensor], norm: Tensor, lm_head: Tensor, num_taps: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Weights to begin with: the target's last layer, norm and output rows, and inputs that are the mean of the token
    and of what says most about those before it, the highest features or the layer's own output. The norm is small: as
    they are, these weights are sure of the wrong token. layer: its parameters, by their names."""
    hidden = len(norm)

    def through(num_parts: int) -> Tensor:
        weight: Tensor = torch.randn(hidden, num_parts * hidden, generator=generator) * INITIAL_NOISE * hidden**-0.5
        for part in (0, num_parts - 1):
            weight[:, part * hidden : (part + 1) * hidden] += 0.5 * torch.eye(hidden)
        return weight

    return {
        "first": through(1 + num_taps),
        "chained": through(2),
        **{name: layer[name] for name in ("qkv", "o", "gate_up", "down", "input_norm", "post_norm")},
        "norm": INITIAL_NORM * norm,
        "lm_head": lm_head,
    }
