"""Log probabilities of a prompt's own tokens, from the rows of logits that stand before them.

A row is reduced where it is, on a GPU too: to the log probability of the token that follows, that token's rank, and the
likeliest tokens. What leaves are a few numbers a token, and nothing waits for them before the step ends; a few rows at
a time are worked on, so that little memory is needed beside the logits. Of equal scores the lower id is the likelier
one, but where more tokens equal the last of the likeliest than there is room for, any of these. Nothing here chooses a
token (`sampling`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.wire.frames import PromptLogprobs
from penstock.workers.compute.device import bring as bring_to_host
from penstock.workers.compute.triton.staging import send_once
from penstock.workers.engine.sequence import Chunk

PIECE = 16
"""Rows that are reduced at once."""


class ScoredRows(NamedTuple):
    """Rows of a step that give log probabilities, S of them, chunk by chunk."""

    rows: Tensor
    """int64 [S]: flat index of each row in the step."""
    token_ids: Tensor
    """int64 [S]: token that follows."""
    num_top: int
    """Likeliest tokens that are wanted, at most."""


class Scores(NamedTuple):
    """What S rows of logits say of the tokens behind them; k likeliest tokens each. On the host."""

    logprobs: Tensor
    """float32 [S]; NaN where a logit of the row is."""
    ranks: Tensor
    """int64 [S]: 1 for the likeliest."""
    top_ids: Tensor
    """int64 [S, k], best first."""
    top_logprobs: Tensor
    """float32 [S, k]."""


WaitScores: TypeAlias = Callable[[], Scores]
"""Waits for the device."""


def find_scored(chunks: Sequence[Chunk], query_start: Tensor) -> ScoredRows | None:
    """The rows that the chunks want scored; None for none. query_start: flat index of each chunk's first token."""
    wanted = [(chunk, int(first)) for chunk, first in zip(chunks, query_start, strict=False) if chunk.scored]
    if not wanted:
        return None
    rows = [first + position - chunk.start for chunk, first in wanted for position in chunk.scored]
    token_ids = [chunk.seq.token_ids[position + 1] for chunk, _ in wanted for position in chunk.scored]
    return ScoredRows(torch.tensor(rows), torch.tensor(token_ids), max(_num_top(chunk) for chunk, _ in wanted))


def score_rows(
    logits: Tensor,
    token_ids: Tensor,
    num_top: int,
    bring: Callable[[Tensor], Callable[[], Tensor]] = bring_to_host,
) -> WaitScores:
    """Begin to score rows. logits: float32 [S, vocab_size], anywhere; token_ids: int64 [S], on the host. bring: what
    brings the result to the host. Returns what waits for the scores."""
    [token_ids] = send_once([token_ids.numpy()], logits.device)
    pieces = [
        _score_piece(logits[first : first + PIECE], token_ids[first : first + PIECE], num_top)
        for first in range(0, len(logits), PIECE)
    ]
    wait = bring(torch.cat(pieces))
    return lambda: _unpack(wait())


def give_scores(chunks: Sequence[Chunk], scores: Scores) -> list[int]:
    """Set the `prompt_logprobs` of the chunks that want some. Returns the indices of those whose scores are not
    numbers, and which get none."""
    failed: list[int] = []
    end = 0
    for index, chunk in enumerate(chunks):
        if not chunk.scored:
            continue
        begin, end = end, end + len(chunk.scored)
        part = Scores(*(values[begin:end] for values in scores))
        if part.logprobs.isnan().any():
            failed.append(index)
        else:
            chunk.prompt_logprobs = _pack(part, _num_top(chunk))
    return failed


def _score_piece(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """int64 [S, 2 + 2 * k], of floats the bits, so that all is brought to the host at once."""
    total = logits.logsumexp(dim=1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ranks = 1 + (logits > own).sum(dim=1)
    values, ids = _likeliest(logits, min(num_top, logits.shape[1]))
    return torch.cat((_bits(own - total), ranks[:, None], ids, _bits(values - total)), dim=1)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).long()


def _unpack(found: Tensor) -> Scores:
    num_top = found.shape[1] // 2 - 1
    ids, top = found[:, 2 : 2 + num_top], found[:, 2 + num_top :]
    return Scores(_floats(found[:, 0]), found[:, 1], ids, _floats(top))


def _floats(bits: Tensor) -> Tensor:
    return bits.int().view(torch.float32)


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [S, count] of the largest logits, best first, of equals the lower id."""
    if count == 1:
        return logits.max(dim=1, keepdim=True)
    values, ids = logits.topk(count, dim=1)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _num_top(chunk: Chunk) -> int:
    return max(0, chunk.seq.sampling.prompt_logprobs or 0)


def _pack(scores: Scores, num_top: int) -> PromptLogprobs:
    num_top = min(num_top, scores.top_ids.shape[1])
    return PromptLogprobs(
        num_top,
        _to_bytes(scores.logprobs, "<f4"),
        _to_bytes(scores.ranks, "<u4"),
        _to_bytes(scores.top_ids[:, :num_top], "<u4"),
        _to_bytes(scores.top_logprobs[:, :num_top], "<f4"),
    )


def _to_bytes(values: Tensor, dtype: str) -> bytes:
    return np.ascontiguousarray(values.numpy(), dtype=dtype).tobytes()
