"""A step that failed, computed again in parts, so that only the sequences that can't be computed end. Pure.

Halving finds one bad row among n in about 2 log2(n) steps, of about 2n rows in all. Nothing has been committed of a
step that failed, so each part begins where the step began: it writes the same KV slots again, and chooses the tokens
that the step would have chosen: with `exact` a row's token does not depend on its batch, else but for roundings.
"""

from collections.abc import Callable
from functools import partial

from penstock.wire.frames import SamplingParams
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence, Step

ROW_FAILED = "This sequence could not be computed: a step fails with it, and not without it."
"""What the request of a bad row is told."""

RunStep = Callable[[Step], list[list[Sampled]] | None]
"""Runs a step: what was chosen for each chunk, or None if the step fails."""


def run_apart(step: Step, run: RunStep) -> list[list[Sampled]]:
    """What was chosen for each chunk of a step that has failed; an error for those that fail alone too.

    The parts have no drafts, nor are they seen by the drafter: what failed may have been that, or a draft's rows.
    """
    for chunk in step.chunks:
        chunk.draft, chunk.num_matched = None, 0  # nor is anything learned of them
    chunks = [Chunk(chunk.seq, chunk.start, chunk.num_tokens, is_observed=False) for chunk in step.chunks]
    run_part = partial(_run_with_copies, step.copies, run)
    sampled = _run_part(chunks, run_part) if len(chunks) == 1 else _run_halves(chunks, run_part)
    for chunk, part in zip(step.chunks, chunks, strict=True):
        chunk.prompt_logprobs = part.prompt_logprobs
    return sampled


def _run_with_copies(copies: list[tuple[int, int]], run: RunStep, step: Step) -> list[list[Sampled]] | None:
    """Run a part with the copies that its own chunks begin with: what they have written is written again."""
    held = {block for chunk in step.chunks for block in chunk.seq.block_table}
    return run(Step(step.chunks, [], [copy for copy in copies if copy[1] in held]))


def _run_part(chunks: list[Chunk], run: RunStep) -> list[list[Sampled]]:
    sampled = run(Step(chunks, []))
    if sampled is not None:
        return sampled
    return [[Sampled(0, error=ROW_FAILED)]] if len(chunks) == 1 else _run_halves(chunks, run)


def _run_halves(chunks: list[Chunk], run: RunStep) -> list[list[Sampled]]:
    middle = len(chunks) // 2
    return _run_part(chunks[:middle], run) + _run_part(chunks[middle:], run)


def can_compute(block: int, run: RunStep, forget: Callable[[Sequence], None]) -> bool:
    """Whether a step of one token can be computed. block: its KV is written over. forget: drops what the runner keeps
    of a sequence."""
    seq = Sequence("check", [0], SamplingParams(max_tokens=1, temperature=0.0), 1, [], b"", 0.0, block_table=[block])
    sampled = run(Step([Chunk(seq, 0, 1)], []))
    forget(seq)
    return sampled is not None
