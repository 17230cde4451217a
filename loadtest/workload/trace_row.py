"""One request of a trace, first as it was recorded, then as it is replayed; and what keeps a trace's time from running
backwards."""

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock_loadtest.scenario import Trace

MAX_DISORDER_S: Final = 1.0
"""Recorders that write a request when it ends, or round, swap neighbours; more than this is a damaged file."""

UNSHARED: Final = 1 << 63
"""Ids from here on name blocks that no other request has. Published ids are smaller."""


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a trace. hash_ids: one for every block of `block_tokens` that the prompt fills or begins, None where
    the trace has none; equal leading ids are a shared prefix."""

    at_s: float  # as read: in the trace's own time; replayed: after the replay's start
    prompt_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] | None = None
    block_tokens: int = 512
    session: str | None = None
    turn: int = 0  # of the session, from 0
    model: str | None = None  # that the trace names
    client: str | None = None  # that the trace names


class MonotonicTimes:
    """Keeps times from running backwards: a row up to MAX_DISORDER_S early leaves with the row before it."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(self, at_s: float) -> float:
        """The time at which the row leaves. ValueError, with a sentence, for a row earlier than that."""
        if at_s < self._last_s - MAX_DISORDER_S:
            raise ValueError(f"the time runs back by {self._last_s - at_s:g} s")
        self._last_s = max(self._last_s, at_s)
        return self._last_s


def complete_ids(hash_ids: Sequence[int], prompt_tokens: int, block_tokens: int, row: int) -> Sequence[int]:
    """hash_ids with an id for every block; blocks that the trace has not hashed (a tail that fills none) get ids of
    this row alone.

    ValueError, with a sentence, when there are more ids than blocks.
    """
    blocks = -(-prompt_tokens // block_tokens)
    if len(hash_ids) > blocks:
        raise ValueError(
            f"{len(hash_ids)} hash_ids where {prompt_tokens} tokens fill {blocks} blocks of {block_tokens}"
        )
    first = UNSHARED + (row << 20)
    return hash_ids if len(hash_ids) == blocks else [*hash_ids, *range(first + len(hash_ids), first + blocks)]


def fit_to_replay(row: TraceRow, trace: Trace) -> TraceRow:
    """The row at its time and with its lengths in the replay.

    With hash_ids every block but the last becomes round(block_tokens * token_scale) tokens, so that blocks begin where
    they begin in every other prompt: the prompt is then up to half a token a block longer or shorter than its scaled
    length.
    """
    scale = trace.token_scale
    block_tokens = _scale(row.block_tokens, scale)
    if row.hash_ids is None:
        prompt_tokens = _scale(row.prompt_tokens, scale)
    else:
        whole = len(row.hash_ids) - 1
        prompt_tokens = whole * block_tokens + min(
            block_tokens, _scale(row.prompt_tokens - whole * row.block_tokens, scale)
        )
    prompt_tokens = min(prompt_tokens, trace.max_prompt_tokens or prompt_tokens)
    output_tokens = _scale(row.output_tokens, scale)
    return TraceRow(
        at_s=(row.at_s - trace.start_s) * trace.time_scale,
        prompt_tokens=prompt_tokens,
        output_tokens=min(output_tokens, trace.max_output_tokens or output_tokens),
        hash_ids=None if row.hash_ids is None else row.hash_ids[: -(-prompt_tokens // block_tokens)],
        block_tokens=block_tokens,
        session=row.session,
        turn=row.turn,
        model=row.model,
        client=row.client,
    )


def _scale(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
