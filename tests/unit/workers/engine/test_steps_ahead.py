"""Steps that are launched before the one before them has ended: the same tokens and ends as without."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, SamplingParams, StepCosts
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Chunk, Sampled, SeqOutput, Sequence, Step
from penstock.workers.engine.steps_ahead import assume, retract
from tests.stepping import take_step
from tests.unit.workers.paged_hash import EOS, VOCAB, HashRunner, answer, make_sequence, scores, search

BLOCK_SIZE = 4
HASHER = ChainHasher(bytes(16), BLOCK_SIZE)
BAD = 13
"""First token of prompts whose rows give no token once they have NUM_GOOD of output."""
NUM_GOOD = 2
KNOWN = 9.0
"""Temperature of rows that can't be chosen before their last token is known."""


class Device(HashRunner):
    """Computes steps in the order in which they are launched, as a device does; what it has chosen is known when
    somebody waits for it."""

    is_asynchronous = True

    def __init__(self, num_blocks: int, *, is_ahead: bool = True) -> None:
        super().__init__(num_blocks, BLOCK_SIZE)
        self.log: list[str] = []
        self.steps: list[Step] = []
        self.fails_at_launch = self.fails_at_end = 0
        self.before_launch: Callable[[], None] = lambda: None
        self.num_faulty = 0
        """Steps under way that will fail."""
        self._is_ahead = is_ahead
        self._chosen: list[int] = []

    @property
    def has_fault(self) -> bool:
        return bool(self.fails_at_launch or self.fails_at_end or self.num_faulty)

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        self.before_launch()
        number = len(self.steps)
        self.steps.append(step)
        self.log.append(f"launch {number}")
        if self.fails_at_launch:
            self.fails_at_launch -= 1
            raise RuntimeError("the step can't be launched")
        held = super().launch(step)
        fails, self.fails_at_end = self.fails_at_end > 0, max(0, self.fails_at_end - 1)
        self.num_faulty += fails

        def wait() -> list[list[Sampled]]:
            self.log.append(f"wait {number}")
            if fails:
                self.num_faulty -= 1
                raise RuntimeError("the device is gone")
            return held()

        return wait

    def can_run_ahead(self, step: Step) -> bool:
        return self._is_ahead and not any(chunk.seq.sampling.temperature == KNOWN for chunk in step.chunks)

    def compute(self, step: Step) -> list[list[Sampled]]:
        sampled = [self._compute_known(chunk) for chunk in step.chunks]
        self._chosen = [choices[0].token_id for choices in sampled if choices]
        return sampled

    def _compute_known(self, chunk: Chunk) -> list[Sampled]:
        """Compute a chunk whose last token may be one that the step before has chosen."""
        tokens = chunk.seq.token_ids
        last = tokens[-1]
        if last < 0:
            tokens[-1] = self._chosen[-1 - last]
        sampled = self._compute(chunk)
        tokens[-1] = last
        if tokens[0] == BAD and chunk.seq.num_output_tokens >= NUM_GOOD and sampled:
            return [Sampled(1, error="no choice")]
        return sampled


class Drive:
    """An engine without its thread: steps are taken by hand."""

    def __init__(
        self,
        runner: Device,
        *,
        max_num_seqs: int = 4,
        budget: int = 16,
        has_drafter: bool = False,
        overlap: bool = True,
    ) -> None:
        speculation = SpeculationConfig(method="ngram" if has_drafter else "none")
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=budget,
            speculation=speculation,
            overlap=overlap,
        )
        self.runner = runner
        self.reports: list[StepReport] = []
        self.engine = Engine(
            runner, config, HASHER, self.reports.append, lambda: 0.0, measure_costs=lambda runner, config: StepCosts()
        )
        self.pool = self.engine._pool
        runner.before_launch = lambda: runner.poison(self.pool)

    def submit(self, prompt: list[int], max_tokens: int = 4, **sampling: object) -> Sequence:
        params = SamplingParams(max_tokens, **{"ignore_eos": True} | sampling)  # type: ignore[arg-type]
        seq = make_sequence(HASHER, prompt, params)
        self.engine.submit(seq)
        return seq

    def advance(self) -> bool:
        """Take a step; False when there is nothing to do."""
        has_stepped = take_step(self.engine)
        if has_stepped:
            self.pool.check(self.engine._scheduler.sequences())
        return has_stepped

    def drain(self) -> None:
        for _ in range(3000):
            if not self.advance():
                break
        else:
            raise AssertionError("a sequence starves")
        assert self.pool.num_free == self.pool.num_blocks
        ends = [output.seq for output in self.outputs() if output.finish is not None]
        assert len(set(ends)) == len(ends), "a sequence is reported as finished twice"

    def outputs(self) -> list[SeqOutput]:
        return [output for report in self.reports for output in report.outputs]

    def tokens(self, seq: Sequence) -> list[int]:
        return [token for output in self.outputs() if output.seq is seq for token in output.token_ids]


def expected(seq: Sequence) -> list[int]:
    return answer(seq.token_ids[: seq.num_prompt_tokens], seq.sampling)


def test_a_step_is_launched_before_the_one_before_it_has_ended() -> None:
    drive = Drive(Device(16))
    seq = drive.submit([1, 2, 3], max_tokens=4)
    drive.drain()

    assert drive.runner.log == [
        *("launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"),
    ]
    assert drive.tokens(seq) == expected(seq)
    assert seq.finish is Finish.LENGTH


def test_without_overlap_each_step_ends_before_the_next_and_tokens_are_the_same() -> None:
    drive = Drive(Device(16), overlap=False)
    seq = drive.submit([1, 2, 3], max_tokens=3)
    drive.drain()

    assert drive.runner.log == ["launch 0", "wait 0", "launch 1", "wait 1", "launch 2", "wait 2"]
    assert drive.tokens(seq) == expected(seq)


def test_a_row_that_ends_by_its_length_is_not_in_the_step_behind() -> None:
    drive = Drive(Device(16))
    short, long = drive.submit([1, 2, 3], max_tokens=2), drive.submit([4, 5], max_tokens=5)
    drive.drain()

    assert [len(step.chunks) for step in drive.runner.steps] == [2, 2, 1, 1, 1]
    assert [drive.tokens(seq) for seq in (short, long)] == [expected(short), expected(long)]


def test_an_end_that_nobody_could_foresee_is_noticed_a_step_late_and_its_row_is_passed_over() -> None:
    whole = expected(Drive(Device(4)).submit([1, 2, 3], max_tokens=9))
    drive = Drive(Device(16))
    stopped = drive.submit([1, 2, 3], max_tokens=9, stop_token_ids=(whole[2],))
    other = drive.submit([4, 5], max_tokens=9)
    drive.drain()

    length = whole.index(whole[2]) + 1
    assert drive.tokens(stopped) == whole[:length]
    assert stopped.finish is Finish.STOP
    assert [len(step.chunks) for step in drive.runner.steps] == [2] * (length + 1) + [1] * (9 - length - 1)
    assert drive.tokens(other) == expected(other)
    assert sorted(seq.request_id for seq in drive.runner.forgotten) == sorted((stopped.request_id, other.request_id))


def test_a_sequence_that_is_aborted_frees_its_blocks_while_its_step_is_under_way() -> None:
    drive = Drive(Device(16))
    aborted, other = drive.submit([1, 2, 3], max_tokens=9), drive.submit([4, 5], max_tokens=9)
    drive.advance()
    drive.engine.abort(aborted)
    drive.advance()

    assert aborted.block_table == []
    drive.drain()
    assert drive.tokens(aborted) == []
    assert aborted.finish is Finish.ABORT
    assert drive.tokens(other) == expected(other)


def test_the_last_step_of_aborted_sequences_is_waited_for() -> None:
    drive = Drive(Device(16))
    seq = drive.submit([1, 2, 3], max_tokens=9)
    drive.advance()
    drive.engine.abort(seq)
    drive.drain()

    assert drive.runner.log == ["launch 0", "wait 0"]


@pytest.mark.parametrize(
    "asks",
    [
        {"temperature": KNOWN},
        {"num_beams": 2},
        {"prompt_logprobs": 0},
    ],
)
def test_a_step_with_a_row_that_must_be_known_first_ends_before_the_next_is_launched(asks: dict[str, object]) -> None:
    drive = Drive(Device(32))
    drive.submit([1, 2, 3], max_tokens=4, **asks)
    other = drive.submit([4, 5], max_tokens=4)
    drive.drain()

    assert drive.tokens(other) == expected(other)
    assert drive.runner.log[:2] == ["launch 0", "wait 0"]


def test_with_a_drafter_each_step_ends_before_the_next() -> None:
    drive = Drive(Device(32), has_drafter=True)
    seq = drive.submit([1, 2, 3], max_tokens=6)
    drive.drain()

    assert drive.tokens(seq) == expected(seq)
    assert drive.runner.log[:4] == ["launch 0", "wait 0", "launch 1", "wait 1"]


def test_a_prefix_that_a_step_under_way_computes_is_not_computed_twice() -> None:
    drive = Drive(Device(32))
    prompt = list(range(12))
    first = drive.submit(prompt, max_tokens=6)
    drive.advance()
    second = drive.submit([*prompt, 30], max_tokens=3)
    drive.drain()

    assert second.num_cached_tokens == 12
    assert [drive.tokens(seq) for seq in (first, second)] == [expected(first), expected(second)]


def test_what_was_assumed_of_a_failed_step_is_taken_back() -> None:
    going, ended, preempted = (make_sequence(HASHER, [first, 2, 3], SamplingParams(4)) for first in (5, 6, 7))
    step = Step([Chunk(seq, 0, 3) for seq in (ended, going, preempted)], [])
    ended.finish = Finish.ABORT

    assume(step)

    assert [seq.token_ids for seq in (ended, going, preempted)] == [[6, 2, 3], [5, 2, 3, -2], [7, 2, 3, -3]]
    assert going.num_computed_tokens == 3
    assert [chunk.seq for chunk in retract(step, [preempted]).chunks] == [going]
    assert [seq.token_ids for seq in (going, preempted)] == [[5, 2, 3], [7, 2, 3]]
    assert going.num_computed_tokens == 0


@pytest.mark.parametrize("fault", ["fails_at_launch", "fails_at_end"])
@pytest.mark.parametrize("number", range(5))
def test_a_step_that_fails_is_computed_again_from_what_is_known(fault: str, number: int) -> None:
    drive = Drive(Device(32))
    seqs = [drive.submit([first, 2, 3], max_tokens=6) for first in (1, 4)]
    for _ in range(number):
        drive.advance()
    setattr(drive.runner, fault, 1)
    late = drive.submit([7, 8], max_tokens=3)
    drive.drain()

    assert [drive.tokens(seq) for seq in (*seqs, late)] == [expected(seq) for seq in (*seqs, late)]
    assert {seq.finish for seq in (*seqs, late)} == {Finish.LENGTH}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.sampled_from([12, 18, 60]),
    budget=st.sampled_from([5, 9, 40]),
    is_ahead=st.sampled_from([True, True, True, False]),
    has_faults=st.booleans(),
)
def test_any_schedule_gives_the_tokens_and_ends_that_the_sequences_have_alone(
    seed: int, num_blocks: int, budget: int, is_ahead: bool, has_faults: bool
) -> None:
    draw = random.Random(seed)
    drive = Drive(Device(num_blocks, is_ahead=is_ahead), budget=budget)
    seqs: list[Sequence] = []
    for _ in range(draw.randint(3, 14)):
        prompt, max_tokens = drawn_request(draw)
        seqs.append(drive.submit(prompt, max_tokens, **({} if prompt[0] == BAD else drawn_options(draw))))
        if draw.random() < 0.15:
            drive.engine.abort(draw.choice(seqs))
        if has_faults and draw.random() < 0.3 and not drive.runner.has_fault:
            setattr(drive.runner, draw.choice(("fails_at_launch", "fails_at_end")), 1)
        for _ in range(draw.choice((0, 0, 1, 2, 7))):
            drive.advance()
    drive.drain()

    for seq in seqs:
        check_answer(drive, seq)
    kinds = [entry.split()[0] for entry in drive.runner.log]
    overlapped = sum(pair == ("launch", "launch") for pair in pairwise(kinds))
    assert is_ahead or has_faults or not overlapped
    event(f"steps ahead: {min(3, overlapped)}")
    event(f"preemptions: {min(3, sum(seq.num_preemptions for seq in seqs))}")


def drawn_request(draw: random.Random) -> tuple[list[int], int]:
    """A prompt, which often begins as others do, and how many tokens are wanted."""
    first = draw.choice((0, 0, 0, BAD, draw.randrange(VOCAB)))
    prompt = [(first + 7 * place) % VOCAB for place in range(draw.randint(1, 20))]
    return prompt, draw.choice((1, 2, 3, 12, 20))


def drawn_options(draw: random.Random) -> dict[str, object]:
    kind = draw.random()
    if kind < 0.1:
        return {"num_beams": 2}
    if kind < 0.2:
        return {"temperature": KNOWN}
    if kind < 0.3:
        return {"prompt_logprobs": 0}
    return {"ignore_eos": draw.random() < 0.5, "stop_token_ids": tuple(draw.sample(range(VOCAB), draw.choice((0, 3))))}


def check_answer(drive: Drive, seq: Sequence) -> None:
    """Assert that a sequence has the tokens that it has alone, all of them or until it was aborted."""
    assert seq.finish is not None
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    got = drive.tokens(seq)
    if seq.finish is Finish.REFUSED:
        assert seq.sampling.num_beams, "only a search may be too large"
        return
    if seq.search is not None:
        if seq.finish is not Finish.ABORT:
            (beams,) = [output.beams for output in drive.outputs() if output.seq is seq and output.beams is not None]
            wanted = SamplingParams(seq.sampling.max_tokens, ignore_eos=True, num_beams=2)
            assert [beam.token_ids for beam in beams] == search(prompt, wanted)
        return
    whole = expected(seq)
    assert seq.token_ids[seq.num_prompt_tokens :][: len(got)] == got
    if seq.finish is Finish.ABORT:
        assert got == whole[: len(got)]
    elif prompt[0] == BAD and len(whole) > NUM_GOOD:
        assert got == whole[:NUM_GOOD]
        assert seq.finish is Finish.ERROR
    else:
        assert got == whole
        is_stopped = whole[-1] in seq.sampling.stop_token_ids or (whole[-1] == EOS and not seq.sampling.ignore_eos)
        assert seq.finish is (Finish.STOP if is_stopped else Finish.LENGTH)
    if seq.sampling.prompt_logprobs is not None and seq.finish is not Finish.ABORT:
        assert sum(part.num_tokens for part in seq.prompt_logprobs) == len(scores(prompt, seq.sampling))
