"""A scheduler with its pool and a runner that shows every mix-up, and drafters for it."""

import random
from dataclasses import dataclass, field

from penstock.perf.model import step_time_s
from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import SamplingParams, StepCosts
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import NO_COSTS, Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence, Status, Step
from tests.unit.workers.paged_hash import VOCAB, HashRunner, Proposal, answer, make_sequence

MAX_STEPS = 3000


@dataclass
class Bench:
    """A scheduler, its pool and a runner that shows every mix-up."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_batched_tokens: int = 32
    max_model_len: int = 10**6
    drafter: Proposal | None = None
    max_draft_tokens: int = 4
    costs: StepCosts = NO_COSTS
    admission_lookahead: int | None = None
    is_head: bool = False
    """Whether the drafter counts as a draft head."""
    now: float = 0.0
    """Begin of the next step; each takes what `costs` say."""
    live: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        speculation = SpeculationConfig(
            method="ngram" if self.drafter else "none", max_draft_tokens=self.max_draft_tokens
        )
        if self.is_head:
            speculation = SpeculationConfig(method="head", head="tiny", max_draft_tokens=self.max_draft_tokens)
        config = EngineConfig(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            speculation=speculation,
            admission_lookahead=self.admission_lookahead,
        )
        self.hasher = ChainHasher(bytes(16), self.block_size)
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.runner = HashRunner(self.num_blocks, self.block_size, self.max_model_len, self.drafter)
        self.scheduler = Scheduler(self.pool, self.hasher, config, self.max_model_len, self.runner.eos_token_ids)

    def sequence(self, prompt: list[int], max_tokens: int = 4, **options: object) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        seq = make_sequence(self.hasher, prompt, sampling, **options)  # type: ignore[arg-type]
        seq.weight = 1.0
        return seq

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            assert self.scheduler.add(seq), seq.error

    def step(self) -> Step:
        """Schedule, run, commit, and everything that must hold after it."""
        step = self.scheduler.schedule(self.costs, self.now)
        assert step.num_tokens <= self.max_batched_tokens
        assert len(step.chunks) <= self.max_num_seqs
        assert all(chunk.seq.status is Status.RUNNING and chunk.num_tokens > 0 for chunk in step.chunks)
        assert len({chunk.seq for chunk in step.chunks}) == len(step.chunks)
        self.runner.poison(self.pool)
        sampled = self.runner.launch(step)()
        self.now += step_s(self.costs, step)
        self.scheduler.commit(step, sampled)
        self.pool.check(self.scheduler.sequences())
        for seq in self.scheduler.running:
            assert seq.num_computed_tokens < seq.num_tokens
            assert len(seq.block_table) * self.block_size < seq.num_tokens + self.block_size, (
                "blocks of a rejected draft are still held"
            )
        return step

    def drain(self) -> int:
        """Steps until all is done; then nothing is held."""
        num_steps = 0
        while self.scheduler.has_work:
            assert self.step().chunks, "there is work and the step is empty"
            num_steps += 1
            assert num_steps < MAX_STEPS, "a sequence starves"
        assert self.pool.num_free == self.pool.num_blocks
        self.pool.check([])
        return num_steps


def step_s(costs: StepCosts, step: Step) -> float:
    """Seconds of a step by the model."""
    shape = step.shape
    return step_time_s(
        costs,
        rows=shape.rows,
        prefill_tokens=shape.prefill_tokens,
        query_context=shape.query_context,
        kv_tokens=shape.kv_tokens,
        draft_tokens=shape.draft_tokens,
        draft_rounds=shape.draft_rounds,
        sampled_rows=shape.sampled_rows,
    )


def make_output(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens :]


def expected(seq: Sequence, max_len: int = 10**9) -> list[int]:
    return answer(seq.token_ids[: seq.num_prompt_tokens], seq.sampling, seq.tenant, max_len)


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * place) % 40 for place in range(length)]


def oracle(seq: Sequence, count: int) -> list[int]:
    """What the sequence is going to say."""
    num_output = seq.num_output_tokens
    return expected(seq)[num_output : num_output + count]


def adversary(seq: Sequence, count: int) -> list[int]:
    """Anything, the end of the sequence among it."""
    rng = random.Random(seq.num_tokens)
    return rng.choices(range(VOCAB), k=rng.randint(0, count))


def half_right(seq: Sequence, count: int) -> list[int]:
    rng = random.Random(seq.num_tokens)
    return [token_id if rng.random() < 0.6 else rng.randrange(VOCAB) for token_id in oracle(seq, rng.randint(0, count))]


def ngram() -> Proposal:
    drafter = NgramDrafter()
    return lambda seq, count: drafter.propose([Chunk(seq, seq.num_tokens - 1, 1, count)])[0]


DRAFTERS = {
    "none": lambda: None,
    "ngram": ngram,
    "adversary": lambda: adversary,
    "half right": lambda: half_right,
    "oracle": lambda: oracle,
}


def of_tenant(bench: Bench, tenant: str, prompt: list[int], weight: float = 1.0) -> Sequence:
    seq = bench.sequence(prompt)
    seq.tenant, seq.weight = tenant, weight
    return seq
