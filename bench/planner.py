"""The planner beside reality: KV blocks that `kv_memory_bytes: auto` finds beside those that the plan counts, steps
beside the roofline, and steps outside of a fit beside the fitted costs.

    python -m bench.planner [--cases demo-int4 0.5b-bf16 ...] [--repeats 3]

Models: the demo checkpoint, and random weights in two shapes of 0.5 and 1.2 billion parameters, in bfloat16 and in 4
bits (AutoAWQ's layout), written to a temporary folder. Each runs in a process of its own, on one thread, and is timed
by its CPU time, so that what else the machine does counts little. Rates are measured by the planner's own probe in the
same process, before the steps and after them, and the mean of both counts. The share of the memory is set so that the
plan leaves KV_BYTES for keys and values, where 3 % is little, and not the whole machine's memory, where it would be
much. Fails (status 1) where KV capacity is more than 3 % off, a step more than 30 % off the roofline, or more than 15 %
off the fitted costs.
"""

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench.support.bf16_checkpoint import write_bf16_checkpoint
from bench.support.random_checkpoint import write_random_checkpoint
from bench.support.report import Row, write_report
from penstock.cli.plan.checkpoints import find_model
from penstock.cli.plan.machine import measure_machine
from penstock.perf.planning.formats import KV_FORMATS, held_on_cpu
from penstock.perf.planning.known import known_shape
from penstock.perf.planning.memory import Setting, plan_memory
from penstock.perf.planning.roofline import FittedTimes, Rates, Roofline
from penstock.perf.planning.shape import parse_shape
from penstock.text.source import resolve
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.memory import HostMeter
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import AdapterSlots, EngineConfig
from penstock.workers.engine.probe import make_chunk, measure
from penstock.workers.engine.sequence import Chunk, Step

CONTEXT = 512
KV_BYTES = 1_500_000_000
BLOCK = 16
ERRORS = {"kv": 0.03, "roofline": 0.30, "fit": 0.15}
"""Part by which a prediction may be off."""
SHAPES = {
    "0.5b": "layers=30,hidden=1024,heads=16,kv_heads=8,head_dim=64,inner=4096,vocab=32768,tied=1,context=8192",
    "1b": "llama-3.2-1b",
}
CASES = ("demo-int4", "demo-bf16", "0.5b-int4", "0.5b-bf16", "1b-int4", "1b-bf16")
Compared = dict[str, tuple[float, float]]
"""Predicted and measured, by name."""


class Point(NamedTuple):
    """A step: `rows` sequences that decode behind `context` tokens, and `prefill` tokens of a prompt behind others."""

    name: str
    rows: int = 0
    context: int = 0
    prefill: int = 0
    prefill_context: int = 0

    @property
    def arguments(self) -> dict[str, float]:
        """Amounts that a step's time is predicted from."""
        pairs = self.prefill * (self.prefill_context + self.prefill / 2)
        kv_tokens = self.rows * (self.context + 1)
        return {"rows": self.rows, "prefill_tokens": self.prefill, "query_context": pairs, "kv_tokens": kv_tokens}


ROOFLINE_POINTS = (
    Point("batch 1", 1, CONTEXT),
    Point("batch 8", 8, CONTEXT),
    Point("batch 32", 32, CONTEXT),
    Point("prefill 512", prefill=512),
)
"""Steps of the goal."""
OUTSIDE_POINTS = (
    Point("batch 3, context 300", 3, 300),
    Point("batch 16, context 700", 16, 700),
    Point("batch 24, context 200", 24, 200),
    Point("prefill 384", prefill=384),
    Point("prefill 200 behind 800", prefill=200, prefill_context=800),
    Point("batch 12, context 400, prefill 128", 12, 400, 128),
)
"""Steps that no point of an engine's probe is (`workers.engine.probe`)."""


class Result(NamedTuple):
    """Outcome of a model: comparisons by what they are of, and notes."""

    compared: dict[str, Compared]
    notes: list[str]


def write_model(case: str, folder: Path) -> str:
    """Write the model of a case, where it is not the demo; returns what a pool would name."""
    name, _, form = case.partition("-")
    if case == "demo-int4":
        return "demo"
    if name == "demo":
        write_bf16_checkpoint(folder)
    else:
        shape = known_shape(SHAPES[name]) or parse_shape(SHAPES[name])
        write_random_checkpoint(shape, folder, in_4_bits=form == "int4")
    return str(folder)


class _Told(logging.Handler):
    """What a runner says about its memory."""

    sentence = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "KV cache" in record.getMessage():
            self.sentence = record.getMessage()

    @property
    def total_bytes(self) -> int:
        found = re.search(r"Of ([\d.]+) GiB", self.sentence)
        assert found is not None, self.sentence
        return round(float(found[1]) * 2**30)


def run_case(model: str, repeats: int) -> Result:
    """Measure one model in this process."""
    found = find_model(model, None)
    assert found.form is not None
    form = held_on_cpu(found.form)
    setting = Setting(
        CONTEXT, form, head=found.head, max_num_seqs=32, max_batched_tokens=512, is_gpu=False, memory_share=1.0
    )
    total = HostMeter().total()
    share = (plan_memory(found.shape, setting, total).taken_bytes + KV_BYTES) / total
    slots = AdapterSlots(slots=0)
    config = EngineConfig(threads=1, kv_memory_bytes="auto", memory_share=share, max_num_seqs=32, adapters=slots)
    told = _Told()
    log = logging.getLogger("penstock.runner")
    log.addHandler(told)
    log.setLevel(logging.INFO)
    runner = load_runner(resolve(model), config)

    def probe() -> Rates:
        return measure_machine(found.shape, [form], found.head, 1, time.process_time).rates[form.name]

    rates = [probe()]
    costs = FittedTimes(measure(runner, config, time.process_time))
    times = {point: time_step(runner, point, repeats) for point in (*ROOFLINE_POINTS, *OUTSIDE_POINTS)}
    rates.append(probe())
    lines = [Roofline(found.shape, form, KV_FORMATS["bf16"], each, found.head) for each in rates]
    memory = plan_memory(found.shape, replace(setting, memory_share=share), told.total_bytes)
    roofline = {
        point.name: (sum(line(**point.arguments) for line in lines) / len(lines), times[point])
        for point in ROOFLINE_POINTS
    }
    fit = {point.name: (costs(**point.arguments), times[point]) for point in OUTSIDE_POINTS}
    kv = {"tokens": (float(memory.kv_tokens), float(runner.num_blocks * BLOCK))}
    return Result({"kv": kv, "roofline": roofline, "fit": fit}, [told.sentence, *map(_say_rates, rates)])


def _say_rates(rates: Rates) -> str:
    products = ", ".join(
        f"{flops / 1e9:.0f} at {rows}" for rows, flops in zip(rates.products.rows, rates.products.flops, strict=True)
    )
    return (
        f"{rates.bandwidth / 1e9:.1f} GB/s; products, GFLOP/s by rows: {products}; attention of prompts "
        f"{rates.attention_flops / 1e9:.0f}, of rows {rates.row_attention_flops / 1e9:.0f}"
    )


def time_step(runner: TorchRunner, point: Point, repeats: int) -> float:
    """Median CPU seconds of a step, over contexts that have been written: what never was is all one page, which is
    quick to read."""
    blocks = count()
    chunks = [make_chunk(point.context, 1, blocks, runner.num_blocks, BLOCK) for _ in range(point.rows)]
    if point.prefill:
        chunks.append(make_chunk(point.prefill_context, point.prefill, blocks, runner.num_blocks, BLOCK))
    write_contexts(runner, chunks)
    times = []
    for _ in range(repeats + 1):
        begun_s = time.process_time()
        runner.launch(Step(chunks, []))()
        times.append(time.process_time() - begun_s)
    for chunk in chunks:
        runner.forget(chunk.seq)
    return statistics.median(times[1:])


def write_contexts(runner: TorchRunner, chunks: Sequence[Chunk]) -> None:
    """Compute a block and copy it to all others of these sequences."""
    first = make_chunk(0, BLOCK, count(), runner.num_blocks, BLOCK)
    runner.launch(Step([first], []))()
    (block,) = first.seq.block_table
    others = {each for chunk in chunks for each in chunk.seq.block_table} - {block}
    runner.launch(Step([first], [], [(block, each) for each in others]))()
    runner.forget(first.seq)


def run_apart(case: str, folder: Path, repeats: int) -> Result:
    """Measure a case in a process of its own. Raises RuntimeError where that fails."""
    model = write_model(case, folder / case)
    command = [sys.executable, "-m", "bench.planner", "--model", model, "--repeats", str(repeats)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{case}: {ended.stderr[-2000:]}")
    return _to_result(ended.stdout.splitlines()[-1])


def run_kept(case: str, repeats: int, kept: Path | None) -> Result:
    """Measure a case, or read what an earlier run has kept of it."""
    file = None if kept is None else kept / f"{case}.json"
    if file is not None and file.is_file():
        return _to_result(file.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        result = run_apart(case, Path(folder), repeats)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result), encoding="utf-8")
    return result


def _to_result(text: str) -> Result:
    compared, notes = json.loads(text)
    return Result(
        {kind: {name: tuple(pair) for name, pair in found.items()} for kind, found in compared.items()}, notes
    )


def rows_of(case: str, result: Result) -> Iterator[Row]:
    """Predicted beside measured: tokens of KV, milliseconds of steps."""
    for kind, compared in result.compared.items():
        unit, factor = ("tokens", 1.0) if kind == "kv" else ("ms", 1000.0)
        for name, (predicted, measured) in compared.items():
            yield Row(f"{case}, {kind}: {name}", factor * predicted, factor * measured, unit)


def missed(case: str, result: Result) -> Iterator[str]:
    """Goals that are missed, a sentence each."""
    for kind, compared in result.compared.items():
        for name, (predicted, measured) in compared.items():
            if abs(predicted / measured - 1) > ERRORS[kind]:
                yield f"missed: {case}, {kind}, {name}: predicted / measured is {predicted / measured:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kept", type=Path, help="folder of cases that are done; what it has is not run again")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is not None:
        sys.stdout.write(json.dumps(run_case(options.model, options.repeats)) + "\n")
        return 0
    rows: list[Row] = []
    notes = ["predicted by the plan beside measured; CPU time of one thread"]
    failures: list[str] = []
    for case in options.cases:
        result = run_kept(case, options.repeats, options.kept)
        rows.extend(rows_of(case, result))
        notes.extend(f"{case}: {note}" for note in result.notes)
        failures.extend(missed(case, result))
    write_report("planner", rows, notes=[*notes, *failures])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
