"""What the engine's roundings cost the demo model: perplexity by the CPU kernels that serve it, one rounding changed at
a time, on text no calibration saw.

    PENSTOCK_TEST_DATA=FOLDER python -m bench.quality [--tokens 8192] [--threads 2] [--model demo]

Texts: those of bench.quantize, which has the figures of AWQ's checkpoints. The demo model's matrices are Q4_1 and its
table is Q8_0; both are computed with as they are, so against the checkpoint's own lattice nothing is rounded but what a
row names:

* activations in one term of int8 (`W4A8`, `engine.activations: int8`, what the default takes for many rows) against
  bfloat16 ones (`W4A16`);
* activations in two terms of int8 (`engine.activations: int16`, what the default takes for up to four rows and for
  short prompts where the CPU has no AVX-512 VNNI) against bfloat16 ones;
* in one term, and a second one for the four columns of each 32 that are largest (what the default takes there where it
  has), against bfloat16 ones;
* an int8 KV cache against one in bfloat16;
* `engine.lm_head: int4` against the table as it is. int8 is what it is, so that row would compare a thing with itself.

Text is read in steps of 4 tokens, since outside of short prompts the default has outliers for no more, and with two
terms steps of many rows may be computed in bfloat16 anyway.

Fails (status 1) where W4A8 costs more than 0.5 %, two terms more than 0.1 %, outliers more than 0.2 % or int8 KV more
than 0.3 %, on any text.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bench.quantize import MAX_TOKENS, find_texts
from bench.support.report import Row, print_table, write_report
from penstock.base.cores import available_cores
from penstock.text.source import resolve
from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.kernels.decoder import Activations
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.fused import FusedLlama
from penstock.workers.compute.quant.packed import pack_all
from penstock.workers.compute.weights import Head, read_weights
from penstock.workers.quantize.perplexity import perplexity
from penstock.workers.quantize.quantize import EVALUATION_WINDOW, evaluation_tokens

STEP = 4
"""Tokens that a step computes."""


class Variant(NamedTuple):
    name: str
    activations: Activations
    kv_dtype: torch.dtype = torch.bfloat16
    head: Head = "keep"


class Comparison(NamedTuple):
    rounded: Variant
    plain: Variant
    most: float | None
    """Percent that the rounding may cost; None: the cost is reported, and is no bound."""


W4A16 = Variant("bfloat16 activations", Activations.BFLOAT16)
W4A8 = Variant("int8 activations", Activations.ONE_TERM)
TWO_TERMS = Variant("int8 activations in two terms", Activations.TWO_TERMS)
COMPARISONS = (
    Comparison(W4A8, W4A16, 0.5),
    Comparison(TWO_TERMS, W4A16, 0.1),
    Comparison(Variant("int8 activations and outliers", Activations.MIXED), W4A16, 0.2),
    Comparison(Variant("int8 KV", Activations.ONE_TERM, torch.int8), W4A8, 0.3),
    Comparison(Variant("int8 KV, bfloat16 activations", Activations.BFLOAT16, torch.int8), W4A16, 0.3),
    Comparison(Variant("int4 table", Activations.TWO_TERMS, head="int4"), TWO_TERMS, None),
)


def variant_perplexities(variant: Variant, model: str, held_out: dict[str, Tensor], threads: int) -> dict[str, float]:
    """Perplexity of each text. Raises RuntimeError where the kernels can't be had."""
    library = load_kernels()
    if library is None:
        raise RuntimeError("the CPU kernels can't be built here, and this measures what they round")
    source = resolve(model)
    config = read_config(source)
    weights = pack_all(read_weights(source, config, torch.bfloat16, head=variant.head), library.matmul, torch.bfloat16)
    decoder = FusedLlama(config, weights, EVALUATION_WINDOW, threads, library, variant.activations)
    found = {
        name: perplexity(decoder, variant.kv_dtype, ids, EVALUATION_WINDOW, STEP) for name, ids in held_out.items()
    }
    print(variant.name, found, file=sys.stderr)
    return found


def cost_rows(comparison: Comparison, found: dict[Variant, dict[str, float]]) -> Iterator[tuple[Row, bool]]:
    """Rows of each text, and whether they are as they should be."""
    rounded, plain, most = comparison
    for name, value in found[rounded].items():
        base = found[plain][name]
        cost = 100 * (value / base - 1)
        yield Row(f"perplexity on {name}: {rounded.name} (ours), {plain.name} (rival)", value, base, ""), True
        bound = "" if most is None else f", at most {most}"
        yield Row(f"what {rounded.name} cost on {name}{bound}", cost, None, "%"), most is None or cost <= most


def main() -> int:
    parser = argparse.ArgumentParser(description="What the engine's roundings cost in perplexity.")
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument(
        "--model",
        default="demo",
        help="a checkpoint, also one by penstock quantize; a record is kept of the demo model only",
    )
    options = parser.parse_args()
    texts = find_texts(os.environ.get("PENSTOCK_TEST_DATA"))
    held_out = {name: evaluation_tokens(options.model, text, options.tokens) for name, text in texts.held_out.items()}
    variants = dict.fromkeys(
        variant for comparison in COMPARISONS for variant in (comparison.plain, comparison.rounded)
    )
    found = {variant: variant_perplexities(variant, options.model, held_out, options.threads) for variant in variants}
    rows = [pair for comparison in COMPARISONS for pair in cost_rows(comparison, found)]
    notes = [
        f"{options.model}; {options.tokens} tokens of each text at most, windows of {EVALUATION_WINDOW}",
        f"texts: {texts.origin}",
    ]
    if options.model == "demo":
        write_report("quality", [row for row, _ in rows], notes=notes)
    else:
        print_table("quality", [row for row, _ in rows], notes)
    return 0 if all(is_good for _, is_good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
