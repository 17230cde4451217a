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
from penstock.workers.compute.speculation.head_file import MATRICES, VECTORS, to_groups
from penstock.workers.drafter_training.examples import Batch, unit

PASS_WEIGHT = 0.8
"""Weight of each token further ahead, of that of the one before."""
INITIAL_NOISE, INITIAL_NORM = 0.01, 0.2


class Loss(NamedTuple):
    total: Tensor
    """Mean over the answers, of each over the tokens from which was drafted."""
    num_bases: int
    """Tokens from which was drafted."""
    num_kept: list[Tensor]
    """Number of them whose first so many tokens ahead, 1 or more, are all what the answer says: int64 []."""


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
        self._rounding: dict[str, Tensor] = {}
        for name in (*MATRICES, *VECTORS):
            self.register_parameter(name, nn.Parameter(weights[name].float().clone()))

    def round(self, bits: int | None) -> None:
        """Compute with matrices as they would be written in so many bits, as they are at the moment, and take the
        gradients for those of the parameters themselves (Bengio et al. 2013, arXiv 1308.3432). None: no longer."""
        self._rounding = {}
        if bits is None:
            return
        with torch.no_grad():
            for name in MATRICES:
                parameter = getattr(self, name)
                self._rounding[name] = to_groups(parameter, bits).dequantize() - parameter

    def _matrices(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {name: getattr(self, name) for name in MATRICES}
        return {name: value + self._rounding[name] for name, value in found.items()} if self._rounding else found

    def loss(self, batch: Batch, embed: Tensor, target: Tensor, places: Tensor, depth: int) -> Loss:
        """How far the head's scores are from the target's distribution, `depth` tokens ahead.

        embed: float32 [vocab_size, hidden], the target's table, rows of unit root mean square. target: float32
        [V, hidden], rows of its output matrix, the last norm in them. places: int64 [vocab_size], where a token stands
        in the vocabulary of the head, -1: nowhere. All of them lie where the parameters do.
        """
        with torch.no_grad():
            wanted = functional.softmax(functional.linear(batch.states, target).float(), dim=2)
        said = places[batch.token_ids[:, batch.first + 1 :]].masked_fill(~batch.is_base, -1)
        total, weight, kept = target.new_zeros(()), 1.0, batch.is_base
        shares = batch.is_base / (batch.is_base.sum(1, keepdim=True) * len(batch.is_base))
        num_kept: list[Tensor] = []
        for ahead, logits in enumerate(self.passes(batch, embed, depth)):
            count = logits.shape[1]
            shared = shares[:, :count] * (said[:, ahead:] >= 0)
            losses = functional.cross_entropy(logits.flatten(0, 1), wanted[:, ahead:].flatten(0, 1), reduction="none")
            total = total + weight * (losses * shared.flatten()).sum()
            weight *= PASS_WEIGHT
            kept = kept[:, :count] & (logits.detach().argmax(2) == said[:, ahead:])
            num_kept.append(kept.sum())
        return Loss(total, batch.num_bases, num_kept)

    def passes(self, batch: Batch, embed: Tensor, depth: int) -> Iterator[Tensor]:
        """Scores of the head's vocabulary for each token from the batch's `first` on but the last, [B, n, V]: of the
        token behind it; then, for all that have so many behind them, of the second one, and so on, `depth` times at
        most."""
        ids, first, matrices = batch.token_ids, batch.first, self._matrices()
        last = ids.shape[1] - 1
        num_bases, places = last - first, torch.arange(last, device=ids.device)
        e = embed[ids[:, :-1]]
        before = torch.cat((torch.zeros_like(batch.features[:, :1]), batch.features[:, :-2]), dim=1)
        x = functional.linear(torch.cat((e, before.flatten(2)), dim=2), matrices["first"]).float()
        keys, values, queries = self._project(x, matrices["qkv"], places, first)
        x = x[:, first:]
        allowed = places <= places[first:, None]  # what is filled in lies behind all that is read
        chain: list[tuple[Tensor, Tensor]] = []
        for ahead in range(min(depth, num_bases)):
            if ahead:
                count = num_bases - ahead
                parts = torch.cat((e[:, first + ahead :], unit(x[:, :count])), dim=2)
                x = functional.linear(parts, matrices["chained"]).float()
                key, value, queries = self._project(x, matrices["qkv"], places[first + ahead :], 0)
                chain = [(k[:, :, :count], v[:, :, :count]) for k, v in chain] + [(key, value)]
                allowed = allowed[:count]
            x = self._layer(x, matrices, queries, keys, values, allowed, chain)
            normed = functional.rms_norm(x, x.shape[2:], self.norm, self._config.rms_norm_eps)
            yield functional.linear(normed, matrices["lm_head"]).float()

    def _project(self, x: Tensor, qkv: Tensor, positions: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of x [B, T, hidden] and queries of those from `first` on, [B, heads, T, dim]."""
        c = self._config
        normed = functional.rms_norm(x, x.shape[2:], self.input_norm, c.rms_norm_eps)
        query = c.num_heads * c.head_dim
        cos, sin = (table[positions] for table in self._rope)
        kv = functional.linear(normed, qkv[query:]).view(*x.shape[:2], 2 * c.num_kv_heads, c.head_dim)
        q = functional.linear(normed[:, first:], qkv[:query]).view(len(x), -1, c.num_heads, c.head_dim)
        k = rotate(kv[:, :, : c.num_kv_heads], cos, sin)
        groups = c.num_heads // c.num_kv_heads
        keys, values = (
            part.repeat_interleave(groups, dim=2).transpose(1, 2) for part in (k, kv[:, :, c.num_kv_heads :])
        )
        return keys, values, rotate(q, cos[first:], sin[first:]).transpose(1, 2)

    def _layer(
        self,
        x: Tensor,
        matrices: dict[str, Tensor],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor,
        chain: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        c = self._config
        scores = (queries @ keys.transpose(2, 3)).float().masked_fill(~allowed, -torch.inf)
        own = [(queries * key).sum(3, keepdim=True) for key, _ in chain]
        shares = functional.softmax(torch.cat((scores, *own), dim=3) * c.head_dim**-0.5, dim=3)
        attended = shares[..., : keys.shape[2]] @ values
        for place, (_, value) in enumerate(chain):
            attended = attended + shares[..., keys.shape[2] + place, None] * value
        x = x + functional.linear(attended.transpose(1, 2).flatten(2), matrices["o"])
        normed = functional.rms_norm(x, x.shape[2:], self.post_norm, c.rms_norm_eps)
        out: Tensor = x + functional.linear(gated(functional.linear(normed, matrices["gate_up"])), matrices["down"])
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
