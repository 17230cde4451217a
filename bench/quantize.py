"""What 4 bits cost the demo model: perplexity of `penstock quantize`'s checkpoints beside bfloat16 and plain rounding,
on text no calibration saw.

    PENSTOCK_TEST_DATA=FOLDER python -m bench.quantize [--group-size 128 64] [--sequences 32]

FOLDER/text holds real text: for calibration chats and questions (aibrix_sharegpt_8min.jsonl, gsm8k_train3000.jsonl),
for evaluation spec_bench.jsonl and shakespeare.txt.gz. Without it this project's own documents are used, README.md,
CONTRIBUTING.md and docs/decisions for calibration, docs/*.md for evaluation; the report says which. The demo model's
weights were rounded once already, to groups of 32 (Q4_1), so larger groups lose more on it than on a model that was
never rounded. Fails (status 1) where AWQ recovers less than 20 % of plain rounding's loss in groups of 128, or in
groups of 64 not more than in those of 128. What the engine rounds while it computes, and what that costs, is
bench.quality's.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from bench.support.report import Row, write_report
from penstock.cli.quantize import read_text
from penstock.workers.quantize.quantize import Plan, evaluation_tokens, model_perplexity, quantize_checkpoint

MAX_TOKENS = 8192
LEAST_RECOVERED = 20.0
"""Percent of plain rounding's loss that AWQ must recover."""
MAX_CHARS = 60_000
"""Characters of a file that are read at most."""
CALIBRATION = ("aibrix_sharegpt_8min.jsonl", "gsm8k_train3000.jsonl")
EVALUATION = ("spec_bench.jsonl", "shakespeare.txt.gz")
ROOT = Path(__file__).resolve().parents[1]


class Texts(NamedTuple):
    calibration: str
    held_out: dict[str, str]
    """Texts for evaluation, by name."""
    origin: str


def find_texts(data: str | None) -> Texts:
    if data:
        folder = Path(data) / "text"
        by_name = {name: read_text(folder / name)[:MAX_CHARS] for name in CALIBRATION + EVALUATION}
        return Texts(
            "\n\n".join(by_name[name] for name in CALIBRATION),
            {name: by_name[name] for name in EVALUATION},
            "public datasets",
        )
    written = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "decisions").glob("*.md")))
    calibration = "\n\n".join(read_text(path) for path in written)
    documents = "\n\n".join(read_text(path) for path in sorted((ROOT / "docs").glob("*.md")))
    return Texts(calibration, {"docs/*.md": documents}, "this project's documents (PENSTOCK_TEST_DATA is not set)")


def _say(done: int, total: int) -> None:
    print(f"layer {done} of {total}", file=sys.stderr, end="\r")


def group_rows(
    group_size: int,
    sequences: int,
    calibration: str,
    held_out: dict[str, Tensor],
    dense: dict[str, float],
    folder: Path,
) -> Iterator[Row]:
    """Makes a checkpoint and compares; a comparison's row has AWQ as ours and rounding as the rival."""
    out = folder / f"awq-{group_size}"
    begun_s = time.perf_counter()
    quantize_checkpoint(Plan("demo", out, calibration, group_size, sequences), _say)
    yield Row(f"time to quantize, group {group_size}", time.perf_counter() - begun_s, None, "s")
    yield Row(
        f"size of the checkpoint, group {group_size}",
        sum(path.stat().st_size for path in out.iterdir()) / 1e6,
        None,
        "MB",
    )
    for name, ids in held_out.items():
        awq, rounded = model_perplexity(str(out), ids), model_perplexity("demo", ids, group_size=group_size)
        yield Row(f"perplexity on {name}, group {group_size}: AWQ (ours), round to nearest (rival)", awq, rounded, "")
        yield Row(recovered(name, group_size), 100 * (rounded - awq) / (rounded - dense[name]), None, "%")


def recovered(name: str, group_size: int) -> str:
    return f"share of rounding's loss that AWQ recovers on {name}, group {group_size}"


def is_good(rows: Iterable[Row], names: Iterable[str], group_sizes: Iterable[int]) -> bool:
    """Whether enough is recovered, and the more the smaller the groups."""
    found = {row.name: row.ours for row in rows if row.ours is not None}
    by_size = ([found[recovered(name, size)] for size in sorted(group_sizes, reverse=True)] for name in names)
    return all(
        shares[0] >= LEAST_RECOVERED and all(less < more for less, more in pairwise(shares)) for shares in by_size
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Perplexity of 4-bit checkpoints.")
    parser.add_argument("--group-size", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--sequences", type=int, default=32)
    options = parser.parse_args()
    calibration, held_out, origin = find_texts(os.environ.get("PENSTOCK_TEST_DATA"))
    ids = {name: evaluation_tokens("demo", text, MAX_TOKENS) for name, text in held_out.items()}
    dense = {name: model_perplexity("demo", tokens) for name, tokens in ids.items()}
    rows = [Row(f"perplexity on {name}, bfloat16", value, None, "") for name, value in dense.items()]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for group_size in options.group_size:
            rows += group_rows(group_size, options.sequences, calibration, ids, dense, Path(folder))
    rows.append(Row("most memory, all of it", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, None, "MB"))
    notes = [
        f"SmolLM2-135M-Instruct; at most {options.sequences} calibration sequences of 512 tokens; {MAX_TOKENS} tokens "
        "of each evaluation text at most",
        f"texts: {origin}",
    ]
    write_report("quantize", rows, notes=notes)
    return 0 if is_good(rows, ids, options.group_size) else 1


if __name__ == "__main__":
    sys.exit(main())
