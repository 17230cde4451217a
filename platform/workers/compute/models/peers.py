"""The other ranks of a model that is in parts, as its forward pass meets them; what they are, `compute.parallel` knows.

All ranks call the same methods in the same order, with tensors of the same shapes.
"""

from typing import Protocol

from torch import Tensor


class Peers(Protocol):
    """Each method waits for all ranks, on a GPU without the host, and gives all the same."""

    @property
    def token_ids(self) -> range:
        """Token ids whose rows of embedding and head this rank has."""

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which may be written over."""

    def join(self, logits: Tensor) -> Tensor:
        """Logits of all token ids, float32 [R, vocab_size], of each rank's own."""

    def merge(self, best: Tensor) -> Tensor:
        """Ids and values of the largest logits, float64 [2, R] as of `models.llama.largest`, of each rank's own; ids of
        `best` count from the rank's first."""
