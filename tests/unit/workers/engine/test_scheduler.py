import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, SamplingParams, StepCosts, TokenLogprobs
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import BATCH_PROMPT_S, MAX_BYPASSES, MAX_PARTIAL, NO_COSTS, Scheduler
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence, Status, Step
from tests.unit.workers.paged_hash import EOS, VOCAB, HashRunner, Proposal, answer, make_sequence

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
    live: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        speculation = SpeculationConfig(
            method="ngram" if self.drafter else "none", max_draft_tokens=self.max_draft_tokens
        )
        config = EngineConfig(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            speculation=speculation,
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
        step = self.scheduler.schedule(self.costs)
        assert step.num_tokens <= self.max_batched_tokens
        assert len(step.chunks) <= self.max_num_seqs
        assert all(chunk.seq.status is Status.RUNNING and chunk.num_tokens > 0 for chunk in step.chunks)
        assert len({chunk.seq for chunk in step.chunks}) == len(step.chunks)
        self.runner.poison(self.pool)
        self.scheduler.commit(step, self.runner.launch(step)())
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


def make_output(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens :]


def expected(seq: Sequence, max_len: int = 10**9) -> list[int]:
    return answer(seq.token_ids[: seq.num_prompt_tokens], seq.sampling, seq.tenant, max_len)


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * place) % 40 for place in range(length)]


def test_sequences_in_one_batch_say_what_they_say_alone() -> None:
    bench = Bench()
    sequences = [bench.sequence(prompt_of(length, first=length), max_tokens=9) for length in (1, 3, 4, 5, 17)]
    bench.add(*sequences)
    bench.drain()

    assert [make_output(seq) for seq in sequences] == [expected(seq) for seq in sequences]
    assert {seq.finish for seq in sequences} == {Finish.LENGTH}


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    bench = Bench(max_batched_tokens=8)
    short, long = bench.sequence(prompt_of(2), max_tokens=20), bench.sequence(prompt_of(30, first=1))
    bench.add(short)
    bench.step()
    bench.add(long)

    assert [chunk.num_tokens for chunk in bench.step().chunks] == [1, 7]
    assert [chunk.num_tokens for chunk in bench.step().chunks] == [1, 7]
    bench.drain()
    assert make_output(long) == expected(long)


def test_a_prefill_leaves_room_for_the_decoding_rows_behind_it() -> None:
    bench = Bench(max_batched_tokens=8)
    long, short = bench.sequence(prompt_of(40)), bench.sequence(prompt_of(2, first=1), max_tokens=9)
    bench.add(short)
    bench.step()
    bench.add(long)
    bench.step()
    bench.scheduler.running.reverse()  # now the prefill comes first

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(long, 7), (short, 1)]
    bench.drain()


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = Bench()
    bench.add(bench.sequence(prompt_of(18)))
    bench.drain()
    follower = bench.sequence([*prompt_of(16), 1, 2, 3])
    bench.add(follower)
    step = bench.step()

    assert (step.chunks[0].start, step.chunks[0].num_tokens) == (16, 3)
    assert follower.num_cached_tokens == 16
    bench.drain()
    assert make_output(follower) == expected(follower)


def test_the_last_token_is_computed_even_if_all_blocks_are_cached() -> None:
    bench = Bench()
    bench.add(bench.sequence(prompt_of(16)))
    bench.drain()
    again = bench.sequence(prompt_of(16))
    bench.add(again)
    bench.drain()

    assert again.num_cached_tokens == 12
    assert make_output(again) == expected(again)


def test_another_tenant_does_not_hit_the_same_prompt() -> None:
    bench = Bench()
    bench.add(bench.sequence(prompt_of(16), tenant="a"))
    bench.drain()
    other = bench.sequence(prompt_of(16), tenant="b")
    bench.add(other)
    bench.drain()

    assert other.num_cached_tokens == 0
    assert make_output(other) == expected(other)


def test_generated_blocks_are_cached_under_the_keys_a_gateway_makes() -> None:
    bench = Bench()
    first = bench.sequence(prompt_of(6), max_tokens=10)
    bench.add(first)
    bench.drain()
    second_turn = bench.sequence([*first.token_ids, 5, 6])
    bench.add(second_turn)
    bench.step()

    assert second_turn.num_cached_tokens == 12  # the KV of the last of 16 tokens was never computed
    bench.drain()
    assert make_output(second_turn) == expected(second_turn)


def test_a_sequence_without_keys_gets_those_of_its_chain() -> None:
    bench = Bench()
    bare = bench.sequence(prompt_of(9), has_keys=False)
    bench.add(bare)
    bench.drain()

    assert bare.block_keys == bench.sequence(bare.token_ids[:12]).block_keys
    assert bare.chain_key == bare.block_keys[-1]


def test_blocks_are_published_only_when_their_kv_is_written() -> None:
    bench = Bench(max_batched_tokens=8)
    seq = bench.sequence(prompt_of(20))
    bench.add(seq)
    step = bench.scheduler.schedule()

    assert bench.pool.cached_keys() == []
    bench.scheduler.commit(step, bench.runner.launch(step)())
    assert bench.pool.cached_keys() == seq.block_keys[:2]


def test_two_sequences_with_one_prompt_compute_it_once() -> None:
    bench = Bench()
    twins = [bench.sequence(prompt_of(17)) for _ in range(3)]
    bench.add(*twins)

    assert [chunk.seq for chunk in bench.step().chunks] == twins[:1]
    assert [chunk.num_tokens for chunk in bench.step().chunks] == [1, 1, 1]
    assert [seq.num_cached_tokens for seq in twins] == [0, 16, 16]
    bench.drain()
    assert [make_output(seq) for seq in twins] == [expected(seq) for seq in twins]


def test_a_sequence_that_waits_for_a_prefix_does_not_hold_up_others() -> None:
    bench = Bench()
    first, twin, other = (
        bench.sequence(prompt_of(17)),
        bench.sequence(prompt_of(17)),
        bench.sequence(prompt_of(9, first=1)),
    )
    bench.add(first, twin, other)

    assert [chunk.seq for chunk in bench.step().chunks] == [first, other]
    assert list(bench.scheduler.waiting) == [twin]
    bench.drain()


def test_sequences_that_wait_for_a_prefix_keep_their_order() -> None:
    bench = Bench()
    first, second, third, fourth = (bench.sequence(prompt_of(17)) for _ in range(4))
    bench.add(first, second, third, fourth)
    bench.step()

    assert list(bench.scheduler.waiting) == [second, third, fourth]
    bench.drain()


def test_a_sequence_stops_waiting_for_a_prefix_whose_owner_is_gone() -> None:
    bench = Bench(max_batched_tokens=8)
    first, twin = bench.sequence(prompt_of(30)), bench.sequence(prompt_of(30))
    bench.add(first, twin)
    bench.step()
    bench.scheduler.finish(first, Finish.ABORT)

    assert [chunk.seq for chunk in bench.step().chunks] == [twin]
    bench.drain()
    assert make_output(twin) == expected(twin)


def test_the_newest_sequence_gives_way_and_starts_over() -> None:
    bench = Bench(num_blocks=6)
    old, new = bench.sequence(prompt_of(8), max_tokens=14), bench.sequence(prompt_of(8, first=1), max_tokens=8)
    bench.add(old, new)
    steps = []
    while not new.num_preemptions:
        steps.append(bench.step())

    assert steps[-1].preempted == [new]
    assert new.block_table == []
    assert list(bench.scheduler.waiting) == [new]
    bench.drain()
    assert [make_output(seq) for seq in (old, new)] == [expected(old), expected(new)]
    assert old.num_preemptions == 0


def test_a_preempted_sequence_goes_ahead_of_those_that_never_ran() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2)
    old, new, later = (bench.sequence(prompt_of(8, first=first), max_tokens=12) for first in range(3))
    bench.add(old, new, later)
    while not new.num_preemptions:
        bench.step()

    assert list(bench.scheduler.waiting) == [new, later]
    assert new.num_cached_tokens == 0
    bench.drain()
    assert new.num_cached_tokens == 0  # of its first admission


def test_a_resumed_sequence_goes_on_where_it_was() -> None:
    bench = Bench()
    whole = bench.sequence(prompt_of(10), max_tokens=12)
    rest = bench.sequence(prompt_of(10), max_tokens=12, output=expected(whole)[:7])
    bench.add(rest)
    bench.drain()

    assert make_output(rest) == expected(whole)


def test_a_resumed_sequence_counts_only_prompt_tokens_as_cached() -> None:
    bench = Bench()
    whole = bench.sequence(prompt_of(6), max_tokens=12)
    bench.add(whole)
    bench.drain()
    rest = bench.sequence(prompt_of(6), max_tokens=20, output=make_output(whole))
    bench.add(rest)
    bench.drain()

    assert rest.num_cached_tokens == 6


def test_a_resumed_sequence_that_has_all_its_tokens_ends_at_once() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(4), max_tokens=2, output=[1, 2])

    assert not bench.scheduler.add(seq)
    assert (seq.finish, seq.error) == (Finish.LENGTH, None)


@pytest.mark.parametrize(
    ("bench", "length", "sentence"),
    [
        (
            Bench(num_blocks=2),
            8,
            "The sequence has 8 tokens; this replica holds at most 8, and one must be left for output.",
        ),
        (
            Bench(max_model_len=8),
            9,
            "The sequence has 9 tokens; this replica holds at most 8, and one must be left for output.",
        ),
        (Bench(), 0, "The sequence has no tokens."),
    ],
)
def test_a_sequence_that_can_never_fit_is_refused_with_a_sentence(bench: Bench, length: int, sentence: str) -> None:
    seq = bench.sequence(prompt_of(length))

    assert not bench.scheduler.add(seq)
    assert (seq.finish, seq.error) == (Finish.REFUSED, sentence)
    assert not bench.scheduler.has_work


def test_more_keys_than_full_blocks_are_refused() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(11))
    seq.block_keys.append(bytes(16))

    assert not bench.scheduler.add(seq)
    assert seq.error == "The sequence came with 3 block keys and has only 2 full blocks of 4 tokens."


def test_a_sequence_ends_when_its_context_is_full() -> None:
    bench = Bench(num_blocks=3)
    seq = bench.sequence(prompt_of(7), max_tokens=100)
    bench.add(seq)
    bench.drain()

    assert (seq.finish, seq.num_tokens) == (Finish.LENGTH, 12)
    assert make_output(seq) == expected(seq, max_len=12)


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (SamplingParams(max_tokens=500), Finish.STOP),
        (SamplingParams(max_tokens=20, ignore_eos=True), Finish.LENGTH),
        (SamplingParams(max_tokens=500, ignore_eos=True, stop_token_ids=(EOS,)), Finish.STOP),
    ],
)
def test_a_sequence_ends_at_a_stop_token_or_at_its_length(sampling: SamplingParams, finish: Finish) -> None:
    bench = Bench(num_blocks=200)
    seq = make_sequence(bench.hasher, prompt_of(5), sampling)
    bench.add(seq)
    bench.drain()

    assert seq.finish is finish
    assert make_output(seq) == expected(seq)
    assert (make_output(seq)[-1] == EOS) is (finish is Finish.STOP)


def test_a_finished_sequence_can_not_be_finished_again() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(5))
    bench.add(seq)
    bench.step()
    bench.scheduler.finish(seq, Finish.ABORT)
    bench.scheduler.finish(seq, Finish.ERROR, "late")

    assert (seq.finish, seq.error) == (Finish.ABORT, None)
    bench.drain()


def test_a_chunk_that_samples_nothing_has_no_output() -> None:
    bench = Bench(max_batched_tokens=8)
    seq = bench.sequence(prompt_of(12))
    bench.add(seq)
    first = bench.scheduler.schedule()

    assert bench.scheduler.commit(first, [[]]) == []
    second = bench.scheduler.schedule()
    (output,) = bench.scheduler.commit(second, [[Sampled(9)]])
    assert (output.seq, output.token_ids, output.logprobs, output.finish) == (seq, [9], None, None)


# drafts


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


def test_a_draft_that_is_right_is_taken_over_with_one_token_more() -> None:
    bench = Bench(drafter=oracle)
    seq = bench.sequence(prompt_of(5), max_tokens=20)
    bench.add(seq)
    bench.step()
    (chunk,) = bench.step().chunks

    assert (chunk.num_tokens, chunk.max_drafts) == (1, 4)
    assert seq.num_output_tokens == 1 + 5
    assert seq.num_computed_tokens == seq.num_tokens - 1
    assert bench.drain() == 3
    assert make_output(seq) == expected(seq)
    assert bench.scheduler.drafts is not None
    assert bench.scheduler.drafts.num_drafted == bench.scheduler.drafts.num_accepted == 4 + 4 + 4 + 3


def test_a_draft_counts_up_to_its_first_wrong_token() -> None:
    def wrong_from_the_third(seq: Sequence, count: int) -> list[int]:
        first, second, third, *_ = oracle(seq, count)
        return [first, second, (third + 1) % VOCAB, third]

    bench = Bench(drafter=wrong_from_the_third)
    seq = bench.sequence(prompt_of(5), max_tokens=20)
    bench.add(seq)
    bench.step()
    bench.step()

    assert make_output(seq) == expected(seq)[: 1 + 3]
    assert bench.scheduler.drafts is not None
    assert (bench.scheduler.drafts.num_drafted, bench.scheduler.drafts.num_accepted) == (4, 2)


def test_a_block_that_a_rejected_draft_filled_is_not_published_and_not_kept() -> None:
    bench = Bench(drafter=lambda seq, count: [(token_id + 1) % VOCAB for token_id in oracle(seq, count)])
    seq = bench.sequence(prompt_of(7), max_tokens=9)
    bench.add(seq)
    bench.step()  # 8 tokens known, 7 computed
    step = bench.scheduler.schedule()

    assert len(seq.block_table) == 3
    bench.scheduler.commit(step, bench.runner.launch(step)())
    assert len(bench.pool.cached_keys()) == 2
    assert len(seq.block_table) == 3  # the 9th token will be computed there
    step = bench.scheduler.schedule()
    assert len(seq.block_table) == 4
    bench.scheduler.commit(step, bench.runner.launch(step)())
    assert len(seq.block_table) == 3
    assert len(bench.pool.cached_keys()) == 2
    bench.drain()
    follower = bench.sequence([*seq.token_ids, 1])
    bench.add(follower)
    bench.drain()
    assert follower.num_cached_tokens == 12
    assert make_output(follower) == expected(follower)


@pytest.mark.parametrize("method", ["oracle", "half right", "adversary"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=500),
        SamplingParams(max_tokens=500, ignore_eos=True, stop_token_ids=(EOS,)),
        SamplingParams(max_tokens=7),
    ],
)
def test_a_stop_token_or_the_last_token_within_a_draft_ends_the_sequence_there(
    method: str, sampling: SamplingParams
) -> None:
    for first in range(10):
        bench = Bench(num_blocks=200, drafter=DRAFTERS[method]())
        seq = make_sequence(bench.hasher, prompt_of(5, first), sampling)
        bench.add(seq)
        bench.drain()

        assert make_output(seq) == expected(seq)


def test_an_error_behind_an_accepted_draft_ends_the_sequence_after_what_was_chosen() -> None:
    bench = Bench(drafter=oracle)
    seq = bench.sequence(prompt_of(6), max_tokens=20)
    bench.add(seq)
    bench.step()
    step = bench.scheduler.schedule()
    ((first, second, *_),) = bench.runner.launch(step)()
    (output,) = bench.scheduler.commit(step, [[first, second, Sampled(0, error="no choice")]])

    assert (output.token_ids, output.finish, seq.error) == (expected(seq)[1:3], Finish.ERROR, "no choice")
    assert bench.pool.cached_keys() == []  # nothing that it computed is trusted
    bench.drain()


def test_logprobs_stay_beside_their_tokens() -> None:
    bench = Bench(drafter=oracle)
    seq = bench.sequence(prompt_of(6), max_tokens=20)
    bench.add(seq)
    bench.step()
    step = bench.scheduler.schedule()
    (choices,) = bench.runner.launch(step)()
    (output,) = bench.scheduler.commit(
        step, [[Sampled(choice.token_id, TokenLogprobs(-float(place))) for place, choice in enumerate(choices[:4])]]
    )

    assert output.token_ids == expected(seq)[1:5]
    assert output.logprobs == [TokenLogprobs(-float(place)) for place in range(4)]
    bench.drain()


def test_drafts_take_what_prefill_and_waiting_sequences_leave() -> None:
    bench = Bench(max_batched_tokens=16, drafter=oracle)
    short, long = bench.sequence(prompt_of(3), max_tokens=30), bench.sequence(prompt_of(29, first=1))
    bench.add(short)
    bench.step()
    bench.add(long)

    assert [(chunk.num_tokens, chunk.max_drafts) for chunk in bench.step().chunks] == [(1, 0), (15, 0)]
    assert [(chunk.num_tokens, chunk.max_drafts) for chunk in bench.step().chunks] == [(1, 1), (14, 0)]
    bench.drain()


def test_nobody_is_preempted_for_a_draft() -> None:
    bench = Bench(num_blocks=6, drafter=oracle)
    old, new = bench.sequence(prompt_of(9), max_tokens=4), bench.sequence(prompt_of(9, first=1), max_tokens=4)
    bench.add(old, new)
    bench.step()
    step = bench.step()

    assert [chunk.max_drafts for chunk in step.chunks] == [2, 2]
    bench.drain()
    assert old.num_preemptions == new.num_preemptions == 0
    assert make_output(new) == expected(new)


def test_drafts_that_do_not_pay_are_not_made() -> None:
    bench = Bench(
        drafter=lambda seq, count: [(token_id + 1) % VOCAB for token_id in oracle(seq, count)], max_draft_tokens=2
    )
    costs = StepCosts(base_s=0.010, draft_token_s=0.002)
    seq = bench.sequence(prompt_of(6), max_tokens=200)
    bench.add(seq)
    steps = []
    while bench.scheduler.has_work:
        steps.append(bench.scheduler.schedule(costs))
        bench.scheduler.commit(steps[-1], bench.runner.launch(steps[-1])())

    assert steps[1].chunks[0].max_drafts == 2
    assert sum(step.chunks[0].max_drafts for step in steps[-100:]) <= 10  # it tries again now and then
    assert make_output(seq) == expected(seq)


# shares of the budget, places and blocks


def test_a_long_prompt_leaves_half_of_the_budget_to_others_and_takes_what_they_leave() -> None:
    bench = Bench(max_batched_tokens=16)
    long = bench.sequence(prompt_of(100), max_tokens=1)
    bench.add(long)
    alone = bench.step()
    short, another = bench.sequence(prompt_of(6, first=1)), bench.sequence(prompt_of(30, first=2))
    bench.add(short)
    beside_short = bench.step()
    bench.add(another)
    beside_another = bench.step()

    assert [(chunk.seq, chunk.num_tokens) for chunk in alone.chunks] == [(long, 16)]
    assert [(chunk.seq, chunk.num_tokens) for chunk in beside_short.chunks] == [(long, 10), (short, 6)]
    assert [(chunk.seq, chunk.num_tokens) for chunk in beside_another.chunks] == [(long, 8), (short, 1), (another, 7)]
    bench.drain()
    assert [make_output(seq) for seq in (long, short, another)] == [expected(seq) for seq in (long, short, another)]


def test_a_prompt_alone_is_computed_in_as_few_steps_as_the_budget_allows() -> None:
    bench = Bench(max_batched_tokens=16)
    bench.add(bench.sequence(prompt_of(100), max_tokens=1))

    assert bench.drain() == 7


def test_few_prompts_are_computed_in_part_at_once_and_short_ones_go_past_those_that_wait() -> None:
    bench = Bench(max_batched_tokens=16, num_blocks=200)
    longs = [bench.sequence(prompt_of(60, first=first)) for first in range(4)]
    short = bench.sequence(prompt_of(2, first=9))
    bench.add(*longs, short)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [
        (longs[0], 10),
        (longs[1], 4),
        (short, 2),
    ]
    finished = []
    while bench.scheduler.has_work:
        assert sum(seq.num_uncomputed_tokens > 1 for seq in bench.scheduler.running) <= MAX_PARTIAL
        finished += [chunk.seq for chunk in bench.step().chunks if chunk.seq.finish]
    assert [seq for seq in finished if seq is not short] == longs


def of_tenant(bench: Bench, tenant: str, prompt: list[int], weight: float = 1.0) -> Sequence:
    seq = bench.sequence(prompt)
    seq.tenant, seq.weight = tenant, weight
    return seq


def test_tenants_divide_the_budget_and_a_short_prompt_gets_all_it_lacks_beside_many_long_ones() -> None:
    bench = Bench(max_batched_tokens=40, num_blocks=400, max_num_seqs=16)
    longs = [of_tenant(bench, "flooder", prompt_of(60, first=first)) for first in range(8)]
    bench.add(*longs)
    bench.step()
    short = of_tenant(bench, "light", prompt_of(18, first=20))
    bench.add(short)
    beside = {id(chunk.seq): chunk.num_tokens for chunk in bench.step().chunks}

    assert beside[id(short)] == 18
    assert sum(beside.values()) == 40
    bench.drain()
    assert [make_output(seq) for seq in (*longs, short)] == [expected(seq) for seq in (*longs, short)]


def test_long_prompts_of_two_tenants_get_the_budget_by_their_weights() -> None:
    bench = Bench(max_batched_tokens=40, num_blocks=400, max_num_seqs=16)
    heavy, light = of_tenant(bench, "heavy", prompt_of(200), 3.0), of_tenant(bench, "light", prompt_of(200, first=7))
    bench.add(heavy, light)

    for _ in range(4):
        assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(heavy, 30), (light, 10)]


def test_the_long_prompts_of_one_tenant_keep_nobody_elses_from_being_admitted() -> None:
    bench = Bench(max_batched_tokens=40, num_blocks=400, max_num_seqs=16)
    bench.add(*(of_tenant(bench, "flooder", prompt_of(100, first=first)) for first in range(5)))
    bench.step()
    other = of_tenant(bench, "other", prompt_of(100, first=20))
    bench.add(other)

    assert other in [chunk.seq for chunk in bench.step().chunks]


def test_a_sequence_whose_blocks_are_not_free_is_overtaken_a_bounded_number_of_times() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=8)
    holder, big = bench.sequence(prompt_of(20), max_tokens=20), bench.sequence(prompt_of(30, first=1))
    bench.add(holder)
    bench.step()
    bench.add(big)
    smalls: list[Sequence] = []
    num_before: list[int] = []
    while big.status is Status.WAITING:
        num_before.append(sum(seq.finish is not None for seq in smalls))
        smalls.append(bench.sequence(prompt_of(2, first=len(smalls)), max_tokens=1))
        bench.add(smalls[-1])
        bench.step()
    bench.drain()

    assert num_before[-1] == MAX_BYPASSES
    assert make_output(big) == expected(big)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_no_stream_of_small_ones_starves_a_big_one(lengths: list[int], seed: int) -> None:
    bench = Bench(num_blocks=12, max_num_seqs=6, max_batched_tokens=12)
    chosen = random.Random(seed)
    big = bench.sequence(prompt_of(40, first=1), max_tokens=3)
    others: list[Sequence] = []
    num_steps = 0
    while big.finish is None:
        while len(bench.scheduler.waiting) < 4:
            others.append(bench.sequence(prompt_of(chosen.choice(lengths), first=len(others)), max_tokens=3))
            bench.add(others[-1])
            if len(others) == 3:
                bench.add(big)
        bench.step()
        num_steps += 1
        assert num_steps < 200, "it starves"
    bench.drain()

    assert [make_output(seq) for seq in others] == [expected(seq) for seq in others]


def test_batch_rows_wait_behind_others_and_lose_their_places_and_blocks_to_them() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=2)
    batch = [bench.sequence(prompt_of(8, first=first), max_tokens=9) for first in range(3)]
    for seq in batch:
        seq.is_batch, seq.weight = True, 0.1
    bench.add(*batch)
    assert [chunk.seq for chunk in bench.step().chunks] == batch[:2]
    urgent = bench.sequence(prompt_of(30, first=5), max_tokens=2)
    bench.add(urgent)
    step = bench.step()

    assert (step.preempted, [chunk.seq for chunk in step.chunks]) == ([batch[1]], [urgent, batch[0]])
    assert bench.scheduler.running == [urgent, batch[0]]
    assert list(bench.scheduler.waiting) == [batch[1], batch[2]]
    bench.drain()
    assert [make_output(seq) for seq in (*batch, urgent)] == [expected(seq) for seq in (*batch, urgent)]


def test_what_a_running_sequence_holds_of_its_prompt_counts_when_batch_rows_are_to_make_room() -> None:
    bench = Bench(num_blocks=9, max_batched_tokens=64)
    holds, batch = bench.sequence(prompt_of(24), max_tokens=12), bench.sequence(prompt_of(7, first=1), max_tokens=5)
    batch.is_batch, batch.weight = True, 0.1
    bench.add(holds, batch)
    bench.step()
    urgent = bench.sequence(prompt_of(31), max_tokens=1)  # 8 blocks, of which 6 are held
    bench.add(urgent)

    step = bench.step()

    assert (step.preempted, [chunk.seq for chunk in step.chunks]) == ([batch], [holds, urgent])
    bench.drain()
    assert [make_output(seq) for seq in (holds, batch, urgent)] == [expected(seq) for seq in (holds, batch, urgent)]


def test_batch_rows_are_not_preempted_where_that_gives_no_room() -> None:
    """What they hold of the prompt has to be held all the same."""
    bench = Bench(num_blocks=8, max_batched_tokens=64)
    other, batch = bench.sequence(prompt_of(15, first=1), max_tokens=9), bench.sequence(prompt_of(8), max_tokens=4)
    batch.is_batch = True
    bench.add(other, batch)
    bench.step()
    urgent = bench.sequence(prompt_of(17), max_tokens=1)  # 5 blocks; 1 is free, 3 are of the batch row, 2 both's
    bench.add(urgent)

    assert not bench.step().preempted
    bench.drain()
    assert [make_output(seq) for seq in (other, batch, urgent)] == [expected(seq) for seq in (other, batch, urgent)]


def test_prompts_of_the_class_batch_in_part_keep_no_other_prompt_waiting() -> None:
    bench = Bench(max_batched_tokens=16)
    batch = [bench.sequence(prompt_of(60, first=first)) for first in range(MAX_PARTIAL)]
    for seq in batch:
        seq.is_batch = True
    bench.add(*batch)
    bench.step()
    urgent = bench.sequence(prompt_of(40, first=9))
    bench.add(urgent)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [
        (batch[0], 1),
        (batch[1], 1),
        (urgent, 14),
    ]
    bench.drain()


def test_prompts_of_the_class_batch_take_little_of_a_step_beside_others_and_all_of_it_alone() -> None:
    bench = Bench(max_batched_tokens=64, costs=StepCosts(base_s=0.01, prefill_token_s=BATCH_PROMPT_S / 10))
    other = bench.sequence(prompt_of(4), max_tokens=4)
    batch = [bench.sequence(prompt_of(40, first=first), max_tokens=1) for first in range(1, 4)]
    for seq in batch:
        seq.is_batch = True
    bench.add(other)
    bench.step()
    bench.add(*batch)
    beside = [[chunk.num_tokens for chunk in bench.step().chunks] for _ in range(2)]
    bench.step()
    assert other.finish is not None
    left = sum(seq.num_uncomputed_tokens for seq in batch)

    assert [chunks[0] for chunks in beside] == [1, 1]
    assert all(10 <= sum(chunks[1:]) <= 10 + len(batch) for chunks in beside)
    assert sum(chunk.num_tokens for chunk in bench.step().chunks) == min(64, left)
    bench.drain()
    assert [make_output(seq) for seq in (other, *batch)] == [expected(seq) for seq in (other, *batch)]


def test_a_prompt_of_another_class_shares_its_step_with_little_of_batch_prompts() -> None:
    bench = Bench(max_batched_tokens=64, costs=StepCosts(base_s=0.01, prefill_token_s=BATCH_PROMPT_S / 10))
    urgent, batch = bench.sequence(prompt_of(20)), bench.sequence(prompt_of(40, first=1))
    batch.is_batch = True
    bench.add(urgent, batch)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(urgent, 20), (batch, 10)]
    bench.drain()


def test_nobody_waits_for_a_prefix_that_a_batch_row_computes_but_batch_rows() -> None:
    """A published prefix is computed for all tenants, and batch rows proceed slowly while others are there."""
    bench = Bench(max_batched_tokens=16)
    batch, urgent, late = (bench.sequence(prompt_of(40)) for _ in range(3))
    batch.is_batch = late.is_batch = True
    bench.add(batch)
    bench.step()
    bench.add(urgent, late)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(batch, 1), (urgent, 15)]
    bench.drain()
    assert [make_output(seq) for seq in (batch, urgent, late)] == [expected(seq) for seq in (batch, urgent, late)]


def test_a_batch_row_is_preempted_before_a_newer_one_of_another_class() -> None:
    bench = Bench(num_blocks=6)
    batch, first, second = (bench.sequence(prompt_of(7, first=number), max_tokens=14) for number in range(3))
    batch.is_batch = True
    bench.add(batch)
    bench.step()
    bench.add(first, second)
    bench.drain()

    assert batch.num_preemptions > 0
    assert first.num_preemptions == 0
    assert [make_output(seq) for seq in (batch, first, second)] == [expected(seq) for seq in (batch, first, second)]


def test_a_batch_prompt_takes_what_the_others_leave_of_the_budget() -> None:
    bench = Bench(max_batched_tokens=16)
    batch, urgent = bench.sequence(prompt_of(60)), bench.sequence(prompt_of(40, first=1))
    batch.is_batch = True
    bench.add(batch)
    bench.step()
    bench.add(urgent)

    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(batch, 1), (urgent, 15)]
    assert [(chunk.seq, chunk.num_tokens) for chunk in bench.step().chunks] == [(urgent, 16)]
    bench.drain()


def test_batch_rows_of_a_gateway_that_knows_no_weights_all_give_way() -> None:
    bench = Bench(max_num_seqs=2)
    batch = [bench.sequence(prompt_of(8, first=first), max_tokens=9) for first in range(2)]
    urgent = [bench.sequence(prompt_of(8, first=first), max_tokens=2) for first in range(5, 7)]
    for seq in (*batch, *urgent):
        seq.weight = 0.0
    for seq in batch:
        seq.is_batch = True
    bench.add(*batch)
    bench.step()
    bench.add(*urgent)

    assert bench.step().preempted == batch[::-1]
    bench.drain()


@pytest.mark.parametrize("max_num_seqs", [22, 1])
def test_batch_rows_give_way_and_do_not_starve_under_a_load_that_never_ends(max_num_seqs: int) -> None:
    bench = Bench(num_blocks=400, max_num_seqs=max_num_seqs, max_batched_tokens=64)
    batch = [bench.sequence(prompt_of(6, first=first), max_tokens=10, tenant="night") for first in range(4)]
    for seq in batch:
        seq.is_batch, seq.weight = True, 0.1
    bench.add(*batch)
    rows = []
    for number in range(150 if max_num_seqs > 1 else 600):
        while len(bench.scheduler.waiting) < 8:
            bench.add(bench.sequence(prompt_of(6, first=number % 30), max_tokens=10, tenant="day"))
        rows.append(sum(chunk.seq.tenant == "night" for chunk in bench.step().chunks))

    assert all(seq.finish is Finish.LENGTH for seq in batch)
    assert sum(rows[20:]) < 0.2 * max_num_seqs * len(rows), "the others have the most of the rows"


def test_rows_of_many_batch_tenants_give_way_too() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=6, max_batched_tokens=64)
    batch = [bench.sequence(prompt_of(6, first=first), max_tokens=10, tenant=f"night {first}") for first in range(6)]
    for number, seq in enumerate(batch):
        seq.is_batch, seq.weight, seq.arrival_s = True, 0.1, float(number)
    bench.add(*batch)
    bench.step()
    urgent = [bench.sequence(prompt_of(6, first=first), max_tokens=10, tenant="day") for first in range(10, 15)]
    bench.add(*urgent)

    assert {chunk.seq for chunk in bench.step().chunks} == {batch[0], *urgent}
    bench.drain()


# rows of tenants


def test_a_row_of_a_flood_gives_way_in_the_next_step_and_goes_on_where_it_was() -> None:
    bench = Bench(max_num_seqs=4)
    flood = [bench.sequence(prompt_of(9, first=first), max_tokens=12, tenant="flood") for first in range(7)]
    bench.add(*flood)
    bench.step()
    light = bench.sequence(prompt_of(5, first=20), max_tokens=3, tenant="light")
    bench.add(light)
    step = bench.step()

    assert step.preempted == [flood[3]]
    assert {chunk.seq for chunk in step.chunks} == {*flood[:3], light}
    assert list(bench.scheduler.waiting) == flood[3:]
    bench.drain()
    assert [make_output(seq) for seq in (*flood, light)] == [expected(seq) for seq in (*flood, light)]
    assert max(seq.num_preemptions for seq in flood) == 1


def test_rows_of_tenants_settle_by_weight_and_none_is_taken_back() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=14, max_batched_tokens=64)
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    for tenant, weight in weights.items():
        for number in range(20):
            seq = bench.sequence(prompt_of(4, first=number), max_tokens=40, tenant=tenant)
            seq.weight = weight
            bench.add(seq)
    counts = []
    for _ in range(20):
        step = bench.step()
        counts.append({tenant: sum(chunk.seq.tenant == tenant for chunk in step.chunks) for tenant in weights})

    rows = counts[-1]
    assert counts[0] == {"one": 14, "two": 0, "four": 0}, "the first to come have all"
    assert all(rows[v] / weights[v] <= (rows[w] + 1) / weights[w] for v in weights for w in weights if v != w)
    assert all(each == rows for each in counts[5:]), "nobody takes rows back and forth"


def test_the_newest_rows_of_a_flood_give_the_blocks_that_a_light_tenant_lacks() -> None:
    bench = Bench(num_blocks=12)
    flood = [bench.sequence(prompt_of(11, first=first), max_tokens=2, tenant="flood") for first in range(4)]
    for number, seq in enumerate(flood):
        seq.arrival_s = -float(number)
    bench.add(*flood)
    bench.step()
    light = bench.sequence(prompt_of(12, first=20), max_tokens=1, tenant="light")
    bench.add(light)
    step = bench.step()

    assert step.preempted == [flood[0]], "the newest by its arrival, not by its place"
    assert light in {chunk.seq for chunk in step.chunks}
    bench.drain()


def test_no_row_gives_way_where_all_that_may_are_not_enough() -> None:
    bench = Bench(num_blocks=12)
    stem = prompt_of(16, first=3)
    flood = [bench.sequence([*stem, first], max_tokens=6, tenant="flood") for first in range(4)]
    bench.add(*flood)
    while any(seq.num_computed_tokens < 17 for seq in flood):
        bench.step()
    light = bench.sequence(prompt_of(40, first=20), max_tokens=1, tenant="light")
    bench.add(light)

    assert bench.step().preempted == [], "the stem is shared, so three rows of it would free three blocks"
    bench.drain()
    assert make_output(light) == expected(light)


# invariants 2 and 3 over random schedules


class Job(NamedTuple):
    prompt: list[int]
    max_tokens: int
    tenant: str
    num_output: int
    """Output tokens that a resumed sequence comes with; 0 for a new one."""
    seed: int
    has_keys: bool
    num_steps: int
    """Steps between this job's arrival and the next one's."""
    aborts: int | None
    """Index of the job that is aborted when this one arrives."""
    is_batch: bool
    weight: float


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often begin alike."""
    stem = prompt_of(24, first=draw(st.integers(0, 1)))
    return [
        *stem[: draw(st.sampled_from([8, 16, 3, 24, 0]))],
        *draw(st.lists(st.integers(0, 39), min_size=1, max_size=6)),
    ]


jobs = st.builds(
    Job,
    prompt=prompts(),
    max_tokens=st.sampled_from([24, 12, 3, 1]),
    tenant=st.sampled_from(["a", "a", "b", "c"]),
    num_output=st.sampled_from([0, 0, 1, 5]),
    seed=st.integers(0, 1),
    has_keys=st.sampled_from([True, True, False]),
    num_steps=st.sampled_from([0, 0, 1, 2, 9]),
    aborts=st.one_of(st.none(), st.none(), st.integers(0, 9)),
    is_batch=st.booleans(),
    weight=st.sampled_from([1.0, 1.0, 0.0, 2.0]),
)


def submit(bench: Bench, job: Job) -> Sequence:
    sampling = SamplingParams(max_tokens=job.max_tokens, seed=job.seed)
    output = answer(job.prompt, sampling, job.tenant, bench.scheduler.max_len)[: job.num_output]
    if EOS in output or len(output) == job.max_tokens:
        output = []
    seq = make_sequence(bench.hasher, job.prompt, sampling, output=output, tenant=job.tenant, has_keys=job.has_keys)
    seq.is_batch, seq.weight = job.is_batch, job.weight
    bench.scheduler.add(seq)
    return seq


@settings(max_examples=200, deadline=None)
@given(
    jobs=st.lists(jobs, min_size=6, max_size=14),
    capacity=st.integers(20, 80),
    block_size=st.sampled_from([1, 2, 4, 4, 8]),
    max_num_seqs=st.sampled_from([8, 4, 2, 1]),
    extra_budget=st.sampled_from([0, 1, 3, 10, 50]),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    max_draft_tokens=st.sampled_from([4, 1, 9]),
    prefill_token_s=st.sampled_from([0.0, BATCH_PROMPT_S / 3, 1.0]),
)
def test_any_schedule_says_what_the_sequences_say_alone(
    jobs: list[Job],
    capacity: int,
    block_size: int,
    max_num_seqs: int,
    extra_budget: int,
    drafter: str,
    max_draft_tokens: int,
    prefill_token_s: float,
) -> None:
    bench = Bench(
        capacity // block_size,
        block_size,
        max_num_seqs,
        max_num_seqs + extra_budget,
        drafter=DRAFTERS[drafter](),
        max_draft_tokens=max_draft_tokens,
        costs=StepCosts(prefill_token_s=prefill_token_s),
    )
    sequences: list[Sequence] = []
    for job in jobs:
        sequences.append(submit(bench, job))
        if job.aborts is not None:
            bench.scheduler.finish(sequences[job.aborts % len(sequences)], Finish.ABORT)
        for _ in range(job.num_steps if bench.scheduler.has_work else 0):
            bench.step()
    bench.drain()

    max_len = bench.scheduler.max_len
    for seq in sequences:
        whole = expected(seq, max_len)
        if seq.finish is Finish.REFUSED:
            assert seq.num_tokens >= max_len
        elif seq.finish is Finish.ABORT:
            assert make_output(seq) == whole[: seq.num_output_tokens]
        else:
            assert make_output(seq) == whole
            assert seq.finish is (Finish.STOP if whole[-1] == EOS else Finish.LENGTH)
    event(f"{drafter} accepted: {bench.scheduler.drafts is not None and min(3, bench.scheduler.drafts.num_accepted)}")
    event(f"preemptions: {min(3, sum(seq.num_preemptions for seq in sequences))}")
    event(f"prefix hits: {min(3, sum(bool(seq.num_cached_tokens) for seq in sequences))}")


def test_a_step_of_64_decoding_rows_costs_well_below_a_millisecond() -> None:
    bench = Bench(num_blocks=64 * 8, block_size=16, max_num_seqs=64, max_batched_tokens=512)
    bench.add(*(bench.sequence(prompt_of(5, first=first), max_tokens=100) for first in range(64)))
    while bench.scheduler.waiting or any(seq.num_uncomputed_tokens > 1 for seq in bench.scheduler.running):
        bench.step()
    sampled: list[list[Sampled]] = [[Sampled(1)]] * 64
    costs = []
    for _ in range(60):
        begin = time.thread_time()
        step = bench.scheduler.schedule()
        bench.scheduler.commit(step, sampled)
        costs.append(time.thread_time() - begin)

    assert sorted(costs)[len(costs) // 2] < 1e-3


def test_a_row_without_a_choice_ends_its_own_sequence_publishes_nothing_and_frees_its_blocks() -> None:
    bench = Bench()
    broken, good = bench.sequence([1, 2, 3, 4, 5]), bench.sequence([6, 7, 8, 9, 10])
    bench.add(broken, good)
    step = bench.scheduler.schedule()
    chosen = bench.runner.launch(step)()
    outputs = bench.scheduler.commit(
        step,
        [
            [Sampled(0, error="no choice")] if chunk.seq is broken else choice
            for chunk, choice in zip(step.chunks, chosen, strict=True)
        ],
    )

    assert [(output.seq is broken, output.finish) for output in outputs] == [(True, Finish.ERROR), (False, None)]
    assert (broken.error, broken.block_table) == ("no choice", [])
    assert bench.pool.match(broken.block_keys, 1) == []
    assert len(bench.pool.match(good.block_keys, 1)) == 1
    bench.pool.check(bench.scheduler.sequences())


def test_what_a_sequence_computed_before_its_scores_were_no_numbers_is_found_by_nobody() -> None:
    bench = Bench()
    owner = bench.sequence(prompt_of(9), max_tokens=1)
    bench.add(owner)
    bench.drain()
    broken = bench.sequence([*prompt_of(8), *prompt_of(12, first=3)], max_tokens=30)
    broken.adapter = "d1"
    bench.add(broken)
    for _ in range(6):
        bench.step()
    follower = bench.sequence([*broken.token_ids[:20], 1], max_tokens=3)
    bench.add(follower)  # holds blocks of the broken one when it ends
    bench.step()
    step = bench.scheduler.schedule()
    chosen = bench.runner.launch(step)()
    bench.scheduler.commit(
        step,
        [
            [Sampled(0, error="no choice.")] if chunk.seq is broken else choice
            for chunk, choice in zip(step.chunks, chosen, strict=True)
        ],
    )
    bench.pool.check(bench.scheduler.sequences())

    assert broken.error == "no choice. It runs with the adapter d1."
    assert follower.num_cached_tokens == 20
    assert len(bench.pool.match(broken.block_keys, 99)) == 2, "what others had computed stays"
    bench.drain()
    assert make_output(follower) == expected(follower)
    again = bench.sequence(broken.token_ids[:20], max_tokens=3)
    bench.add(again)
    bench.drain()
    assert again.num_cached_tokens == 8


# --- what a grammar says


def test_a_token_behind_which_nothing_can_follow_ends_its_sequence() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(5), max_tokens=4)
    bench.add(seq)
    bench.step()
    step = bench.scheduler.schedule()
    bench.scheduler.commit(step, [[Sampled(9, is_last=True)]])

    assert (seq.finish, make_output(seq)[-1], seq.num_output_tokens) == (Finish.STOP, 9, 2)


def test_the_last_allowed_token_that_makes_an_answer_whole_is_a_stop_and_no_length() -> None:
    bench = Bench()
    seq = bench.sequence(prompt_of(5), max_tokens=1)
    bench.add(seq)
    bench.scheduler.commit(bench.scheduler.schedule(), [[Sampled(9, is_last=True)]])

    assert seq.finish is Finish.STOP


def test_an_error_that_is_the_requests_own_ends_it_as_invalid_and_keeps_its_blocks_in_the_cache() -> None:
    bench = Bench()
    seq, again = (bench.sequence(prompt_of(9)) for _ in range(2))
    bench.add(seq)
    bench.step()
    bench.scheduler.commit(bench.scheduler.schedule(), [[Sampled(0, error="A limit.", is_at_fault=True)]])
    bench.add(again)
    bench.step()

    assert (seq.finish, seq.error) == (Finish.INVALID, "A limit.")
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("length", [4, 5, 8])
def test_a_sequence_for_which_no_token_was_chosen_is_computed_again(length: int) -> None:
    bench = Bench()
    late, other = bench.sequence(prompt_of(length), max_tokens=5), bench.sequence(prompt_of(3), max_tokens=9)
    bench.add(late, other)
    for _ in range(4):
        step = bench.scheduler.schedule()
        assert [chunk.seq for chunk in step.chunks] == [late, other]
        sampled = bench.runner.launch(step)()
        bench.scheduler.commit(step, [[], sampled[1]])
        bench.pool.check(bench.scheduler.sequences())
        assert late.num_uncomputed_tokens == 1
    bench.drain()

    assert [make_output(seq) for seq in (late, other)] == [expected(late), expected(other)]


def test_choices_of_one_prompt_hold_its_blocks_once() -> None:
    """What `n: 8` does: the first choice computes the prompt, the others are submitted at its first token."""
    bench = Bench(num_blocks=64, block_size=4, max_num_seqs=8, max_batched_tokens=64)
    prompt = prompt_of(40)  # ten blocks, the last of which is computed by each for its logits
    bench.add(bench.sequence(prompt, max_tokens=4))
    bench.step()
    held_by_one = bench.pool.num_blocks - bench.pool.num_free
    others = [bench.sequence(prompt, max_tokens=4) for _ in range(7)]
    bench.add(*others)
    bench.step()

    assert held_by_one == 10
    assert bench.pool.num_blocks - bench.pool.num_free == 9 + 2 + 7  # the first one has come a block further
    assert {other.num_cached_tokens for other in others} == {36}
    bench.drain()
    assert [make_output(other) for other in others] == [expected(other) for other in others]
