"""Records as columns of numbers: what summaries, series over time and plots are computed from.

One pass over the records; memory is numbers only, about 12 bytes a chunk and 100 a request. A value that a record lacks
is NaN.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from penstock_loadtest.results.records import Outcome, Record, TokenCount

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
SOURCES: tuple[TokenCount, ...] = get_args(TokenCount)
LABELS = ("tenant", "kind", "model", "endpoint", "tier", "replica")
"""What requests are grouped by: fields of a record."""

_NAN = float("nan")
_NUMBERS = ("intended_s", "sent_s", "first_s", "end_s", "tpot_s", "prompt_tokens", "cached_tokens", "tokens")


class ErrorKey(NamedTuple):
    """Errors that count as the same."""

    outcome: Outcome
    status: int | None
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Label:
    """The entry of `names` that each request has: `names[codes[i]]`; None in `names`: the requests without."""

    names: list[str | None]
    codes: Ints


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A row per request, in the records' order; chunks of all requests end to end, request i's from `starts[i]` to
    `starts[i + 1]`."""

    intended_s: Floats
    sent_s: Floats
    first_s: Floats
    end_s: Floats
    tpot_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    tokens: Ints
    outcome: Ints  # place in OUTCOMES
    source: Ints  # place in SOURCES
    is_whole: Mask
    labels: dict[str, Label]
    chunk_s: Floats
    chunk_tokens: Ints
    starts: Ints
    errors: Counter[ErrorKey]
    warmup: int  # requests that were left out

    def __len__(self) -> int:
        return len(self.intended_s)

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.intended_s

    @property
    def lateness_s(self) -> Floats:
        return self.sent_s - self.intended_s

    @property
    def e2e_s(self) -> Floats:
        """Seconds from intended time to end of finished requests; NaN for the others."""
        return np.where(self.is_outcome("finished"), self.end_s - self.intended_s, _NAN)

    def is_outcome(self, outcome: Outcome) -> Mask:
        mask: Mask = self.outcome == OUTCOMES.index(outcome)
        return mask

    @property
    def streamed_chunk_tokens(self) -> Ints:
        """Tokens of each chunk but those of whole answers, which say nothing about time between tokens."""
        return self.chunk_tokens[np.repeat(~self.is_whole, np.diff(self.starts))]

    def chunk_gaps_s(self) -> Floats:
        """Time between successive chunks with tokens of the same request."""
        if len(self.chunk_s) < 2:
            return np.empty(0)
        within = np.ones(len(self.chunk_s) - 1, dtype=np.bool_)
        borders = self.starts[1:-1] - 1
        within[borders[(borders >= 0) & (borders < len(within))]] = False
        gaps: Floats = np.diff(self.chunk_s)[within]
        return gaps


def read_columns(records: Iterable[Record], *, warmup_s: float = 0.0) -> Columns:
    """The columns of the records but those intended before `warmup_s`."""
    numbers = {name: array("d") for name in _NUMBERS}
    outcome, source, is_whole = array("b"), array("b"), array("b")
    chunk_s, chunk_tokens, starts = array("d"), array("i"), array("q", [0])
    names: dict[str, dict[str | None, int]] = {label: {} for label in LABELS}
    codes = {label: array("i") for label in LABELS}
    errors: Counter[ErrorKey] = Counter()
    warmup = 0
    for record in records:
        if record.intended_s < warmup_s:
            warmup += 1
            continue
        for name, column in numbers.items():
            value = getattr(record, name)
            column.append(_NAN if value is None else value)
        outcome.append(OUTCOMES.index(record.outcome))
        source.append(SOURCES.index(record.tokens_from))
        is_whole.append(record.is_whole)
        chunk_s.extend(record.chunk_s)
        chunk_tokens.extend(record.chunk_tokens)
        starts.append(len(chunk_s))
        for label, code_of in names.items():
            codes[label].append(code_of.setdefault(getattr(record, label), len(code_of)))
        if record.error is not None:
            errors[ErrorKey(record.outcome, record.status, record.error)] += 1
    floats = {
        name: np.frombuffer(column, dtype=np.float64) if column else np.empty(0) for name, column in numbers.items()
    }
    return Columns(
        **{name: floats[name] for name in _NUMBERS if name != "tokens"},
        tokens=floats["tokens"].astype(np.int64),
        outcome=_ints(outcome),
        source=_ints(source),
        is_whole=_ints(is_whole).astype(np.bool_),
        labels={label: Label(names=list(code_of), codes=_ints(codes[label])) for label, code_of in names.items()},
        chunk_s=np.frombuffer(chunk_s, dtype=np.float64) if chunk_s else np.empty(0),
        chunk_tokens=_ints(chunk_tokens),
        starts=_ints(starts),
        errors=errors,
        warmup=warmup,
    )


class Sample:
    """Values in order, with exact quantiles; `zeros` more are zero (token gaps inside chunks) and take no memory."""

    def __init__(self, values: Floats, zeros: int = 0) -> None:
        self._sorted = np.sort(values[~np.isnan(values)])
        self._zeros = zeros

    def __len__(self) -> int:
        return len(self._sorted) + self._zeros

    def quantiles(self, shares: Floats) -> Floats:
        """Quantiles, linear between the two nearest values as numpy's default; the sample must not be empty."""
        rank = shares * (len(self) - 1)
        low = np.floor(rank).astype(np.int64)
        high = np.minimum(low + 1, len(self) - 1)
        return self._at(low) + (self._at(high) - self._at(low)) * (rank - low)

    def _at(self, rank: Ints) -> Floats:
        if not len(self._sorted):
            return np.zeros(len(rank))
        return np.where(rank < self._zeros, 0.0, self._sorted[np.maximum(rank - self._zeros, 0)])

    @property
    def mean(self) -> float:
        return float(self._sorted.sum()) / len(self)

    @property
    def max(self) -> float:
        return float(self._sorted[-1]) if len(self._sorted) else 0.0


def measure_token_gaps(columns: Columns) -> Sample:
    """Time between successive tokens of a request: between chunks as they came, inside a chunk zero."""
    inside = int(np.maximum(columns.streamed_chunk_tokens - 1, 0).sum())
    return Sample(columns.chunk_gaps_s(), zeros=inside)


def _ints(values: "array[int]") -> Ints:
    return np.array(values, dtype=np.int64)
