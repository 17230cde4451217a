"""Adapters at full speed: what they cost beside base weights in 4 bits, and what a load costs the streams that run.

    python -m bench.adapters [--rounds 7] [--tokens 48]

The demo model (Q4_1) in the engine, as a replica builds it, without stream, router or Redis; adapters are of all
seven linear layers of a decoder layer. Sixteen sequences decode greedily: base only; one of them with an adapter of
rank 16; all with that one; all with eight adapters of ranks 4 to 64, two sequences each; and the same with adapters of
peft's default for this family, q_proj and v_proj. The cases take turns, a round each, and what a round gives is
compared with its own base. Wanted: eight adapters at no less than 0.85 of base only. Beside tokens a second stands the
process's CPU time, which other work on the machine disturbs less; with one thread nobody in it waits for another.

Then 32 sequences decode while an adapter of rank 16 is loaded, again and again, in windows that take turns with
windows without. Wanted: p99 of the time between two tokens of a sequence rises by no more than a median step.

The record is of the level of our kernels that this CPU has (adapters_avx2.json).
"""

import argparse
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

from bench.engine import level
from bench.support.adapter_files import write_adapter
from bench.support.report import Row, write_report
from penstock.adapters.store import digest_of
from penstock.base.cores import available_cores
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import resolve
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import AdapterSlots, EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Resident, Sequence

STREAMS = 16
PROMPT_TOKENS = 32
RANKS = (4, 8, 8, 16, 16, 32, 32, 64)
ALONE = 3
"""Place in RANKS of the adapter that is used alone."""
GOAL = 0.85
BASE = "base only"
CASES: dict[str, list[int | None]] = {
    BASE: [None] * STREAMS,
    "1 of 16 with an adapter": [ALONE] + [None] * (STREAMS - 1),
    "16 of 16 with one adapter": [ALONE] * STREAMS,
    "8 adapters of ranks 4 to 64": [place % len(RANKS) for place in range(STREAMS)],
    "8 adapters of ranks 4 to 64, of q_proj and v_proj": [len(RANKS) + place % len(RANKS) for place in range(STREAMS)],
}
"""Adapter of each sequence, as a place in RANKS; behind those of all linear layers are those of FEW."""
MIXED = list(CASES)[3]
FEW = ("q_proj", "v_proj")
LOAD_STREAMS, LOAD_TOKENS = 32, 96
LOAD_GAP_S = 0.3
"""Time from the end of one load to the beginning of the next."""


class Found(NamedTuple):
    """What a run of sequences took."""

    tokens: int
    """Tokens of all answers but those that came before every sequence had one."""
    decode_s: float
    """Time from the first moment at which all sequences had a token to the end."""
    cpu_s: float
    """The process's, in that time."""
    gaps_s: list[float]
    """Time between two tokens of a sequence, of all of them."""


class Bench:
    """An engine, its adapters, and sequences that are never asked twice."""

    def __init__(self, folder: Path, threads: int) -> None:
        source = resolve("demo")
        config = EngineConfig(
            threads=threads,
            kv_memory_bytes=400_000_000,
            max_num_seqs=LOAD_STREAMS,
            adapters=AdapterSlots(slots=len(RANKS), max_rank=max(RANKS)),
        )
        self._hasher = ChainHasher(bytes(32), config.block_size)
        self._runner: TorchRunner = load_runner(source, config)
        self._folder = folder
        self._model = read_config(source)
        self.folders = [
            write_adapter(folder / f"{modules}-{place}", self._model, place, rank, modules)
            for modules in (None, FEW)
            for place, rank in enumerate(RANKS)
        ]
        self._adapters: list[Resident] = [self.load(place) for place in range(len(self.folders))]
        self._reports: queue.SimpleQueue[tuple[float, StepReport] | None] = queue.SimpleQueue()
        self._engine = Engine(self._runner, config, self._hasher, self._on_step)
        self._engine.start()
        self._asked = 0

    def load(self, place: int) -> Resident:
        folder = self.folders[place]
        return self._runner.load_adapter(digest_of(folder), folder, max(RANKS))

    def run(self, adapters: Seq[int | None], max_tokens: int) -> Found:
        """Answers of so many tokens to one new prompt each, all at once."""
        seqs = [self._sequence(None if place is None else self._adapters[place], max_tokens) for place in adapters]
        for seq in seqs:
            self._engine.submit(seq)
        last_s: dict[Sequence, float] = {}
        gaps_s: list[float] = []
        num_ended, num_tokens, num_before, now = 0, 0, 0, 0.0
        begun_s: float | None = None
        cpu_s = 0.0
        while num_ended < len(seqs):
            item = self._reports.get(timeout=120)
            assert item is not None
            now, report = item
            for output in report.outputs:
                if output.seq in last_s:
                    gaps_s.append(now - last_s[output.seq])
                last_s[output.seq] = now
                num_tokens += len(output.token_ids)
                if output.finish is not None:
                    if output.finish is not Finish.LENGTH:
                        raise RuntimeError(f"a sequence ended with {output.finish}: {output.seq.error}")
                    num_ended += 1
            if begun_s is None and len(last_s) == len(seqs):
                begun_s, num_before, cpu_s = now, num_tokens, time.process_time()
        assert begun_s is not None
        return Found(num_tokens - num_before, now - begun_s, time.process_time() - cpu_s, gaps_s)

    def close(self) -> None:
        self._engine.stop()
        self._runner.close()

    def _sequence(self, adapter: Resident | None, max_tokens: int) -> Sequence:
        self._asked += 1
        ids = [1000 + (7919 * self._asked + 104729 * number) % 40_000 for number in range(PROMPT_TOKENS)]
        root = self._hasher.root("bench", None if adapter is None else adapter.digest)
        keys = self._hasher.extend(root, ids)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Sequence(
            str(self._asked), ids, sampling, len(ids), keys, keys[-1] if keys else root, time.monotonic(), lora=adapter
        )

    def _on_step(self, report: StepReport) -> None:
        self._reports.put((time.perf_counter(), report))


def speeds(bench: Bench, rounds: int, tokens: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens a second of each case, by round, and tokens a second of CPU time."""
    found: dict[str, list[float]] = {name: [] for name in CASES}
    of_cpu: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(rounds + 1):
        for name, adapters in CASES.items():
            run = bench.run(adapters, tokens)
            if number:  # the first round warms
                found[name].append(run.tokens / run.decode_s)
                of_cpu[name].append(run.tokens / run.cpu_s)
        if number:
            said = {name: (round(each[-1], 1), round(of_cpu[name][-1], 1)) for name, each in found.items()}
            print(said, file=sys.stderr, flush=True)
    return found, of_cpu


class Loader:
    """A thread that loads an adapter again and again while a window is open, and forgets it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.took_s: list[float] = []

    def __enter__(self) -> "Loader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOAD_GAP_S):
            begun_s = time.perf_counter()
            self._bench.load(ALONE)
            self.took_s.append(time.perf_counter() - begun_s)


class Loading(NamedTuple):
    """Time between two tokens beside loads and without them, seconds."""

    beside: list[float]
    alone: list[float]
    took_s: list[float]
    """Time of each load."""

    @property
    def rise_s(self) -> float:
        return quantile(self.beside, 0.99) - quantile(self.alone, 0.99)


def loading(bench: Bench, windows: int) -> Loading:
    found = Loading([], [], [])
    adapters = [place % len(RANKS) if place % 2 else None for place in range(LOAD_STREAMS)]
    for _ in range(windows):
        found.alone.extend(bench.run(adapters, LOAD_TOKENS).gaps_s)
        with Loader(bench) as loader:
            found.beside.extend(bench.run(adapters, LOAD_TOKENS).gaps_s)
        found.took_s.extend(loader.took_s)
    return found


def quantile(values: Seq[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def speed_rows(found: dict[str, list[float]], unit: str) -> list[Row]:
    rows = []
    for name, each in found.items():
        rows.append(Row(f"{name} (rival: {BASE})", statistics.median(each), statistics.median(found[BASE]), unit))
        if name != BASE:
            rows.append(Row(f"{name}: of {BASE}, median of rounds", share(found, name), None, ""))
    return rows


def share(found: dict[str, list[float]], name: str) -> float:
    return statistics.median(ours / base for ours, base in zip(found[name], found[BASE], strict=True))


def loading_rows(found: Loading) -> list[Row]:
    rows = [
        Row(
            f"time between two tokens of 32 sequences, p{100 * q:g}, while adapters load (rival: while none does)",
            1e3 * quantile(found.beside, q),
            1e3 * quantile(found.alone, q),
            "ms",
        )
        for q in (0.5, 0.9, 0.99)
    ]
    rows.append(Row("rise of p99 (rival: a median step)", 1e3 * found.rise_s, 1e3 * quantile(found.alone, 0.5), "ms"))
    rows.append(Row("a load beside them, median", 1e3 * statistics.median(found.took_s), None, "ms"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--windows", type=int, default=3, help="with loads, and as many without")
    parser.add_argument("--threads", type=int, default=available_cores())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        bench = Bench(Path(folder), options.threads)
        found, of_cpu = speeds(bench, options.rounds, options.tokens)
        rows = speed_rows(found, "tokens/s") + speed_rows(of_cpu, "tokens/s of CPU")
        loads = loading(bench, options.windows) if options.windows else None
        bench.close()
    is_good = share(found, MIXED) >= GOAL
    if loads is not None:
        rows += loading_rows(loads)
        is_good = is_good and loads.rise_s <= quantile(loads.alone, 0.5)
    notes = [
        f"SmolLM2-135M-Instruct (Q4_1), {options.threads} threads, {options.rounds} rounds of {options.tokens} tokens "
        f"to prompts of {PROMPT_TOKENS}; adapters of ranks {', '.join(map(str, RANKS))}",
    ]
    write_report("adapters", rows, notes=notes, variant=level() + ("" if options.threads > 1 else "_one_thread"))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
