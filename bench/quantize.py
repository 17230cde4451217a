"""What 4 bits cost the demo model: perplexity of `penstock quantize`'s checkpoints beside bfloat16 and plain rounding, on text no calibration saw.

    PENSTOCK_TEST_DATA=FOLDER python -m bench.quantize [--group-size 128 64] [--sequences 32]

Calibration: chats and questions (aibrix_sharegpt_8min.jsonl, gsm8k_train3000.jsonl). Evaluation: spec_bench.jsonl and shakespeare.txt.gz. The demo model's
weights were rounded once already, to groups of 32 (Q4_1), so larger groups lose more on it than on a model that was never rounded.
Fails (status 1) when AWQ is not better than plain rounding.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.report import Row, write_report
from penstock.cli.quantize import read_text
from penstock.workers.quant.quantize import Method, Plan, model_perplexity, quantize_checkpoint

MAX_TOKENS = 8192
CALIBRATION_CHARS = 60_000


def texts(data: Path) -> tuple[str, dict[str, str]]:
    """Calibration, and evaluation by name."""
    folder = data / "text"
    calibration = "\n\n".join(read_text(folder / name)[:CALIBRATION_CHARS] for name in ("aibrix_sharegpt_8min.jsonl", "gsm8k_train3000.jsonl"))
    return calibration, {name: read_text(folder / name)[:CALIBRATION_CHARS] for name in ("spec_bench.jsonl", "shakespeare.txt.gz")}


def _say(done: int, total: int) -> None:
    print(f"layer {done} of {total}", file=sys.stderr, end="\r")


def main() -> int:
    parser = argparse.ArgumentParser(description="Perplexity of 4-bit checkpoints.")
    parser.add_argument("--group-size", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--sequences", type=int, default=32)
    options = parser.parse_args()
    data = os.environ.get("PENSTOCK_TEST_DATA")
    if not data:
        print("PENSTOCK_TEST_DATA names no folder of texts", file=sys.stderr)
        return 2
    calibration, held_out = texts(Path(data))
    rows, is_better = [], True
    dense = {name: model_perplexity("demo", text, MAX_TOKENS) for name, text in held_out.items()}
    rows += [Row(f"perplexity on {name}, bfloat16", value, None, "") for name, value in dense.items()]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for group_size in options.group_size:
            found: dict[Method, dict[str, float]] = {}
            seconds: dict[Method, float] = {}
            methods: tuple[Method, ...] = ("awq", "rtn")
            for method in methods:
                out = Path(folder) / f"{method}-{group_size}"
                begun = time.perf_counter()
                quantize_checkpoint(Plan("demo", out, calibration, group_size, options.sequences, method), _say)
                seconds[method] = time.perf_counter() - begun
                found[method] = {name: model_perplexity(str(out), text, MAX_TOKENS) for name, text in held_out.items()}
            for name in held_out:
                rows.append(Row(f"perplexity on {name}, group {group_size}: AWQ (ours), round to nearest (rival)", found["awq"][name], found["rtn"][name], ""))
                lost = found["rtn"][name] - dense[name]
                rows.append(
                    Row(
                        f"share of rounding's loss that AWQ recovers on {name}, group {group_size}",
                        100 * (found["rtn"][name] - found["awq"][name]) / lost,
                        None,
                        "%",
                    )
                )
                is_better = is_better and found["awq"][name] < found["rtn"][name]
            rows.append(Row(f"time to quantize, group {group_size}: AWQ (ours), round to nearest (rival)", seconds["awq"], seconds["rtn"], "s"))
    write_report(
        "quantize",
        rows,
        notes=[f"SmolLM2-135M-Instruct; {options.sequences} calibration sequences of 512 tokens; {MAX_TOKENS} tokens of each evaluation text at most"],
    )
    return 0 if is_better else 1


if __name__ == "__main__":
    sys.exit(main())
