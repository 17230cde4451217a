"""Runners of one process and of several, and an engine without threads around either."""

import queue
import random
import subprocess

import msgspec

from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.wire.frames import BeamOutput, Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.lora import LoraAdapter
from penstock.workers.compute.parallel.steps import ParallelStepModel
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Sequence
from tests.unit.workers.paged_hash import make_sequence
from tests.unit.workers.tiny_models import BLOCK_SIZE, engine_config


def config(size: int, method: str = "none") -> EngineConfig:
    return msgspec.structs.replace(
        engine_config(200),
        tensor_parallel_size=size,
        max_batched_tokens=150,
        stall_s=20.0,
        speculation=SpeculationConfig(method=method, max_draft_tokens=3),
    )


class Parts:
    """A runner in parts, and what was said when one was lost."""

    def __init__(self, source: ModelSource, size: int, method: str = "none") -> None:
        self.losses: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.runner = load_runner(source, config(size, method), poison=True, on_loss=self.losses.put)

    @property
    def steps(self) -> ParallelStepModel:
        steps = self.runner._steps
        assert isinstance(steps, ParallelStepModel)
        return steps

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return self.steps._ranks._processes


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed + 100 * i).randrange(96) for i in range(length)]


def ask(
    length: int, number: int, max_tokens: int = 12, adapter: LoraAdapter | None = None, **sampling: object
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
    secret = bytes(16) if adapter is None else bytes(range(16))  # what others compute is of no use to it
    seq = make_sequence(ChainHasher(secret, BLOCK_SIZE), prompt(length, number), params)
    seq.lora = adapter
    return seq


def run(runner: TorchRunner, *seqs: Sequence) -> list[list[int]]:
    """The outputs of all sequences, in one engine."""
    run_engine(runner, *seqs)
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]


def search(runner: TorchRunner, seq: Sequence) -> list[list[int]]:
    """What a beam search finds."""
    return [list(beam.token_ids) for beam in run_engine(runner, seq)[seq]]


def run_engine(runner: TorchRunner, *seqs: Sequence) -> dict[Sequence, list[BeamOutput]]:
    """The sequences to their ends, in one engine, and the beams of those that search."""
    beams: dict[Sequence, list[BeamOutput]] = {}
    pool = BlockPool(runner.num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        pool, ChainHasher(bytes(16), BLOCK_SIZE), config(1, "ngram"), runner.max_model_len, frozenset()
    )
    for seq in seqs:
        assert scheduler.add(seq)
    while scheduler.has_work:
        step = scheduler.schedule()
        runner.poison(pool.garbage())
        for output in scheduler.commit(step, runner.launch(step)()):
            if output.beams is not None:
                beams[output.seq] = output.beams
        pool.check(scheduler.sequences())
    for seq in seqs:
        runner.forget(seq)
    assert {seq.finish for seq in seqs} <= {Finish.LENGTH, Finish.STOP}
    return beams
