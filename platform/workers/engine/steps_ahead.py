"""Steps that count as computed before they have ended, so that the next one can be scheduled and launched behind them.
Pure.

Each row of such a step has a token more, which nobody knows yet but the device: it stands in `Sequence.token_ids` as
-1 - row, until the step is committed or what was assumed of it is taken back. Nothing is published and no sequence ends
by an assumption. Not what a device makes of it (`Runner.can_run_ahead`).

Decisions: docs/decisions/engine.md
"""

from collections.abc import Iterable

from penstock.workers.engine.sequence import Chunk, Sequence, Step


def are_independent(step: Step) -> bool:
    """Whether each token that a step chooses decides nothing but its own sequence's next token or end."""
    return all(_is_plain(chunk) for chunk in step.chunks)


def _is_plain(chunk: Chunk) -> bool:
    """Whether all that a chunk brings is the next token of a sequence without grammar, drafts, search and scores."""
    seq = chunk.seq
    is_single = seq.leader is None and seq.search is None and seq.grammar is None
    has_drafts = bool(chunk.max_drafts or seq.prediction)
    return is_single and not has_drafts and not seq.lacks_scores and seq.sampling.max_tokens > 0


def assume(step: Step) -> None:
    """Count a step that is under way as computed. Sequences that have ended since it was launched are passed over."""
    row = 0
    for chunk in step.chunks:
        seq = chunk.seq
        # one that has ended without a token has fewer than when the step was launched
        is_sampled = chunk.end >= len(seq.token_ids)
        if seq.finish is None:
            chunk.is_assumed = True
            seq.num_computed_tokens = chunk.end
            if is_sampled:
                chunk.row = row
                seq.token_ids.append(-1 - row)
        row += is_sampled


def retract(step: Step, preempted: Iterable[Sequence]) -> Step:
    """Take back what was assumed of a step that has failed. Returns what of it is to be computed again. preempted:
    sequences that have lost their blocks since."""
    gone = set(preempted)
    chunks: list[Chunk] = []
    for chunk in step.chunks:
        seq = chunk.seq
        if seq.finish is None and chunk.is_assumed:
            chunk.is_assumed = False
            if chunk.row is not None:
                chunk.row = None
                del seq.token_ids[chunk.end :]
            if seq not in gone:
                seq.num_computed_tokens = chunk.start
                chunks.append(chunk)
    return Step(chunks, [])
