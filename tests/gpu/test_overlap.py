"""Rows whose parameters look at what was said, in steps that are launched before their last token is known: the tokens
that the host chooses with all of them known, whatever becomes of the steps."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, SamplingParams, StepCosts, pack_token_ids
from penstock.workers.compute.batch import Batch, fill_in
from penstock.workers.compute.device import bring
from penstock.workers.compute.device_choice import DeviceChoice, KeptLogits
from penstock.workers.compute.kernels.choice import Draw
from penstock.workers.compute.lora import AdapterRows
from penstock.workers.compute.models.llama import largest
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.scoring import ScoredRows, WaitScores, score_rows
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.compute.triton.sampling.adjust import change_rows
from penstock.workers.compute.triton.sampling.count_lists import CountLists
from penstock.workers.compute.triton.sampling.sampling_inputs import RowInputs, make_sampling_inputs
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Chunk
from penstock.workers.engine.sequence import Sequence as EngineSequence
from tests.gpu.cases import DEVICE
from tests.gpu.counting_runner import CountingRunner
from tests.gpu.test_sample import FixedMasks
from tests.stepping import take_step

VOCAB, EOS, BLOCK_SIZE, MOST_ROWS, TIMES = 40, frozenset({3}), 4, 4, 97
GROWN_VOCAB = 1200
"""Tokens enough for lists that are replaced by longer ones."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 1.0, "frequency_penalty": -0.6, "repetition_penalty": 0.9, "logprobs": 2},
    {"temperature": 0.8, "top_k": 9, "presence_penalty": 1.5, "logit_bias": ((7, 2.0), (9, -2.0))},
    {"temperature": 0.0, "bad_words": tuple((first, 8) for first in range(0, VOCAB, 3))},
    {"temperature": 0.0, "bad_words": ((5,), *[(a, b, c) for a in range(8) for b in range(8) for c in range(0, 8, 2)])},
    {"temperature": 1.0, "min_tokens": 6, "allowed_token_ids": pack_token_ids([3, *range(10, 20)])},
    {"temperature": 0.0, "presence_penalty": 0.3, "prompt_logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 300},
)
"""The last one is chosen on the host."""


@cache
def table() -> Tensor:
    """Logits by the last token and its position, among them equal ones; small, so that penalties decide."""
    return torch.randn(TIMES, VOCAB, generator=torch.Generator().manual_seed(5)).mul(2).round().div(2)


def place_of(token_id: int, position: int) -> int:
    return (7 * token_id + 31 * (position % 5)) % TIMES


class TableSteps:
    """A model on a device that knows the last token and its place. Like recorded steps, it computes into memory that
    the next step writes over."""

    is_asynchronous = takes_chosen = True
    tables: BlockTables | None = None

    def __init__(self, num_blocks: int) -> None:
        self.model: Any = SimpleNamespace(config=SimpleNamespace(eos_token_ids=EOS, vocab_size=VOCAB))
        self.cache: Any = SimpleNamespace(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.chosen: Tensor | None = None
        self.fails_at_launch = self.fails_at_end = 0
        self._table = table().to(DEVICE)
        self._logits = torch.zeros(64, VOCAB, device=DEVICE)
        self._largest = torch.zeros(2, 64, dtype=torch.float64, device=DEVICE)

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        raise AssertionError("logits leave the device")

    def choose_and_keep(self, batch: Batch, adapter_rows: list[AdapterRows], draws: Sequence[Draw | None]) -> Any:
        raise AssertionError("logits leave the device")

    def keep(self, batch: Batch, adapter_rows: list[AdapterRows]) -> KeptLogits:
        return KeptLogits(self._compute(batch, batch.rows), self._bring)

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Callable[[], Tensor]:
        found = self._largest[:, : len(batch.rows)]
        found.copy_(largest(self._compute(batch, batch.rows)))
        self.chosen = found[0]
        return self._bring(found)

    def score(self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows) -> tuple[KeptLogits, WaitScores]:
        logits, count = self._compute(batch, torch.cat((batch.rows, scored.rows))), len(batch.rows)
        scores = score_rows(logits[count:], scored.token_ids, scored.num_top, self._bring)
        return KeptLogits(logits[:count], self._bring), scores

    def _compute(self, batch: Batch, rows: Tensor) -> Tensor:
        if self.fails_at_launch:
            self.fails_at_launch -= 1
            raise RuntimeError("the step can't be launched")
        token_ids = batch.token_ids.clone().to(DEVICE)
        if batch.before is not None:
            fill_in(token_ids, batch.before)
        positions = batch.positions.to(DEVICE)
        found = self._table[(7 * token_ids + 31 * (positions % 5)) % TIMES][rows.to(DEVICE)]
        self._logits.fill_(float("nan"))
        self._largest.fill_(-1)
        self._logits[: len(rows)] = found
        return self._logits[: len(rows)]

    def _bring(self, result: Tensor) -> Callable[[], Tensor]:
        wait, fails = bring(result), self.fails_at_end > 0
        self.fails_at_end -= fails

        def end() -> Tensor:
            if fails:
                raise RuntimeError("the device is gone")
            return wait()

        return end


class Drive:
    """An engine without its thread: steps are taken by hand."""

    def __init__(self, num_blocks: int, budget: int, *, is_ahead: bool = True) -> None:
        self.steps = TableSteps(num_blocks)
        self.runner = CountingRunner(self.steps, Sampler(VOCAB, EOS), 100)
        self.runner.is_ahead = is_ahead
        self.reports: list[StepReport] = []
        self.hasher = ChainHasher(bytes(16), BLOCK_SIZE)
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=MOST_ROWS, max_batched_tokens=budget)
        self.engine = Engine(
            self.runner, config, self.hasher, self.reports.append, lambda: 0.0,
            measure_costs=lambda runner, config: StepCosts(),
        )  # fmt: skip

    def submit(self, prompt: list[int], sampling: SamplingParams) -> EngineSequence:
        root = self.hasher.root("model")
        keys = self.hasher.extend(root, prompt)
        seq = EngineSequence("r", prompt, sampling, len(prompt), keys, keys[-1] if keys else root, 0.0)
        self.engine.submit(seq)
        return seq

    def drain(self) -> None:
        for _ in range(2000):
            if not take_step(self.engine):
                return
        raise AssertionError("a sequence starves")

    def gained(self, seq: EngineSequence) -> tuple[list[int], list[Any]]:
        own = [output for report in self.reports for output in report.outputs if output.seq is seq]
        return [each for output in own for each in output.token_ids], [
            each for output in own for each in output.logprobs or ()
        ]


def expected(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], list[Any]]:
    """Tokens and log probabilities by the host's sampler, one after the other."""
    sampler = Sampler(VOCAB, EOS)
    seq = EngineSequence("r", [*prompt], sampling, len(prompt), [], b"", 0.0)
    logprobs = []
    while seq.num_output_tokens < sampling.max_tokens:
        row = table()[place_of(seq.token_ids[-1], seq.num_tokens - 1)]
        [choice] = sampler.sample(row[None], [seq], [seq.num_tokens])
        assert choice.error is None
        seq.token_ids.append(choice.token_id)
        logprobs += [choice.logprobs] if choice.logprobs is not None else []
        if choice.token_id in sampling.stop_token_ids or (choice.token_id in EOS and not sampling.ignore_eos):
            break
    return seq.token_ids[len(prompt) :], logprobs


@pytest.mark.parametrize("has_faults", [False, True])
@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_the_tokens_that_the_host_chooses_one_after_the_other(
    seed: int, is_ahead: bool, has_faults: bool
) -> None:
    draw = random.Random(f"{seed} {is_ahead} {has_faults}")
    drive = Drive(draw.choice((12, 18, 60)), draw.choice((9, 40)), is_ahead=is_ahead)
    seqs: list[EngineSequence] = []
    for number in range(10):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 15))]
        options = OPTIONS[(seed + number) % (len(OPTIONS) - (draw.random() < 0.8))]
        sampling = SamplingParams(
            max_tokens=draw.choice((1, 3, 9, 14)), seed=number, ignore_eos=draw.random() < 0.5,
            stop_token_ids=tuple(draw.sample(range(VOCAB), 2)), **options,
        )  # fmt: skip
        seqs.append(drive.submit(prompt, sampling))
        if draw.random() < 0.15:
            drive.engine.abort(draw.choice(seqs))
        if has_faults and draw.random() < 0.4 and not drive.steps.fails_at_launch + drive.steps.fails_at_end:
            setattr(drive.steps, draw.choice(("fails_at_launch", "fails_at_end")), 1)
        for _ in range(draw.choice((0, 1, 4))):
            take_step(drive.engine)
    drive.drain()

    for seq in seqs:
        tokens, logprobs = expected(seq.token_ids[: seq.num_prompt_tokens], seq.sampling)
        got = drive.gained(seq)
        assert seq.finish in (Finish.ABORT, Finish.STOP, Finish.LENGTH)
        if seq.finish is Finish.ABORT:
            assert got == (tokens[: len(got[0])], logprobs[: len(got[1])])
        else:
            assert got == (tokens, logprobs)
    assert bool(drive.runner.num_ahead) is is_ahead or has_faults
    lists = drive.runner._on_device._lists
    assert lists is None or lists.num_bytes == 0
    assert not drive.runner._sampler._adjustments


@pytest.mark.parametrize("options", OPTIONS[1:8])
def test_no_parameter_but_a_grammar_ends_a_step_before_the_next_is_launched(options: dict[str, Any]) -> None:
    drive = Drive(60, 40)
    seqs = [
        drive.submit([number, 11, 12], SamplingParams(9, ignore_eos=True, seed=number, **options))
        for number in range(3)
    ]
    drive.drain()

    assert drive.runner.num_ahead == 8
    assert [drive.gained(seq) for seq in seqs] == [
        expected(seq.token_ids[: seq.num_prompt_tokens], seq.sampling) for seq in seqs
    ]


def test_a_row_that_has_ended_before_late_masks_are_there_leaves_nothing_behind() -> None:
    masks = FixedMasks()
    sampler = Sampler(2500, masks=masks)  # type: ignore[arg-type]
    ended, bound = (
        EngineSequence("r", [1, 2], SamplingParams(9, presence_penalty=0.5, seed=3), 2, [], b"", 0.0) for _ in range(2)
    )
    masks.add(bound, [11])
    masks.late = {bound}
    chooser = DeviceChoice(sampler, masks)  # type: ignore[arg-type]
    wait = chooser.launch([Chunk(ended, 1, 1), Chunk(bound, 1, 1)], KeptLogits(torch.zeros(2, 2500, device=DEVICE)))
    ended.finish, masks.late = Finish.ABORT, set()
    chooser.forget(ended)

    assert [[choice.token_id for choice in own] for own in wait()] == [[], [11]]
    assert list(sampler._adjustments) == list(chooser._lists._lists) == [bound]  # type: ignore[union-attr]


class Broken:
    """Logits with which a choice fails when the host has reckoned with what was to be written to the lists."""

    device, shape = DEVICE, (1, GROWN_VOCAB)

    def contiguous(self) -> Tensor:
        raise RuntimeError("the choice can't be launched")


def test_what_a_failed_choice_did_not_write_to_a_list_is_written_by_the_next() -> None:
    host, chooser = Sampler(GROWN_VOCAB), DeviceChoice(Sampler(GROWN_VOCAB))
    params = SamplingParams(9, temperature=0.0, frequency_penalty=1.0)
    seq = EngineSequence("r", [1, 2, 5, 5, 6], params, 2, [], b"", 0.0)
    logits = torch.zeros(1, GROWN_VOCAB)
    logits[0, :8] = 0.5
    for token_id in (7, 0, 3):
        expected_choice = host.sample(logits, [seq], [seq.num_tokens])
        with pytest.raises(RuntimeError, match="can't be launched"):
            chooser.launch([Chunk(seq, seq.num_tokens - 1, 1)], KeptLogits(Broken()))  # type: ignore[arg-type]

        wait = chooser.launch([Chunk(seq, seq.num_tokens - 1, 1)], KeptLogits(logits.to(DEVICE)))
        assert wait() == [expected_choice]
        seq.token_ids.append(token_id)


@pytest.mark.parametrize("seed", range(6))
def test_rows_by_lists_that_grow_are_those_of_the_host(seed: int) -> None:
    """Every number of them, bit for bit: with last tokens that only the device knows, with drafts, of which some hold,
    and after lists were lost."""
    draw, lists = np.random.default_rng(seed), CountLists(DEVICE)
    host, device = Sampler(GROWN_VOCAB, EOS), Sampler(GROWN_VOCAB, EOS)
    seqs = []
    for _ in range(6):
        token_ids = draw.integers(GROWN_VOCAB, size=draw.choice((1, 30, 250, 900))).tolist()
        params = SamplingParams(
            max_tokens=999, repetition_penalty=draw.choice((1.0, 1.3, 0.7)), frequency_penalty=draw.choice((0.0, 0.4)),
            presence_penalty=draw.choice((0.9, -0.3)), bad_words=((1, 2), (7, 8, 9)),
        )  # fmt: skip
        seqs.append(EngineSequence("r", token_ids, params, draw.integers(1, len(token_ids) + 1), [], b"", 0.0))
    for step in range(8):
        known = [int(draw.choice((*seq.token_ids[-3:], draw.integers(GROWN_VOCAB)))) for seq in seqs]
        drafts = [draw.choice(seq.token_ids, size=draw.integers(4)).tolist() for seq in seqs]
        places: list[tuple[EngineSequence, list[int], int]] = []
        for index, seq in enumerate(seqs):
            is_unknown = (step + index) % 2 == 0
            seq.token_ids.append(-1 - index if is_unknown else known[index])
            draft = [] if is_unknown else drafts[index]
            places += [(seq, draft[:count], index) for count in range(len(draft) + 1)]
        rows = [device.row_inputs(seq, ahead) for seq, ahead, _ in places]
        inputs = make_sampling_inputs([each for each in rows if isinstance(each, RowInputs)], GROWN_VOCAB, lists.locate)
        logits = torch.from_numpy(draw.standard_normal((len(rows), GROWN_VOCAB), dtype=np.float32))

        got = change_rows(logits.to(DEVICE), inputs.on(DEVICE).tensors, torch.tensor(known, device=DEVICE)).cpu()

        for row, (seq, ahead, index) in enumerate(places):
            seq.token_ids[-1] = known[index]
            np.testing.assert_array_equal(got[row].numpy(), host._adjust(logits[row].numpy(), seq, ahead))
        if step == 4:
            lists.clear()
        if step == 5:
            seqs[0].token_ids += draw.integers(GROWN_VOCAB, size=400).tolist()


def test_of_equal_logits_the_first_is_the_largest_in_a_vocabulary_of_many_tiles() -> None:
    """A tie between any places of a row, also far apart; minus zero equals zero; NaN is before all numbers."""
    draw, size = random.Random(2), 128256
    logits = torch.full((12, size), -1.0)
    for row in range(10):
        logits[row, draw.sample(range(size), 40)] = 2.0
    logits[10, 70000], logits[10, 90000] = -0.0, 0.0
    logits[11, 5], logits[11, 77777], logits[11, 77778] = 9.0, float("nan"), float("nan")
    wanted = logits.numpy().argmax(axis=1)

    ids, values = largest(logits.to(DEVICE)).cpu()

    assert ids.tolist() == wanted.tolist()
    assert values[:11].tolist() == logits.amax(dim=1)[:11].tolist()
    assert values[11].isnan()
