"""A model small enough to check by eye: KV slots hold running hashes of the history, and a token is a hash of every
slot read.

`HashRunner` reads and writes the slots through the block table, as a real runner does, and poisons what nobody holds;
`answer` gives the same tokens without blocks, batches or chunks. Any mix-up of blocks, any KV of another tenant, any
slot read before it is written shows as a wrong token.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import count

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import PromptLogprobs, SamplingParams, TokenLogprobs, pack_token_ids
from penstock.workers.engine.beams import BeamSearch
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence, Step

VOCAB = 40
EOS = 3
Proposal = Callable[[Sequence, int], list[int]]
_PRIME = 2**31 - 1
_numbers = count()


def _root_state(tenant: str) -> int:
    return sum(tenant.encode()) + 1


def _next_state(state: int, token_id: int) -> int:
    return (state * 48271 + token_id + 1) % _PRIME


def _choose(slots: Seq[int], seed: int) -> int:
    return sum(slot * (2 * place + 3) for place, slot in enumerate(slots, seed)) % _PRIME % VOCAB


def answer(
    prompt: Seq[int], sampling: SamplingParams, tenant: str = "", max_len: int = 10**9, eos: Seq[int] = (EOS,)
) -> list[int]:
    """What comes out when a sequence runs alone."""
    state, slots, output = _root_state(tenant), list[int](), list[int]()
    pending = list(prompt)
    while len(output) < sampling.max_tokens and len(prompt) + len(output) < max_len:
        for token_id in pending:
            state = _next_state(state, token_id)
            slots.append(state)
        pending = [_choose(slots, sampling.seed)]
        output += pending
        if (pending[0] in eos and not sampling.ignore_eos) or pending[0] in sampling.stop_token_ids:
            break
    return output


def scores(prompt: Seq[int], sampling: SamplingParams, tenant: str = "") -> list[float]:
    """What the tokens of a prompt behind its first are scored with, when it is computed alone."""
    state, slots, found = _root_state(tenant), list[int](), list[float]()
    for token_id in prompt[:-1]:
        state = _next_state(state, token_id)
        slots.append(state)
        found.append(float(-_choose(slots, sampling.seed)))
    return found


def likeliest(slots: Seq[int], count: int) -> TokenLogprobs:
    """The likeliest tokens behind a history, for searches."""
    state = _choose(slots, 1) + sum(slots) % 1009
    scored = [(-(((state + 1) * (token_id + 7) * 48271) % 977) / 100, token_id) for token_id in range(VOCAB)]
    best = sorted(scored, key=lambda each: (-each[0], each[1]))[:count]
    return TokenLogprobs(best[0][0], tuple((token_id, logprob) for logprob, token_id in best))


def search(prompt: Seq[int], sampling: SamplingParams, tenant: str = "") -> list[list[int]]:
    """What a beam search finds when it runs alone, without blocks."""
    found = BeamSearch(sampling, frozenset({EOS}))
    histories = [list(prompt)]
    while True:
        rows = []
        for history in histories:
            state, slots = _root_state(tenant), list[int]()
            for token_id in history:
                state = _next_state(state, token_id)
                slots.append(state)
            rows.append(likeliest(slots, found.num_candidates))
        going = found.advance(rows)
        if not going:
            return [beam.token_ids for beam in found.best()]
        histories = [[*histories[each.beam], each.token_id] for each in going]


class HashRunner:
    eos_token_ids = frozenset({EOS})
    is_asynchronous = False
    stairs = None

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int = 10**6, drafter: Proposal | None = None
    ) -> None:
        """drafter: guesses for a sequence, at most so many."""
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self._block_size = block_size
        self._slots: list[int | None] = [None] * (num_blocks * block_size)
        self.forgotten: list[Sequence] = []
        self.num_computed = 0
        self.num_scored: list[int] = []
        """Tokens of prompts scored in each chunk."""
        self.drafter = drafter or (lambda seq, count: [])

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        for source, target in step.copies:
            for place in range(self._block_size):
                copied = self._slots[source * self._block_size + place]
                self._slots[target * self._block_size + place] = copied
        sampled = self.compute(step)
        return lambda: sampled

    def can_run_ahead(self, step: Step) -> bool:
        return False

    def compute(self, step: Step) -> list[list[Sampled]]:
        return [self._compute(chunk) for chunk in step.chunks]

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)

    def poison(self, pool: BlockPool) -> None:
        for block in pool.garbage():
            self._slots[block * self._block_size : (block + 1) * self._block_size] = [None] * self._block_size

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _compute(self, chunk: Chunk) -> list[Sampled]:
        seq = chunk.seq
        draft = self.drafter(seq, chunk.max_drafts) if chunk.max_drafts else []
        assert len(draft) <= chunk.max_drafts
        assert len(seq.block_table) * self._block_size >= chunk.end + chunk.max_drafts
        chunk.draft = draft
        self.num_computed += chunk.num_tokens
        for position in range(chunk.start, len(seq.block_table) * self._block_size):
            self._slots[self._slot(seq, position)] = None
        state = self._read(seq, chunk.start - 1) if chunk.start else _root_state(seq.tenant)
        for position, token_id in enumerate([*seq.token_ids[chunk.start : chunk.end], *draft], chunk.start):
            state = _next_state(state, token_id)
            self._slots[self._slot(seq, position)] = state
        if chunk.scored:
            chunk.prompt_logprobs = self._score(chunk)
            self.num_scored.append(len(chunk.scored))
        if not chunk.is_sampled:
            return []
        if seq.sampling.num_beams:
            slots = [self._read(seq, position) for position in range(chunk.end)]
            return [Sampled(0, likeliest(slots, seq.sampling.logprobs or 0))]
        return [
            Sampled(_choose([self._read(seq, position) for position in range(end)], seq.sampling.seed))
            for end in range(chunk.end, chunk.end + len(draft) + 1)
        ]

    def _score(self, chunk: Chunk) -> PromptLogprobs:
        seq = chunk.seq
        found = [
            float(-_choose([self._read(seq, position) for position in range(place + 1)], seq.sampling.seed))
            for place in chunk.scored
        ]
        return PromptLogprobs(0, array("f", found).tobytes(), pack_token_ids([1] * len(found)))

    def _read(self, seq: Sequence, position: int) -> int:
        slot = self._slots[self._slot(seq, position)]
        assert slot is not None, f"position {position} of {seq.request_id} is read from a slot that holds nothing"
        return slot


def make_sequence(
    hasher: ChainHasher,
    prompt: Seq[int],
    sampling: SamplingParams,
    *,
    output: Seq[int] = (),
    tenant: str = "",
    deadline: float | None = None,
    has_keys: bool = True,
) -> Sequence:
    """A sequence as a replica makes it from a Submit. output: the tokens that a resumed one comes with."""
    token_ids = [*prompt, *output]
    root = hasher.add_salt(hasher.root("hash-model"), tenant.encode())
    keys = hasher.extend(root, token_ids) if has_keys else []
    return Sequence(
        f"r{next(_numbers)}",
        token_ids,
        sampling,
        len(prompt),
        keys,
        keys[-1] if keys else root,
        arrival_s=0.0,
        deadline=deadline,
        tenant=tenant,
    )
