"""What a step costs whose rows verify drafts: rows of one sequence, and single rows of several, beside one row.

    python -m bench.verification [--rounds 40] [--context 256]

The demo model's runner, as a replica builds it, in 4 bits and with bfloat16 weights; greedy sampling and the check of
the drafts are included. All kinds of step take turns in an order that is drawn anew each round, and each is compared
with the one row of its own round; medians count. Nothing is kept from one step to the next, so each is the same step
again. Wanted on CPUs with AVX-512: 4 rows at no more than 1.4 of one row, 8 rows 1.8, 8 sequences 1.9. Nothing else may
run: half a minute.
"""

import argparse
import random
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import median

from bench.engine import level
from bench.support.bf16_checkpoint import write_bf16_checkpoint
from bench.support.report import Row, write_report
from penstock.base.cores import available_cores
from penstock.text.source import ModelSource, resolve
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step

MOST = 8
ONE = "1 row"
ROWS = {f"{number} rows of one sequence" if number > 1 else ONE: number for number in range(1, MOST + 1)}
SEQUENCES = {f"{number} sequences": number for number in (2, 4, 8, 16)}
GOALS = {"4 rows of one sequence": 1.4, "8 rows of one sequence": 1.8, "8 sequences": 1.9}
WARMING = 3


class Steps:
    """Steps behind the same context, computed again and again."""

    def __init__(self, runner: TorchRunner, block_size: int, context: int) -> None:
        self._runner = runner
        blocks = count()
        self._seqs = [self._sequence(row, context, block_size, blocks) for row in range(max(SEQUENCES.values()))]
        for seq in self._seqs:
            runner.launch(Step([Chunk(seq, 0, context)], []))()
            seq.num_computed_tokens = context

    def _sequence(self, row: int, context: int, block_size: int, blocks: "count[int]") -> Sequence:
        ids = [1000 + (7919 * row + 104_729 * place) % 40_000 for place in range(context + 1)]
        table = [next(blocks) for _ in range(-(-(context + 1 + MOST) // block_size))]
        sampling = SamplingParams(max_tokens=MOST, temperature=0.0, ignore_eos=True)
        drafts = [2000 + 31 * place for place in range(MOST)]
        return Sequence(f"row {row}", ids, sampling, len(ids), [], b"", 0.0, block_table=table, prediction=drafts)

    def rows(self, number: int) -> float:
        """Seconds of a step of the first sequence's next token and number - 1 drafts."""
        seq = self._seqs[0]
        chunk = Chunk(seq, len(seq.token_ids) - 1, 1, number - 1)
        seconds = self._timed([chunk])
        if len(chunk.draft or ()) != number - 1:
            raise RuntimeError(f"{len(chunk.draft or ())} drafts were computed, not {number - 1}")
        return seconds

    def sequences(self, number: int) -> float:
        """Seconds of a step of one row of each of the first `number` sequences."""
        return self._timed([Chunk(seq, len(seq.token_ids) - 1, 1) for seq in self._seqs[:number]])

    def _timed(self, chunks: list[Chunk]) -> float:
        """Seconds of the second of two such steps: the first has what the step before left in the caches."""
        self._runner.launch(Step(chunks, []))()
        begin = time.perf_counter()
        self._runner.launch(Step(chunks, []))()
        return time.perf_counter() - begin


def measured(source: ModelSource, threads: int, context: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind of step, one of each round."""
    config = EngineConfig(threads=threads, kv_memory_bytes=256 << 20)
    steps = Steps(load_runner(source, config), config.block_size, context)
    found: dict[str, list[float]] = {name: [] for name in (*ROWS, *SEQUENCES)}
    names, rng = list(found), random.Random(17)
    for number in range(WARMING + rounds):
        rng.shuffle(names)
        for name in names:
            seconds = steps.rows(ROWS[name]) if name in ROWS else steps.sequences(SEQUENCES[name])
            if number >= WARMING:
                found[name].append(seconds)
    return found


def table(weights: str, found: dict[str, list[float]]) -> list[Row]:
    """Medians in milliseconds of each kind of step, the one row's as the rival, and of each round's ratio."""
    rows = []
    for name, seconds in found.items():
        rows.append(Row(f"{weights}, {name}", 1e3 * median(seconds), 1e3 * median(found[ONE]), "ms"))
        if name != ONE:
            rows.append(Row(f"{weights}, {name}: of one row, median of rounds", ratio(found, name), None, ""))
    return rows


def ratio(found: dict[str, list[float]], name: str) -> float:
    return median(of_all / of_one for of_all, of_one in zip(found[name], found[ONE], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--context", type=int, default=256, help="tokens behind which the steps are")
    parser.add_argument("--threads", type=int, default=available_cores())
    options = parser.parse_args()
    rows, notes = [], [f"{options.threads} threads, behind {options.context} tokens; our kernels at level {level()}"]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        write_bf16_checkpoint(Path(name))
        for weights, source in (("4 bits", resolve("demo")), ("bfloat16", resolve(name))):
            found = measured(source, options.threads, options.context, options.rounds)
            rows += table(weights, found)
            said = ", ".join(f"{what} {ratio(found, what):.2f} (goal {goal})" for what, goal in GOALS.items())
            notes.append(f"{weights}: {said}")
    write_report("verification", rows, notes=notes, variant=level())


if __name__ == "__main__":
    main()
