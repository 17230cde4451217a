"""The engine under load, over random weights of Llama-3.1-8B's shape: saturated with sampled requests, with prompts
alone, and with arrivals as they come.

Sampled: temperature 0.7, top_p 0.95. Answers have a fixed length, since random weights end nothing.
"""

import random
import time
from collections.abc import Sequence

from bench.gpu.rows import Rows
from bench.gpu.steps.bandwidth import peak_flops
from bench.gpu.steps.compilations import counted
from bench.gpu.steps.engines import (
    Answers,
    Request,
    engine_config,
    make_random_weights,
    make_runner,
    percentile,
    play,
    prompt_of,
    start_engine,
)
from bench.gpu.steps.shapes import VARIANTS, Bench, bench_for
from bench.gpu.steps.sizes import Scale, fitted_or_said
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.weights import layout, parameter_shapes

SCALES = {
    "sampled": Scale(256, 2048, 2048, 12288, 256, 256, 512),
    "prompts": Scale(64, 8192, 8192, 6144, 4096, 1, 16),
    "mixed": Scale(256, 2048, 4096, 16384, 1024, 128, 160),
}
TINY_SCALE = Scale(2, 32, 64, 16, 12, 3, 3)
ARRIVALS_PER_S = 10.0
"""Rate of the mixed load, a Poisson process."""
TIMEOUT_S = 90.0


def requests(kind: str, scale: Scale, bench: Bench) -> list[Request]:
    """What is asked: the same for every engine."""
    draw = random.Random(5)
    found: list[Request] = []
    at_s = 0.0
    for seed in range(scale.num_requests):
        length, tokens = scale.prompt_tokens, scale.output_tokens
        if kind == "mixed":
            at_s += draw.expovariate(ARRIVALS_PER_S)
            length, tokens = draw.randint(length // 4, 2 * length), draw.randint(tokens // 4 + 2, 2 * tokens)
        sampling = (
            SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            if kind == "prompts"
            else SamplingParams(max_tokens=tokens, temperature=0.7, top_p=0.95, seed=seed, ignore_eos=True)
        )
        found.append(Request(at_s, prompt_of(draw, bench.config.vocab_size, length), sampling))
    return found


def run(rows: Rows, name: str, kind: str, *, is_check: bool) -> bool:
    """name: the variant's. kind: one of SCALES. Returns False where a kernel was compiled after readiness."""
    variant = next(variant for variant in VARIANTS if variant.name == name)
    bench = bench_for(is_check=is_check)
    scale = fitted_or_said(rows, f"{name}, {kind}", TINY_SCALE if is_check else SCALES[kind], bench, variant)
    if scale is None:
        return True
    wanted = requests(kind, scale, bench)
    weights = make_random_weights(bench, variant)
    answers = Answers()
    begun_s = time.perf_counter()
    runner = make_runner(bench, variant, weights, scale)
    engine = start_engine(runner, engine_config(scale), answers.on_step)
    rows.add(f"{name}: graphs, probe and kernels until ready, weights there", time.perf_counter() - begun_s, None, "s")
    try:
        with counted() as compilations:
            begun_s = time.perf_counter()
            play(engine, answers, wanted, TIMEOUT_S)
            seconds = time.perf_counter() - begun_s
    finally:
        engine.stop()
    add_figures(rows, f"{name}, {kind}", kind, answers, wanted, seconds, bench)
    return add_compiled(rows, f"{name}, {kind}", compilations.names)


def add_compiled(rows: Rows, label: str, kernels: Sequence[str]) -> bool:
    """A row of the kernels that were compiled after readiness. Returns whether there were none."""
    names = ", ".join(sorted(set(kernels)))
    rows.add(f"{label}: kernels compiled after readiness", len(kernels), None, "", names)
    return not kernels


def add_figures(
    rows: Rows, name: str, kind: str, answers: Answers, wanted: Sequence[Request], seconds: float, bench: Bench
) -> None:
    """Rows of one load."""
    if kind == "prompts":
        rate = sum(len(request.prompt) for request in wanted) / seconds
        share = 100 * rate * 2 * num_parameters(bench) / peak_flops(bench)
        rows.add(f"{name}: prompt tokens", rate, None, "tokens/s")
        rows.add(f"{name}: share of the peak of products in bfloat16, attention not counted", share, None, "%")
        return
    rows.add(f"{name}: tokens", answers.num_tokens / seconds, None, "tokens/s")
    rows.add(f"{name}: tokens, middle half", answers.rate_in_the_middle(), None, "tokens/s")
    for label, values in (("TTFT", answers.ttft_s), ("TPOT", answers.tpot_s)):
        for part in (0.5, 0.99):
            rows.add(f"{name}: {label} p{100 * part:.0f}", 1e3 * percentile(values, part), None, "ms")


def num_parameters(bench: Bench) -> int:
    """Parameters that every token of a prompt is multiplied with: all matrices but the embedding and the head, which
    only the last token of a prompt needs."""
    shapes = parameter_shapes(layout(bench.config))
    return sum(
        shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2 and name not in ("embed", "lm_head")
    )
