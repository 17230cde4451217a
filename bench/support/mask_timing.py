"""What masks add to the engine's steps, on the demo model: the same steps with a constrained row and without, in turn.

16 rows are free, and the 17th is constrained (B), or free too (A, and once more as N: what the machine alone makes of
the same steps). A step of each follows the other, so that what slows the machine down slows all.
"""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from bench.support.json_schemas import SchemaTask
from penstock.text.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.wire.frames import Constraint, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Chunk, Step
from penstock.workers.engine.sequence import Sequence as Row

NUM_FREE = 16
PROMPT_TOKENS = 40
MAX_TOKENS = 120
"""Tokens after which a row begins again."""
WARM_STEPS = 5
PAUSE_S = 0.03
"""Time between two compilations."""


class StepTimes(NamedTuple):
    """Seconds of the steps of one kind, in the order in which they ran; and what the constrained row made of them."""

    free: list[float]
    free_again: list[float]
    masked: list[float]
    num_late: int
    """Steps in which the constrained row got no token."""
    num_answers: int
    """Constrained answers that were begun."""


class Slot:
    """A place in a batch with blocks of its own, whose rows follow each other."""

    def __init__(self, runner: TorchRunner, blocks: Iterator[int], block_size: int, temperature: float) -> None:
        self._runner = runner
        num_blocks = -(-(PROMPT_TOKENS + MAX_TOKENS + 1) // block_size)
        self._block_table = [next(blocks) for _ in range(num_blocks)]
        self._temperature = temperature
        self._numbers = count()

    def begin(self, prompt: list[int], wanted: Constraint | None = None) -> Row:
        """A row whose prompt is read and whose first token is chosen."""
        number = next(self._numbers)
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=self._temperature, seed=number, ignore_eos=wanted is None
        )
        row = Row("bench", list(prompt), sampling, len(prompt), [], b"", 0.0, block_table=self._block_table)
        if wanted is not None:
            row.constrain(self._runner.compile_grammar(wanted, "bench", []))
        while row.num_output_tokens == 0:
            extend(self._runner, [Chunk(row, 0, len(row.token_ids))])
        return row


def extend(runner: TorchRunner, chunks: list[Chunk]) -> tuple[float, list[bool]]:
    """A step: its seconds, and which of its rows have ended by their grammar. Raises RuntimeError for a row that ended
    with an error."""
    begun_s = time.perf_counter()
    results = runner.launch(Step(chunks, []))()
    seconds = time.perf_counter() - begun_s
    has_ended = []
    for chunk, choices in zip(chunks, results, strict=True):
        for choice in choices:
            if choice.error is not None:
                raise RuntimeError(choice.error)
            chunk.seq.num_computed_tokens = chunk.end
            chunk.seq.token_ids.append(choice.token_id)
        has_ended.append(any(each.is_last or each.token_id in runner.eos_token_ids for each in choices))
    return seconds, has_ended


class Batch:
    """NUM_FREE free rows, and one more, which is constrained where there are constraints."""

    def __init__(
        self,
        runner: TorchRunner,
        slots: list[Slot],
        prompts: Iterator[list[int]],
        constraints: Iterator[Constraint] | None = None,
    ) -> None:
        self._runner, self._slots, self._prompts, self._constraints = runner, slots, prompts, constraints
        self.num_late = self.num_answers = 0
        self._rows = [self._begin(index) for index in range(len(slots))]

    def step(self) -> float:
        """Seconds of a step. Rows that have ended begin again outside of that time."""
        before = self._rows[-1].num_output_tokens
        chunks = [Chunk(row, len(row.token_ids) - 1, 1) for row in self._rows]
        seconds, has_ended = extend(self._runner, chunks)
        is_constrained = self._constraints is not None
        self.num_late += is_constrained and not has_ended[-1] and self._rows[-1].num_output_tokens == before
        for index, row in enumerate(self._rows):
            ends = is_constrained and index == len(self._rows) - 1 and has_ended[index]
            if ends or row.num_output_tokens >= MAX_TOKENS:
                self._runner.forget(row)
                self._rows[index] = self._begin(index)
        return seconds

    def close(self) -> None:
        for row in self._rows:
            self._runner.forget(row)

    def _begin(self, index: int) -> Row:
        wanted = None
        if self._constraints is not None and index == len(self._slots) - 1:
            wanted = next(self._constraints)
            self.num_answers += 1
        return self._slots[index].begin(next(self._prompts), wanted)


class MaskBench:
    """The demo model's runner, and prompts of one length for it."""

    def __init__(self, threads: int | None) -> None:
        self._config = EngineConfig(threads=threads, kv_memory_bytes=600_000_000, max_num_seqs=64)
        self._runner = load_runner(resolve("demo"), self._config)
        self._tokenizer = load_tokenizer(resolve("demo"))
        self._runner.compile_grammar(Constraint("regex", "a"), "bench", [])  # makes the vocabulary

    def time_steps(self, asked: Sequence[SchemaTask], temperature: float, num_steps: int) -> StepTimes:
        blocks, prompts = count(), self._prompts()
        schemas = (Constraint("json_schema", json.dumps(each.schema)) for each in itertools.cycle(asked))

        def batch(constraints: Iterator[Constraint] | None = None) -> Batch:
            slots = [Slot(self._runner, blocks, self._config.block_size, temperature) for _ in range(NUM_FREE + 1)]
            return Batch(self._runner, slots, prompts, constraints)

        batches = batch(), batch(), batch(schemas)
        times: list[list[float]] = [[], [], []]
        for number in range(WARM_STEPS + num_steps):
            for place in range(3):  # each follows each of the others as often
                index = (place + number) % 3
                seconds = batches[index].step()
                if number >= WARM_STEPS:
                    times[index].append(seconds)
        for each in batches:
            each.close()
        return StepTimes(times[0], times[1], times[2], batches[2].num_late, batches[2].num_answers)

    def time_compilation(self, asked: Sequence[SchemaTask]) -> list[float]:
        """Seconds until the first mask of each schema is there, while another thread runs steps of free rows."""
        blocks, prompts, is_over = count(), self._prompts(), threading.Event()
        slots = [Slot(self._runner, blocks, self._config.block_size, 0.0) for _ in range(NUM_FREE)]
        batch = Batch(self._runner, slots, prompts)

        def run() -> None:
            while not is_over.is_set():
                batch.step()

        thread = threading.Thread(target=run, name="steps")
        thread.start()
        found = []
        try:
            for number, each in enumerate(asked):
                time.sleep(PAUSE_S)
                wanted = Constraint("json_schema", json.dumps(each.schema))
                begun_s = time.perf_counter()
                self._runner.compile_grammar(wanted, f"tenant {number}", [])
                found.append(time.perf_counter() - begun_s)
        finally:
            is_over.set()
            thread.join()
            batch.close()
        return found

    def _prompts(self) -> Iterator[list[int]]:
        return (prompt_ids(self._tokenizer, number) for number in itertools.count())


def prompt_ids(tokenizer: Tokenizer, number: int) -> list[int]:
    """A question of PROMPT_TOKENS tokens."""
    text = f"Question {number}: give me some data about rivers, towns and people, as JSON. " * 4
    return tokenizer.encode(text, add_special=False)[:PROMPT_TOKENS]
