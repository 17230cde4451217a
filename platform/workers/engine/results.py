"""What a computed step makes of a sequence: tokens accepted behind its draft, blocks published, the end it comes to.
Pure; no torch, no clock.

Only tokens that the target chose enter `token_ids`, and only blocks whose KV is computed are published. Whether the
sequence still runs, and who gets what it held, is the scheduler's.
"""

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, TokenLogprobs
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.draft_lengths import DraftLengths
from penstock.workers.engine.sequence import Chunk, Sampled, SeqOutput, Sequence


class Results:
    """Takes over what was computed, a sequence at a time."""

    def __init__(
        self, pool: BlockPool, hasher: ChainHasher, drafts: DraftLengths, eos_token_ids: frozenset[int], max_len: int
    ) -> None:
        """max_len: longest sequence, prompt and output, in tokens."""
        self._pool = pool
        self._hasher = hasher
        self._drafts = drafts
        self._block_size = pool.block_size
        self._eos_token_ids = eos_token_ids
        self._max_len = max_len

    def accept(self, chunk: Chunk, choices: list[Sampled]) -> SeqOutput:
        """Append what was chosen, for as long as the draft it was computed behind is what was chosen before."""
        seq, draft = chunk.seq, chunk.draft or ()
        taken: list[int] = []
        logprobs: list[TokenLogprobs] | None = None
        finish = None
        for choice in choices:
            if choice.error is not None:
                named = "" if seq.adapter is None or choice.is_at_fault else f" It runs with the adapter {seq.adapter}."
                seq.error, finish = choice.error + named, Finish.INVALID if choice.is_at_fault else Finish.ERROR
                break
            place, token_id = len(taken), choice.token_id
            seq.token_ids.append(token_id)
            taken.append(token_id)
            if choice.logprobs is not None:
                logprobs = [choice.logprobs] if logprobs is None else [*logprobs, choice.logprobs]
            finish = Finish.STOP if choice.is_last else self._finish_of(seq, token_id)
            if finish is not None or place == len(draft) or draft[place] != token_id:
                break
        if draft or chunk.num_rounds or (chunk.num_matched and chunk.max_drafts):
            num_accepted = sum(token_id == proposed for token_id, proposed in zip(taken, draft, strict=False))
            # where the sequence ends inside the draft, nobody knows what would have become of the rest
            is_cut = finish is not None and num_accepted == len(taken)
            num_drafted = num_accepted if is_cut else len(draft)
            if chunk.num_matched:
                num_looked_up = num_drafted if is_cut else chunk.max_drafts
                self._drafts.record_look_up(chunk.num_matched, num_looked_up, num_drafted, num_accepted)
            else:
                self._drafts.record(seq, num_drafted, num_accepted, chunk.num_rounds)
        return SeqOutput(seq, taken, logprobs, finish)

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks that only a rejected draft needed."""
        needed = -(-len(seq.token_ids) // self._block_size)
        self._pool.free(seq.block_table[needed:])
        del seq.block_table[needed:]

    def publish(self, seq: Sequence) -> None:
        """Offer the blocks that have become full; keys the router did not send are made here."""
        size = self._block_size
        num_full = seq.num_computed_tokens // size
        if num_full <= seq.num_published_blocks:
            return
        if len(seq.block_keys) < num_full:
            keys = self._hasher.extend(seq.chain_key, seq.token_ids[len(seq.block_keys) * size : num_full * size])
            seq.block_keys += keys
            seq.chain_key = keys[-1]
        for index in range(seq.num_published_blocks, num_full):
            self._pool.publish(seq.block_table[index], seq.block_keys[index])
        seq.num_published_blocks = num_full

    def _finish_of(self, seq: Sequence, token_id: int) -> Finish | None:
        sampling = seq.sampling
        if token_id in sampling.stop_token_ids or (token_id in self._eos_token_ids and not sampling.ignore_eos):
            return Finish.STOP
        return Finish.LENGTH if self.is_longest(seq) else None

    def is_longest(self, seq: Sequence) -> bool:
        """Whether the sequence may have no further token."""
        return seq.num_output_tokens >= seq.sampling.max_tokens or len(seq.token_ids) >= self._max_len
