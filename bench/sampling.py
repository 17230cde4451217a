"""What choosing a token costs on the CPU: 16 rows of logits over 128,256 tokens (Llama 3's vocabulary), in milliseconds
a row.

    make bench-sampling [ARGS="--beside CHECKOUT"]

For each way to choose: the kernels beside the same choices by numpy, or beside the sampler of another checkout, each in
a process of its own and in turn, median of the rounds. Logits like a model's (a few tokens far above a bell curve), and
in the last rows the worst there are: all equal, so that nothing can be left out early.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.support.report import Row, write_report
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.sampling import Sampler
from penstock.workers.engine.sequence import Sequence

VOCAB, ROWS, CONTEXT = 128_256, 16, 500
ROUNDS, CALLS = 7, 3
BIASES = tuple((int(token_id), 1.0) for token_id in np.random.default_rng(1).choice(VOCAB, 300, replace=False))
USUAL: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}
ALL: Mapping[str, Any] = {
    **USUAL, "top_k": 50, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": BIASES, "logprobs": 20,
}  # fmt: skip
CASES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7, top_p 0.95": USUAL,
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "penalties, 500 tokens": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "300 biases": {"logit_bias": BIASES},
    "20 logprobs": {"logprobs": 20},
    "all of them": ALL,
}
FLAT_CASES = ("temperature 0.7, top_p 0.95", "20 logprobs", "all of them")


class Job(msgspec.Struct, frozen=True):
    """What a side is to measure."""

    case: str
    is_flat: bool
    threads: int


def measure(job: Job, sampler: Sampler) -> float:
    """Seconds for a row, mean of CALLS steps of ROWS rows."""
    torch.set_num_threads(job.threads)
    rng = np.random.default_rng(7)
    rows = np.zeros((ROWS, VOCAB), np.float32)
    if not job.is_flat:
        rows = rng.normal(0, 2.5, rows.shape).astype(np.float32)
        rows[:, :200] += rng.exponential(4.0, (ROWS, 200)).astype(np.float32)
    logits = torch.from_numpy(rows)
    seqs = []
    for number in range(ROWS):
        params = SamplingParams(max_tokens=10_000, seed=number, **CASES[job.case])
        token_ids = rng.integers(0, VOCAB, CONTEXT).tolist()
        seqs.append(Sequence(str(number), token_ids, params, CONTEXT // 2, [], b"", 0.0))
    sampler.sample(logits, seqs, [CONTEXT] * ROWS)
    seconds = 0.0
    for call in range(CALLS):
        for seq in seqs:
            seq.token_ids.append(call)
        began = time.perf_counter()
        sampler.sample(logits, seqs, [CONTEXT + 1 + call] * ROWS)
        seconds += time.perf_counter() - began
    for seq in seqs:
        sampler.forget(seq)
    return seconds / CALLS / ROWS


def make_sampler(*, has_kernels: bool) -> Sampler:
    if not has_kernels:
        return Sampler(VOCAB)
    from penstock.workers.compute.kernels.build import load_kernels  # noqa: PLC0415 (another checkout may have none)

    library = load_kernels()
    return Sampler(VOCAB, frozenset(), None if library is None else library.chooser())


def serve(*, has_kernels: bool) -> None:
    """Measure what is asked for on standard input, a line a job; answer with the seconds."""
    sampler = make_sampler(has_kernels=has_kernels)
    for line in sys.stdin:
        print(measure(msgspec.json.decode(line, type=Job), sampler), flush=True)


class Side:
    """A process that measures. checkout: whose sampler; None: this one's."""

    def __init__(self, cleanup: ExitStack, checkout: Path | None, *, has_kernels: bool) -> None:
        here = Path(__file__).resolve().parents[1]
        source = here if checkout is None else checkout.resolve()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.sampling", "--serve", "kernels" if has_kernels else "numpy"],
            env=os.environ | {"PYTHONPATH": f"{source / '.src'}:{here}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        cleanup.callback(self._process.wait)
        assert self._process.stdin is not None
        cleanup.callback(self._process.stdin.close)

    def measure(self, job: Job) -> float:
        """Seconds for a row."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="checkout whose sampler is the other side, instead of numpy")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--serve", choices=("kernels", "numpy"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(has_kernels=args.serve == "kernels")
        return
    jobs = [Job(case, False, args.threads) for case in CASES] + [Job(case, True, args.threads) for case in FLAT_CASES]
    with ExitStack() as cleanup:
        ours = Side(cleanup, None, has_kernels=True)
        other = Side(cleanup, args.beside, has_kernels=False)
        rows = []
        for job in jobs:
            pairs = [(ours.measure(job), other.measure(job)) for _ in range(args.rounds)]
            here, there = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append(Row(f"{job.case}{', logits all equal' if job.is_flat else ''}", here, there, "ms a row"))
    beside = "numpy" if args.beside is None else f"the sampler of {args.beside.name}"
    write_report("sampling", rows, notes=[f"beside {beside}", f"threads: {args.threads}"])


if __name__ == "__main__":
    main()
