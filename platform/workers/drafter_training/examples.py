"""What a head is trained on: answers with what the target has computed over them, several side by side."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence


class Example(NamedTuple):
    """One answer, and what the target had computed over it."""

    token_ids: Tensor
    """int64 [L]."""
    num_prompt: int
    features: Tensor
    """[L, taps, hidden], each part divided by its root mean square."""
    states: Tensor
    """[L - num_prompt, hidden], divided by their root mean square: those of the tokens from the last of the prompt on,
    without the answer's last."""


class Batch(NamedTuple):
    """Answers filled up to the longest, L tokens."""

    token_ids: Tensor
    """int64 [B, L]."""
    first: int
    """Place of the first token of an answer behind its prompt, the earliest of all."""
    is_base: Tensor
    """bool [B, L - 1 - first]: whether the token at `first` and so many is one of the answer, and not its last: one
    that is drafted from."""
    num_bases: int
    features: Tensor
    """[B, L, taps, hidden]."""
    states: Tensor
    """[B, L - 1 - first, hidden]: those of the tokens from `first` on; they say the next one."""

    @staticmethod
    def of(examples: Sequence[Example]) -> "Batch":
        """examples: 1 at least, all on one device, with answers of 2 tokens or more."""
        first = min(example.num_prompt for example in examples)
        longest = max(len(example.token_ids) for example in examples)
        ends = [(example.num_prompt - first, len(example.token_ids) - 1 - first) for example in examples]
        token_ids = pad_sequence([example.token_ids for example in examples], batch_first=True)
        places = torch.arange(longest - 1 - first)
        is_base = torch.stack([(places >= begin) & (places < end) for begin, end in ends])
        states = [
            functional.pad(example.states[1:], (0, 0, begin, longest - 1 - first - end))
            for example, (begin, end) in zip(examples, ends, strict=True)
        ]
        return Batch(
            token_ids,
            first,
            is_base.to(token_ids.device),
            sum(end - begin for begin, end in ends),
            pad_sequence([example.features for example in examples], batch_first=True),
            torch.stack(states),
        )


class Examples(Protocol):
    """All answers of a training."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns the answers of the indices, on the device that trains."""


def unit(x: Tensor) -> Tensor:
    """Divided by the root mean square of the last dimension."""
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)
