"""Consecutive deltas of one sequence as one. Pure.

Invariant: whoever reads the merged delta learns what a reader of each of them would, but for when each came.
"""

from collections.abc import Sequence
from itertools import chain

import msgspec

from penstock.router.routing.request import TextDelta
from penstock.wire.frames import Delta


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one sequence as one."""
    first, last = deltas[0], deltas[-1]
    logprobs = (
        None
        if all(delta.logprobs is None for delta in deltas)
        else list(chain.from_iterable(delta.logprobs or () for delta in deltas))
    )
    if isinstance(last, TextDelta):
        return _merge_text(last, [delta for delta in deltas if isinstance(delta, TextDelta)])
    return Delta(
        sid=first.sid,
        token_ids=list(chain.from_iterable(delta.token_ids for delta in deltas)),
        finish=last.finish,
        num_cached_tokens=first.num_cached_tokens,
        logprobs=logprobs,
        error=last.error,
        timing=next((delta.timing for delta in reversed(deltas) if delta.timing is not None), None),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        beams=last.beams,
        num_beam_tokens=last.num_beam_tokens,
        step_s=last.step_s,
    )


def _merge_text(last: TextDelta, deltas: Sequence[TextDelta]) -> TextDelta:
    return msgspec.structs.replace(
        last,
        text="".join([delta.text for delta in deltas]),
        num_tokens=sum(delta.num_tokens for delta in deltas),
        calls=tuple(chain.from_iterable(delta.calls for delta in deltas)),
    )
