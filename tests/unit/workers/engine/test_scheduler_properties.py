"""Any schedule says what its sequences say alone; and what a step costs."""

import time
from typing import NamedTuple

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from penstock.wire.frames import Finish, SamplingParams, StepCosts
from penstock.workers.engine.prompt_budget import BATCH_PROMPT_S
from penstock.workers.engine.sequence import Sampled, Sequence
from tests.unit.workers.engine.scheduler_bench import DRAFTERS, Bench, expected, make_output, prompt_of
from tests.unit.workers.paged_hash import EOS, answer, make_sequence
from tests.yardstick import rested


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
    tpot_s: float | None


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
    tpot_s=st.sampled_from([None, None, 0.02, 0.04]),
)


def submit(bench: Bench, job: Job) -> Sequence:
    sampling = SamplingParams(max_tokens=job.max_tokens, seed=job.seed)
    output = answer(job.prompt, sampling, job.tenant, bench.scheduler.max_len)[: job.num_output]
    if EOS in output or len(output) == job.max_tokens:
        output = []
    seq = make_sequence(bench.hasher, job.prompt, sampling, output=output, tenant=job.tenant, has_keys=job.has_keys)
    seq.is_batch, seq.weight, seq.tpot_s = job.is_batch, job.weight, job.tpot_s
    bench.scheduler.add(seq)
    return seq


WITH_A_TARGET = Job([*prompt_of(9)[:-1], 0], 24, "a", 0, 0, True, 0, None, is_batch=False, weight=1.0, tpot_s=0.02)


@settings(max_examples=200, deadline=None)
@example(  # the one for whom the others wait loses its blocks in a step that has no time for them
    jobs=[*[WITH_A_TARGET._replace(tpot_s=None)] * 5, WITH_A_TARGET],
    capacity=20,
    block_size=1,
    max_num_seqs=8,
    extra_budget=0,
    drafter="adversary",
    max_draft_tokens=4,
    prefill_token_s=0.0,
)
@given(
    jobs=st.lists(jobs, min_size=6, max_size=14),
    capacity=st.integers(20, 80),
    block_size=st.sampled_from([1, 2, 4, 4, 8]),
    max_num_seqs=st.sampled_from([8, 4, 2, 1]),
    extra_budget=st.sampled_from([0, 1, 3, 10, 50]),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    max_draft_tokens=st.sampled_from([4, 1, 9]),
    prefill_token_s=st.sampled_from([0.0, 0.001, BATCH_PROMPT_S / 3, 1.0]),
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
        costs=StepCosts(base_s=0.01, row_s=0.002, prefill_token_s=prefill_token_s),
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

    assert rested(sorted(costs)[len(costs) // 2]) < 1e-3
