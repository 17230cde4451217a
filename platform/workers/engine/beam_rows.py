"""The rows of a beam search: one sequence for each beam, and the blocks that they hold together. Pure; no torch.

Beams that go on from the same one hold its blocks together, the prompt's among them, so nothing is copied when they go
apart. A beam that is about to write to a block which others hold gets a copy of it before; the last one that holds it
writes to the block itself. The beams' sequences live for a step each, and only the one that leads them is known to the
scheduler's lists.
"""

from collections import Counter

from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.engine.beams import BeamSearch, Continuation
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.sequence import Sampled, SeqOutput, Sequence


def find_refusal(seq: Sequence, max_rows: int, pool: BlockPool) -> str | None:
    """Why a search could not run even alone, where it never has to take blocks from itself. Returns None if it can."""
    params, size = seq.sampling, pool.block_size
    if not params.num_beams:
        return None
    if params.num_beams > max_rows:
        return f"A search of {params.num_beams} beams needs as many rows, and this replica has {max_rows}."
    num_blocks = -(-seq.num_tokens // size) + params.num_beams * (1 + -(-params.max_tokens // size))
    if num_blocks > pool.num_blocks:
        return (
            f"A search of {params.num_beams} beams may need {num_blocks} blocks, and this replica has"
            f" {pool.num_blocks}."
        )
    return None


def begin_search(seq: Sequence, eos_token_ids: frozenset[int]) -> None:
    """Make a sequence the leader of a search, if its parameters want one: its rows then tell the likeliest tokens."""
    params = seq.sampling
    if not params.num_beams or seq.search is not None:
        return
    seq.search = BeamSearch(params, eos_token_ids)
    seq.sampling = SamplingParams(
        params.max_tokens,
        temperature=0.0,
        logprobs=seq.search.num_candidates,
        prompt_logprobs=params.prompt_logprobs,
        num_beams=params.num_beams,
    )


def num_lacking_blocks(leader: Sequence, pool: BlockPool) -> int:
    """Blocks that the beams need for their next tokens. The last of those that hold one together may write to it."""
    places = [(beam.block_table, beam.num_computed_tokens // pool.block_size) for beam in leader.beams]
    written = Counter(table[place] for table, place in places if place < len(table))
    num_new = sum(place == len(table) for table, place in places)
    return num_new + sum(min(count, pool.num_holders(block) - 1) for block, count in written.items())


def take_blocks(leader: Sequence, pool: BlockPool) -> list[tuple[int, int]]:
    """Give each beam a block for its next token that no other one holds; so many must be free. Returns what is to be
    copied: blocks, and where to."""
    copies: list[tuple[int, int]] = []
    for beam in leader.beams:
        table, place = beam.block_table, beam.num_computed_tokens // pool.block_size
        if place == len(table):
            table += pool.allocate(1)
        elif pool.num_holders(table[place]) > 1:
            [copy] = pool.allocate(1)
            copies.append((table[place], copy))
            pool.free([table[place]])
            table[place] = copy
    return copies


def advance(leader: Sequence, rows: list[Sampled], pool: BlockPool) -> SeqOutput:
    """Take the search a token further: its beams, if that was the last one, else what was computed so far. rows: what
    was computed for each beam, or at first behind the prompt."""
    assert leader.search is not None
    error = next((row.error for row in rows if row.error is not None), None)
    if error is not None:
        leader.error = error
        return SeqOutput(leader, [], finish=Finish.ERROR)
    going = leader.search.advance([row.logprobs for row in rows if row.logprobs is not None])
    computed = leader.search.num_computed_tokens
    if going:
        _fork(leader, going, pool)
        return SeqOutput(leader, [], num_beam_tokens=computed)
    beams = leader.search.best()
    return SeqOutput(leader, [], finish=beams[0].finish, beams=beams, num_beam_tokens=computed)


def _fork(leader: Sequence, going: list[Continuation], pool: BlockPool) -> None:
    parents = leader.beams or [leader]
    beams: list[Sequence] = []
    for each in going:
        parent = parents[each.beam]
        pool.take(parent.block_table)
        token_ids = [*parent.token_ids, each.token_id]
        beams.append(leader.make_beam(token_ids, parent.num_tokens, [*parent.block_table]))
    for parent in parents:
        pool.free(parent.block_table)
    leader.block_table, leader.beams = [], beams
