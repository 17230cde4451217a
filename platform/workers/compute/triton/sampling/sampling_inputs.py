"""What a GPU needs to know to choose tokens as `penstock.workers.compute.sampling` does. Tensors, no kernels.

What differs from row to row in length (biases, tokens of penalties, banned tokens) is one list for all rows; of biases
and banned tokens it has places in the rows that are changed: row * vocab_size + id. The tokens that penalties strike
stay on the device (`count_lists`), of which the inputs bring the changes. All of it goes to the device in one transfer.

The last token of a sequence may be one that nobody knows yet but the device, chosen by the step before: then the inputs
name its row there (`Changes.last_row`), and kernels count it and ban by it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.compute.triton.staging import Staging
from penstock.workers.compute.truncation import MOST_TOKENS

MOST_TOP = 256
"""Likeliest tokens of which a GPU gives log probabilities; more of them are the host's work."""
EVERY_KEY = 0x7FFFFFFF
"""Bits of a float without its sign, which grow as a score, at most 0, falls: no score has more."""
ANY = -1
"""What stands for no token in particular before a banned one."""
KNOWN = -1
"""What stands for no row, where a sequence's last token is known."""
_WORD_BITS = 32
_COUNT_SHIFT = 32

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
_NO_IDS = np.empty(0, dtype=np.int64)
_NO_FLOATS = np.empty(0, dtype=np.float32)
Values = TypeVar("Values", Ids, Floats)


class Counted(NamedTuple):
    """Different tokens of a sequence, each with its place among them, which it keeps, and how often it was produced."""

    places: Ids
    ids: Ids
    produced: Floats


class Listed(NamedTuple):
    """All different tokens of a sequence that are known, for whoever keeps a list of them."""

    owner: object
    """The sequence, by identity."""
    num_tokens: int
    """Tokens that are counted."""
    size: int
    """Different ones."""
    since: Callable[[int], Counted]
    """Gives the tokens that may have changed since so many were counted; to be called before more are."""


class Located(NamedTuple):
    """Where a device has the list of a sequence, and what is to be written there before it is read."""

    address: int
    targets: Ids
    """Addresses of entries."""
    entries: Ids
    """What these are from now on; see `pack_entries`."""


_NOWHERE = Located(0, _NO_IDS, _NO_IDS)


class Changes(NamedTuple):
    """What a sequence's parameters and its grammar change of a row of logits, in this order. Ids are in the vocabulary,
    those of biases and of penalties each once."""

    biased: Ids = _NO_IDS
    bias: Floats = _NO_FLOATS
    """What is added to the biased tokens."""
    counted: Ids = _NO_IDS
    """Tokens that penalties strike, beside those that are listed. Where one is listed too, this is what counts."""
    produced: Floats = _NO_FLOATS
    """How often each of these was produced."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    banned: Ids = _NO_IDS
    """Tokens that must not come."""
    allowed: Words | None = None
    """A bit for each token that may come, the lowest of a word first; None: all."""
    listed: Listed | None = None
    """Tokens that penalties strike; None: there are no penalties, or `counted` has all of them."""
    needed: Ids = _NO_IDS
    """The token behind which each of the banned ones must not come, or ANY; empty: all are ANY."""
    last_row: int | None = None
    """Row of the step before that has chosen the sequence's last token, which then counts as produced once more; None:
    the last token is known."""


class RowInputs(NamedTuple):
    """How the token of a row is chosen; without arguments, the largest logit."""

    temperature: float = 0.0
    """0: the largest logit, without noise."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    least: float = -math.inf
    """Least scaled score that min_p leaves."""
    stream: int = 0
    """Where the noise of the position begins: 0 <= stream < 2**64."""
    num_top: int | None = None
    """Number of likeliest tokens wanted; None: no log probabilities at all."""
    changes: Changes | None = None


class RowTensors(NamedTuple):
    """Inputs of R rows, of which A are changed, M of these by a mask, and L want log probabilities."""

    streams: Tensor
    """int64 [R]: the bits of a uint64."""
    temperatures: Tensor
    """float32 [R]."""
    least_keys: Tensor
    """int32 [R]: bits, without the sign, of the least scaled score that min_p leaves."""
    top_k: Tensor
    """int64 [R]; 0: all."""
    top_p: Tensor
    """float64 [R]; 1 and above: all."""
    sources: Tensor
    """int32 [R]: index among the changed rows; -1: the row is as the model gave it."""
    changed_rows: Tensor
    """int64 [A], ascending."""
    last_rows: Tensor
    """int32 [A]: row of the step before that has chosen the sequence's last token, or KNOWN."""
    bias_places: Tensor
    """int64."""
    bias: Tensor
    """float32, one for each of the places."""
    list_targets: Tensor
    """int64: addresses of entries of lists that change."""
    list_entries: Tensor
    """int64, one for each of the addresses."""
    penalized: Tensor
    """int32 [P], indices among the changed rows."""
    lists: Tensor
    """int64 [P]: address of each list."""
    list_sizes: Tensor
    """int32 [P]: its entries."""
    own_starts: Tensor
    """int32 [P + 1]: where the tokens begin that a row has beside its list."""
    own_ids: Tensor
    """int64: these tokens."""
    own_produced: Tensor
    """float32, one for each of them."""
    penalties: Tensor
    """float32 [P, 3]: of repetition, frequency and presence."""
    banned_places: Tensor
    """int64."""
    needed: Tensor
    """int64, one for each of the places: the last token that bans it, or ANY."""
    mask_rows: Tensor
    """int32 [M], indices among the changed rows."""
    mask_words: Tensor
    """int32 [M, W]: a bit for each token, the lowest first."""
    logprob_rows: Tensor
    """int64 [L], ascending."""


class SamplingInputs(NamedTuple):
    """What a GPU is given to choose the tokens of R rows."""

    tensors: RowTensors
    num_top: int
    """Likeliest tokens of each of the rows that want log probabilities: the most that one of them wants."""
    has_top_k: bool
    has_top_p: bool

    def on(self, device: torch.device) -> "SamplingInputs":
        """The inputs on a device, sent once."""
        return self.sent(Staging(device))

    def sent(self, staging: Staging) -> "SamplingInputs":
        """The inputs on the device of `staging`; nothing waits for the copy."""
        return self._replace(tensors=RowTensors(*staging.send([tensor.numpy() for tensor in self.tensors])))


def can_choose(row: RowInputs, vocab_size: int) -> bool:
    """Whether the GPU chooses this row's token."""
    if row.num_top is not None and row.num_top > MOST_TOP:
        return False
    is_weighed = row.num_top is not None or (row.temperature > 0 and row.top_p < 1)
    return vocab_size < MOST_TOKENS or not is_weighed


def make_sampling_inputs(
    rows: Sequence[RowInputs], vocab_size: int, locate: Callable[[Listed], Located] | None = None
) -> SamplingInputs:
    """The inputs of R rows, on the host. locate: finds the list of a sequence; None: no row has one."""
    is_drawn = [row.temperature > 0 for row in rows]
    top_k = [row.top_k if drawn and row.top_k < vocab_size else 0 for row, drawn in zip(rows, is_drawn, strict=True)]
    top_p = [row.top_p if drawn else 1.0 for row, drawn in zip(rows, is_drawn, strict=True)]
    least = [row.least if drawn else -math.inf for row, drawn in zip(rows, is_drawn, strict=True)]
    changed = [index for index, row in enumerate(rows) if row.changes is not None]
    changes = [row.changes for row in rows if row.changes is not None]
    sources = np.full(len(rows), -1, dtype=np.int32)
    sources[changed] = np.arange(len(changed))
    masked = [(index, own.allowed) for index, own in enumerate(changes) if own.allowed is not None]
    wanted = [index for index, row in enumerate(rows) if row.num_top is not None]
    tensors = RowTensors._make(
        (
            _tensor(np.array([row.stream for row in rows], dtype=np.uint64).view(np.int64)),
            _tensor(np.array([row.temperature for row in rows], dtype=np.float32)),
            _tensor(np.array(least, dtype=np.float32).view(np.int32) & np.int32(EVERY_KEY)),
            _tensor(np.array(top_k, dtype=np.int64)),
            _tensor(np.array(top_p, dtype=np.float64)),
            _tensor(sources),
            _tensor(np.array(changed, dtype=np.int64)),
            _tensor(np.array([KNOWN if own.last_row is None else own.last_row for own in changes], dtype=np.int32)),
            _places([own.biased for own in changes], vocab_size),
            _join([own.bias for own in changes], _NO_FLOATS),
            *_penalty_tensors(changes, locate),
            _places([own.banned for own in changes], vocab_size),
            _join([_needed(own) for own in changes if len(own.banned)], _NO_IDS),
            _tensor(np.array([index for index, _ in masked], dtype=np.int32)),
            _stack([words for _, words in masked], -(-vocab_size // _WORD_BITS)),
            _tensor(np.array(wanted, dtype=np.int64)),
        )
    )
    num_top = min(vocab_size, max((rows[index].num_top or 0 for index in wanted), default=0))
    return SamplingInputs(tensors, num_top, any(top_k), any(share < 1 for share in top_p))


def _needed(changes: Changes) -> Ids:
    return changes.needed if len(changes.needed) else np.full(len(changes.banned), ANY)


def _penalty_tensors(changes: Sequence[Changes], locate: Callable[[Listed], Located] | None) -> list[Tensor]:
    """`RowTensors` from `list_targets` to `penalties`."""
    penalized = [index for index, own in enumerate(changes) if own.listed is not None or len(own.counted)]
    each = [changes[index] for index in penalized]
    located: list[Located] = []
    for own in each:
        assert own.listed is None or locate is not None, "a row has a list, and nobody knows where"
        located.append(_NOWHERE if own.listed is None or locate is None else locate(own.listed))
    sizes = [0 if own.listed is None else own.listed.size for own in each]
    penalties = [[own.repetition, own.frequency, own.presence] for own in each]
    return [
        _join([found.targets for found in located], _NO_IDS),
        _join([found.entries for found in located], _NO_IDS),
        _tensor(np.array(penalized, dtype=np.int32)),
        _tensor(np.array([found.address for found in located], dtype=np.int64)),
        _tensor(np.array(sizes, dtype=np.int32)),
        _tensor(np.cumsum([0, *[len(own.counted) for own in each]], dtype=np.int32)),
        _join([own.counted for own in each], _NO_IDS),
        _join([own.produced for own in each], _NO_FLOATS),
        _tensor(np.array(penalties, dtype=np.float32).reshape(-1, 3)),
    ]


def pack_entries(counted: Counted) -> Ids:
    """A list's entries as a device has them: the id in the lower half of 64 bits, how often it was produced above."""
    return (counted.produced.astype(np.int64) << _COUNT_SHIFT) | counted.ids


def pack_words(is_allowed: NDArray[np.bool_]) -> Words:
    """A bit for each of bool [vocab_size], the lowest of a word first."""
    padding = -len(is_allowed) % _WORD_BITS
    return np.packbits(np.pad(is_allowed, (0, padding)), bitorder="little").view("<u4").astype(np.uint32, copy=False)


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _places(ids: Sequence[Ids], vocab_size: int) -> Tensor:
    parts = [row * vocab_size + own for row, own in enumerate(ids) if len(own)]
    return _tensor(np.concatenate(parts) if parts else _NO_IDS.copy())


def _join(values: Iterable[Values], nothing: Values) -> Tensor:
    parts = [own for own in values if len(own)]
    return _tensor(np.concatenate(parts) if parts else nothing.copy())


def _stack(rows: Sequence[Words], num_words: int) -> Tensor:
    words = np.empty((len(rows), num_words), dtype=np.uint32)
    for own, row in zip(words, rows, strict=True):
        own[:] = row[:num_words]
    return _tensor(words.view(np.int32))
