"""Decode steps from recordings against the same steps as they come. On a GPU the recordings are CUDA graphs."""

import queue
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import SamplingParams, Stairs, StepCosts
from penstock.workers.compute.batch import Batch, build_batch
from penstock.workers.compute.lora import AdapterRows
from penstock.workers.compute.models.replay import Recorded, Replay
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.prediction import PredictionDrafter
from penstock.workers.compute.step_model import GpuStepModel, HostStepModel
from penstock.workers.compute.triton.attention.block_tables import BlockTables, StepTables
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.gpu.cases import DEVICE
from tests.gpu.counting_runner import CountingRunner
from tests.gpu.test_model import BLOCK_SIZE, CONFIG, Harness

RECORDED = (1, 2, 4)
CONTEXTS = (19, 9)
TOLERANCE = 1e-4


class Pair:
    """The same model and sequences twice: one replays its decode steps."""

    def __init__(self, recorded: Seq[int] = RECORDED, *, is_quantized: bool = False) -> None:
        self.eager, self.replaying = (
            Harness(torch.float32, DEVICE, is_planned=True, is_quantized=is_quantized) for _ in range(2)
        )
        for harness in (self.eager, self.replaying):
            harness.step(*CONTEXTS)
        self.replay = Replay(self.replaying.model, self.replaying.cache, Recorded(recorded), max_context=100)

    def batch(self, *indices: int, tables: BlockTables | None = None) -> Batch:
        """One more token of some sequences. tables: those of the device; None: the batch brings its own."""
        seqs = [self.replaying.seqs[index] for index in indices]
        chunks = [Chunk(seq, seq.num_computed_tokens, 1) for seq in seqs]
        batch = build_batch(Step(chunks, []), BLOCK_SIZE, tables)
        for seq in seqs:
            seq.num_computed_tokens += 1
        rows = torch.arange(len(seqs))
        return Batch(batch.token_ids, batch.positions, batch.attention, rows, list(range(len(seqs))))

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        layers = zip(self.eager.cache.layers, self.replaying.cache.layers, strict=True)
        return [
            (ours.nan_to_num(9.0), theirs.nan_to_num(9.0))
            for one, other in layers
            for ours, theirs in zip(one, other, strict=True)
        ]


@pytest.mark.parametrize(("is_quantized", "recorded"), [(False, [4]), (True, [1, 2])])
def test_replayed_steps_have_the_logits_and_write_the_cache_of_steps_as_they_come(
    is_quantized: bool, recorded: list[int]
) -> None:
    """Filled up to four rows, and not at all."""
    pair = Pair(recorded, is_quantized=is_quantized)

    with torch.inference_mode():
        for counts, indices in (((1, 1), (0, 1)), ((0, 1), (1,))):
            expected = pair.eager.step(*counts)
            torch.testing.assert_close(
                pair.replay.on_device(pair.batch(*indices)).cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE
            )

    for ours, theirs in pair.caches():
        torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


def test_steps_by_tables_that_stay_on_the_device_equal_steps_as_they_come() -> None:
    """Rows come in any order and number, beside batches that bring tables of their own."""
    pair = Pair([1, 2])
    script: tuple[tuple[tuple[int, int], tuple[int, ...], bool], ...] = (
        ((1, 1), (0, 1), True),
        ((0, 1), (1,), True),
        ((1, 0), (0,), False),
        ((1, 0), (0,), True),
        ((1, 1), (0, 1), True),
    )

    with torch.inference_mode():
        for counts, indices, is_kept in script:
            expected = pair.eager.step(*counts)
            batch = pair.batch(*indices, tables=pair.replay.tables if is_kept else None)
            torch.testing.assert_close(pair.replay.on_device(batch).cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_table_with_more_changes_than_have_room_beside_the_numbers_is_sent_too() -> None:
    harnesses = [Harness(torch.float32, DEVICE, is_planned=True) for _ in range(2)]
    for harness in harnesses:
        harness.seqs = [harness.sequence(0, 160)]
        harness.step(158)
    eager, replaying = harnesses
    replay = Replay(replaying.model, replaying.cache, Recorded([1]), max_context=200)
    (seq,) = replaying.seqs

    with torch.inference_mode():
        for place in (158, 159):
            batch = build_batch(Step([Chunk(seq, place, 1)], []), BLOCK_SIZE, replay.tables)
            batch = replace(batch, rows=torch.arange(1), sampled=[0])
            torch.testing.assert_close(replay.on_device(batch).cpu(), eager.step(1), atol=TOLERANCE, rtol=TOLERANCE)


def test_the_best_token_of_each_row_is_all_that_is_fetched() -> None:
    pair = Pair()
    expected = pair.eager.step(1, 1)

    with torch.inference_mode():
        ids, scores = pair.replay.greedy_on_device(pair.batch(0, 1)).cpu()

    assert ids.tolist() == expected.argmax(dim=1).tolist()
    torch.testing.assert_close(scores.float(), expected.amax(dim=1), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_step_that_is_no_decode_step_is_not_covered() -> None:
    pair = Pair()
    seqs = pair.replaying.seqs

    decode = pair.batch(0, 1)
    prompt = build_batch(Step([Chunk(seqs[0], 0, 20)], []), BLOCK_SIZE)
    draft = build_batch(Step([Chunk(seqs[0], seqs[0].num_tokens - 1, 1, 2, [1, 2])], []), BLOCK_SIZE)

    assert pair.replay.covers(decode)
    assert not pair.replay.covers(prompt)
    assert not pair.replay.covers(draft)


def test_the_performance_model_is_told_which_steps_are_recorded() -> None:
    harness = Harness(torch.float32, DEVICE, is_planned=True)
    replay = Replay(harness.model, harness.cache, Recorded((1, 2, 4), (3, 16, 20)), max_context=100)
    runner = TorchRunner(GpuStepModel(replay), Sampler(CONFIG.vocab_size, CONFIG.eos_token_ids), 100)

    assert runner.stairs == Stairs(4, 20, 0.0, ((1, 0.0), (2, 0.0), (4, 0.0), (16, 0.0), (20, 0.0)))


@pytest.mark.parametrize(("tokens_recorded", "num_mixed"), [((), 0), ((16, 24), 2), ((16,), 0)])
def test_a_runner_replays_what_is_covered_and_computes_the_rest(
    tokens_recorded: tuple[int, ...], num_mixed: int
) -> None:
    """A prompt of 20 tokens and its first tokens, greedily, then drawn."""
    harness = Harness(torch.float32, DEVICE, is_planned=True)
    recorded = CountedReplay(harness.model, harness.cache, Recorded(RECORDED, tokens_recorded), max_context=100)
    chosen = []
    for own in (recorded, None):
        steps = HostStepModel(harness.model, harness.cache) if own is None else GpuStepModel(own)
        runner = TorchRunner(steps, Sampler(CONFIG.vocab_size), 100)
        chosen.append([tokens(runner, sampling) for sampling in (GREEDY, DRAWN)])

    assert chosen[0] == chosen[1]
    assert recorded.num_steps == 2 * 3
    assert recorded.num_mixed == num_mixed


class CountedReplay(Replay):
    num_steps = num_mixed = 0

    def _run_mixed(self, batch: Batch, adapter_rows: Seq[AdapterRows]) -> Tensor:
        self.num_mixed += 1
        return super()._run_mixed(batch, adapter_rows)

    def _run_decode(self, batch: Batch, adapter_rows: Seq[AdapterRows]) -> Any:
        self.num_steps += 1
        return super()._run_decode(batch, adapter_rows)


GREEDY, DRAWN = (SamplingParams(max_tokens=4, temperature=temperature, seed=3) for temperature in (0.0, 1.0))


def tokens(runner: TorchRunner, sampling: SamplingParams) -> list[int]:
    seq = Sequence("r", list(range(20)), sampling, 20, [], b"", 0.0, block_table=[5, 9])
    while seq.num_output_tokens < sampling.max_tokens:
        count = seq.num_uncomputed_tokens
        step = Step([Chunk(seq, seq.num_computed_tokens, count)], [])
        ((choice,),) = runner.launch(step)()
        seq.num_computed_tokens += count
        seq.token_ids.append(choice.token_id)
    return seq.token_ids[20:]


class FailingReplay(Replay):
    """Fails when it has sent a step's numbers, and what the step changes in the tables is lost, as often as it is
    told."""

    num_failures = 0

    def _send(self, inputs: Any, arrays: Any, tables: StepTables, others: Any = ()) -> list[Tensor]:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("the device is gone")
        return super()._send(inputs, arrays, tables, others)


def test_behind_a_step_that_failed_the_tables_are_right() -> None:
    """The step reads a block that none before it has read."""
    seq, harness, other = greedy_sequence(), *(Harness(torch.float32, DEVICE, is_planned=True) for _ in range(2))
    replay = FailingReplay(harness.model, harness.cache, Recorded(RECORDED), max_context=100)
    runner = TorchRunner(GpuStepModel(replay), Sampler(CONFIG.vocab_size), 100)
    runner.launch(Step([Chunk(seq, 0, 16)], []))()
    replay.num_failures = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is gone"):
            runner.launch(Step([Chunk(seq, 16, 1)], []))

    chosen = runner.launch(Step([Chunk(seq, 16, 1)], []))()

    whole = TorchRunner(HostStepModel(other.model, other.cache), Sampler(CONFIG.vocab_size), 100)
    assert chosen == whole.launch(Step([Chunk(greedy_sequence(), 0, 17)], []))()
    assert replay.tables.table[0, :2].tolist() == [5, 9]


def greedy_sequence() -> Sequence:
    return Sequence("r", list(range(17)), GREEDY, 17, [], b"", 0.0, block_table=[5, 9])


class PatientRunner(CountingRunner):
    is_ahead = False


MIXTURE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.95, "seed": 5},
    {"temperature": 1.0, "seed": 6, "logprobs": 2},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "seed": 7},
)


@pytest.mark.parametrize(("mixture", "num_ahead"), [(({"temperature": 0.0},) * 5, 9), (MIXTURE, 9)])
def test_steps_launched_before_the_one_before_has_ended_give_the_same_tokens(
    mixture: Seq[dict[str, Any]], num_ahead: int
) -> None:
    """There are too few blocks, so sequences lose theirs."""
    kinds = (CountingRunner, GpuStepModel), (PatientRunner, GpuStepModel), (PatientRunner, HostStepModel)
    harness = Harness(torch.float32, DEVICE, is_planned=True)
    replay = Replay(harness.model, harness.cache, Recorded(RECORDED, (16, 40)), max_context=100)
    host, found, runners = HostStepModel(harness.model, harness.cache), [], []
    for runner_kind, steps_kind in kinds:
        steps = GpuStepModel(replay) if steps_kind is GpuStepModel else host
        runners.append(runner_kind(steps, Sampler(CONFIG.vocab_size, CONFIG.eos_token_ids), 100))
        found.append(answers(runners[-1], mixture))

    assert found[0] == found[1] == found[2]
    assert runners[0].num_ahead > num_ahead
    assert runners[1].num_ahead == 0


def test_a_row_with_a_penalty_is_chosen_before_the_host_knows_its_last_token() -> None:
    mixture = [*MIXTURE[:2], {"temperature": 0.7, "seed": 3, "presence_penalty": 1.0}]
    found, runners = [], []
    for kind in (CountingRunner, PatientRunner):
        harness = Harness(torch.float32, DEVICE, is_planned=True)
        replay = Replay(harness.model, harness.cache, Recorded(RECORDED), max_context=100)
        runners.append(kind(GpuStepModel(replay), Sampler(CONFIG.vocab_size), 100))
        found.append(answers(runners[-1], mixture))

    assert found[0] == found[1]
    assert runners[0].num_ahead > len(mixture)


def answers(
    runner: TorchRunner, mixture: Seq[dict[str, Any]], predicted: list[list[int]] | None = None
) -> list[list[int]]:
    """What an engine says to prompts that share a prefix, in a cache of which it has six blocks. predicted: answers
    that are drafts."""
    hasher = ChainHasher(bytes(16), BLOCK_SIZE)
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=4, max_batched_tokens=40)
    runner.num_blocks = 6
    ended: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    engine = Engine(runner, config, hasher, ended.put, measure_costs=lambda runner, config: StepCosts())
    draw, seqs = random.Random(4), []
    for number, parameters in enumerate(mixture):
        prompt = [7 * place % 90 for place in range(16)] + [draw.randrange(90) for _ in range(draw.randint(1, 16))]
        sampling = SamplingParams(max_tokens=6 + 2 * number, ignore_eos=number % 2 == 0, **parameters)
        keys = hasher.extend(hasher.root("model"), prompt)
        prediction = [] if predicted is None else predicted[number]
        seqs.append(Sequence(str(number), prompt, sampling, len(prompt), keys, keys[-1], 0.0, prediction=prediction))
    for seq in seqs:
        engine.submit(seq)
    engine.start()
    num_left = len(seqs)
    while num_left:
        num_left -= sum(output.finish is not None for output in ended.get(timeout=240.0).outputs)
    assert engine.stop()
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]


class HeldRunner(TorchRunner):
    """Keeps steps from the device until the one before has ended, so that drafts are proposed."""

    def can_run_ahead(self, step: Step) -> bool:
        return False


def test_answers_with_drafts_that_hold_are_those_of_steps_without() -> None:
    """Drafts are what the answers without them are; the last token of each is another one."""
    found: list[list[list[int]]] = []
    for _ in range(2):
        harness = Harness(torch.float32, DEVICE, is_planned=True)
        recorded = Recorded(RECORDED, (16, 40) if found else ())
        replay = CountedReplay(harness.model, harness.cache, recorded, max_context=100)
        drafter = PredictionDrafter(None) if found else None
        runner = HeldRunner(GpuStepModel(replay), Sampler(CONFIG.vocab_size), 100, drafter)
        predicted = [[*tokens[:-1], (tokens[-1] + 1) % 90] for tokens in found[0]] if found else None
        found.append(answers(runner, MIXTURE[:3], predicted))

    assert found[0] == found[1]
    assert replay.num_mixed > 2
    assert replay.num_steps < sum(map(len, found[0])) / 2
