"""The choice of tokens: C ABI of cpp/sampling/sampling.cpp. Shapes and types are checked here, because C can't."""

import ctypes
import math
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Row = NDArray[np.float32]

_P, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_ALIGNMENT = 64
MOST_TOKENS = 1 << 19
"""A vocabulary is smaller; as `truncation` has it."""
_FIELDS = np.dtype(
    [
        ("logits", np.uint64), ("raw", np.uint64), ("ids", np.uint64), ("top_ids", np.uint64), ("stream", np.uint64),
        ("top_p", np.float64), ("top_k", np.int64), ("num_top", np.int64), ("temperature", np.float32),
        ("least", np.float32), ("token", np.int64), ("weight", np.int64), ("raw_best", np.float32),
    ],
    align=True,
)  # fmt: skip
"""`ChoiceRow` of choice_row.hpp."""
_ROW = Struct("@" + "".join(_FIELDS[name].char for name in _FIELDS.names or ()) + "0q")
"""The same, written more quickly where there are few."""


class ChoiceInput(NamedTuple):
    """A row of logits, and how a token is chosen from it."""

    logits: Row
    """float32 [vocab_size], after bias, penalties and masks."""
    raw: Row
    """float32 [vocab_size] as the model gave them: log probabilities are of these."""
    temperature: float
    """0: the largest logit, without noise."""
    top_k: int
    """0: all."""
    top_p: float
    least: float
    """Least scaled score that min_p leaves; -inf without."""
    stream: int
    """Where the noise of the position begins: 0 <= stream < 2**64."""
    num_top: int | None
    """Number of likeliest tokens wanted; None: no log probabilities at all."""


class Draw(NamedTuple):
    """How a token is chosen from logits that nothing changes: as in `ChoiceInput`."""

    temperature: float
    top_k: int
    top_p: float
    least: float
    stream: int

    @property
    def is_cut(self) -> bool:
        """Whether the token is drawn, and not from all; as choice_row.hpp has it."""
        return self.temperature > 0 and not (self.top_k == 0 and self.top_p >= 1 and self.least == -math.inf)


GREEDY = Draw(0.0, 0, 1.0, -math.inf, 0)


class Chosen(NamedTuple):
    """The token of a row, and what its log probabilities are made of."""

    token_id: int
    weight: int = 0
    """Sum of the weights (`truncation.weigh`) of the raw logits, relative to the best."""
    raw_best: float = 0.0
    top_ids: Sequence[int] = ()
    """The likeliest tokens by the raw logits, best first, of equals the lower id."""


class ChoiceKernels:
    """The functions of a loaded library that choose tokens. Only one thread may use it at a time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose, self._bytes = library.penstock_choose_rows, library.penstock_choice_scratch_bytes
        self._choose.restype, self._choose.argtypes = None, [_P, _I64, _I64, _P, _I32]
        self._bytes.restype, self._bytes.argtypes = _I64, [_I64]
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def choose(self, rows: Sequence[ChoiceInput], threads: int) -> list[Chosen | None]:
        """Choose from rows of one vocabulary; None where the scores are not numbers or leave no token."""
        if not rows:
            return []
        vocab_size = len(rows[0].logits)
        assert vocab_size < MOST_TOKENS
        threads = min(threads, len(rows))
        table = np.zeros(len(rows), dtype=_FIELDS)
        tops = [np.empty(min(row.num_top or 0, vocab_size), dtype=np.int64) for row in rows]
        for place, (row, top) in enumerate(zip(rows, tops, strict=True)):
            table[place] = (
                _address(row.logits, vocab_size), _address(row.raw, vocab_size), 0, top.ctypes.data, row.stream,
                row.top_p, row.top_k, -1 if row.num_top is None else len(top), row.temperature, row.least, 0, 0, 0.0,
            )  # fmt: skip
        self._choose(table.ctypes.data, len(rows), vocab_size, self._scratch_for(vocab_size, threads), threads)
        return [
            None if token < 0 else Chosen(token) if row.num_top is None else Chosen(token, weight, best, top.tolist())
            for row, token, weight, best, top in zip(
                rows, table["token"].tolist(), table["weight"].tolist(), table["raw_best"].tolist(), tops, strict=True
            )
        ]

    def _scratch_for(self, vocab_size: int, threads: int) -> int:
        """Address of memory for so many threads, aligned; what was never touched takes no memory."""
        needed = threads * self._bytes(vocab_size) + _ALIGNMENT
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT


def lay_out_draws(draws: Sequence[Draw], ids: int | None = None) -> "array[int]":
    """How a token of each row is chosen: `_FIELDS` as bytes, to be kept while they are used. ids: address of the rows'
    token ids, int64; None: they have all tokens."""
    table = array("B", bytes(len(draws) * _ROW.size))
    for place, (temperature, top_k, top_p, least, stream) in enumerate(draws):
        _ROW.pack_into(
            table, place * _ROW.size, 0, 0, ids or 0, 0, stream, top_p, top_k, -1, temperature, least, 0, 0, 0.0
        )
    return table


def _address(row: Row, vocab_size: int) -> int:
    assert row.dtype == np.float32
    assert row.shape == (vocab_size,)
    assert row.flags.c_contiguous
    return row.ctypes.data
