"""Replay of Mooncake's traces: do the prompts that the load tester makes up share prefixes as the trace says? Nothing
is sent.

    python -m bench.mooncake [--data FOLDER]

Compared are ideal hit rates (a cache that never forgets, leading blocks): of the prompts, in blocks of round(512 s)
tokens, and of the hash_ids as they stand in the file. Prompts are token ids, and text that the demo model's tokenizer
encodes. Unscaled the two must be equal, scaled by s within one point.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

from bench.support.report import Row, write_report
from penstock.text.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock_loadtest.scenario import Kind, Prompts, Scenario, Trace
from penstock_loadtest.workload.hit_rate import measure_hit_rate
from penstock_loadtest.workload.plan import draw_plan

TRACES = ("conversation", "synthetic")
SCALES = tuple(map(Fraction, ("1", "1/4", "1/8", "1/16", "1/32", "0.07")))
TOLERANCE = 0.01


class Rate(NamedTuple):
    """Hit rates of one trace at one scale: by the trace's ids, and by the prompts."""

    name: str
    scale: Fraction
    trace: float
    prompts: float

    @property
    def is_kept(self) -> bool:
        return abs(self.prompts - self.trace) <= (0 if self.scale == 1 else TOLERANCE)


def rate_in_file(path: Path) -> float:
    """Hit rate straight from the JSON of a trace: an id that a trace repeats stands behind the same ids as before, so
    the leading known ids are the hits."""
    seen: set[int] = set()
    hits = total = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            ids = json.loads(line)["hash_ids"]
            hits += next((place for place, name in enumerate(ids) if name not in seen), len(ids))
            total += len(ids)
            seen.update(ids)
    return hits / total


def prompts_of(path: Path, scale: Fraction, source: Literal["words", "tokens"]) -> Iterator[str | list[int]]:
    """Prompts of the trace at `path` as `penstock-loadtest run` would send them to /v1/completions."""
    kind = Kind(endpoint="completions", prompts=Prompts(source=source))
    trace = Trace(format="mooncake", path=path, token_scale=float(scale))
    return (planned.prompt for planned in draw_plan(Scenario(trace=trace, kinds=[kind], duration_s=None)))


def as_ids(path: Path, scale: Fraction) -> Iterator[list[int]]:
    for prompt in prompts_of(path, scale, "tokens"):
        assert isinstance(prompt, list)
        yield prompt


def as_text(path: Path, scale: Fraction, tokenizer: Tokenizer) -> Iterator[list[int]]:
    for prompt in prompts_of(path, scale, "words"):
        assert isinstance(prompt, str)
        yield tokenizer.encode(prompt, False)


def measure(folder: Path) -> Iterator[Rate]:
    tokenizer = load_tokenizer(resolve("demo"))
    for name in TRACES:
        path = folder / f"{name}_trace.jsonl"
        truth = rate_in_file(path)
        for scale in SCALES:
            block_tokens = round(512 * scale)
            yield Rate(
                f"{name}, s = {scale}, token ids", scale, truth, measure_hit_rate(as_ids(path, scale), block_tokens)
            )
            yield Rate(
                f"{name}, s = {scale}, text",
                scale,
                truth,
                measure_hit_rate(as_text(path, scale, tokenizer), block_tokens),
            )


def cpu_per_prompt_s(folder: Path) -> tuple[float, float]:
    """CPU time of planning one request, its prompt made of token ids; a mean over the unscaled conversation trace; and
    that prompt's mean length."""
    start = time.process_time()
    lengths = [len(prompt) for prompt in as_ids(folder / f"{TRACES[0]}_trace.jsonl", Fraction(1))]
    return (time.process_time() - start) / len(lengths), sum(lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("PENSTOCK_TEST_DATA") or None,
        help="folder with mooncake/*.jsonl (default: $PENSTOCK_TEST_DATA)",
    )
    options = parser.parse_args()
    if options.data is None:
        parser.error("name the folder of the traces as --data, or set PENSTOCK_TEST_DATA")
    folder = options.data / "mooncake"
    rates = list(measure(folder))
    seconds, tokens = cpu_per_prompt_s(folder)
    rows = [Row(rate.name, 100 * rate.prompts, 100 * rate.trace, "%") for rate in rates]
    rows.append(Row("planning one request of token ids", 1e3 * seconds, None, "CPU ms"))
    worst = max(rates, key=lambda rate: abs(rate.prompts - rate.trace))
    notes = [
        "ours: ideal hit rate of the prompts; rival: of the trace's hash_ids",
        f"largest difference: {100 * abs(worst.prompts - worst.trace):.4f} points ({worst.name}); a prompt has "
        f"{tokens:,.0f} tokens on average",
    ]
    write_report("mooncake", rows, notes=notes)
    if broken := [rate.name for rate in rates if not rate.is_kept]:
        raise SystemExit(f"The hit rate is not the trace's: {'; '.join(broken)}.")


if __name__ == "__main__":
    main()
