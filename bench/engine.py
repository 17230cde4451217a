"""The engine beside what a user would install instead: vLLM for CPU in bfloat16, and llama.cpp on the same Q4_1 file;
two cores, in turn, in one run.

    PENSTOCK_VLLM_PYTHON=PYTHON PENSTOCK_BENCH_LLAMA=FOLDER PENSTOCK_TEST_DATA=FOLDER python -m bench.engine [--rounds
    5] [--only penstock] [--engine JSON]

PENSTOCK_VLLM_PYTHON (or --vllm): the Python of an environment with vLLM (docs/vllm.md). PENSTOCK_BENCH_LLAMA (or
--llama): a folder with llama-bench, llama-batched-bench and llama-perplexity. A goal whose rival is missing is not met.
PENSTOCK_TEST_DATA: as for bench.quantize, of which only texts that no calibration sees are used.

End to end, beside vLLM: token ids of real text in, 128 greedy tokens out, each through its whole engine in a process of
its own; no prompt begins like another, so no prefix is found again. Beside llama.cpp: steps of the runner, as
llama-bench and llama-batched-bench time theirs, but choosing the tokens is included in ours. While one is timed the
others' processes are stopped; who goes first changes from round to round; a round before the first warms and does not
count. For perplexity and memory see bench/support/engine_quality.py. Fails (status 1) when a goal is not met.

--only NAME ...: just these contenders, and without --quality without perplexity and memory; for work in progress.
--engine: more of EngineConfig's settings. Recorded is a run of everybody with default settings and at least 5 rounds,
for each level of our kernels in a file of its own (engine_avx2.json); another is printed, and says why it is not. With
everybody there it takes a quarter of an hour on two cores with AVX-512, longer without; nothing else may run.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from bench.quantize import find_texts
from bench.support.cpu import Spent
from bench.support.engine_goals import LLAMA, VLLM, Finding, Goal, Pair, rows, verdict
from bench.support.engine_quality import memory, perplexities
from bench.support.llama_cpp import LlamaCpp, Speed
from bench.support.report import print_table, write_report
from bench.support.worker import Worker, module_command, worker
from penstock.text.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.vllm.model import prepare_folder

MODEL, THREADS = "demo", 2
BATCHES = (1, 8, 32)
LEAST_ROUNDS = 5
"""Rounds at least of a run that is recorded."""
PROMPT_TOKENS, ANSWER_TOKENS = 244, 128
STEP_PROMPT_TOKENS, SHORT_TOKENS, REPETITIONS = 256, 64, 3
"""Sizes of llama.cpp's benchmarks: the prompt, the tokens decoded from an empty context, the repetitions."""
OURS = "penstock"
CONTENDERS = (OURS, VLLM, LLAMA)

END_TO_END = {
    1: Goal("end to end, batch 1: output", VLLM, "tokens/s", 4.0),
    8: Goal("end to end, batch 8: output", VLLM, "tokens/s", 2.5),
    32: Goal("end to end, batch 32: output", VLLM, "tokens/s", 1.5, 2.0),
}
END_TO_END_PREFILL = Goal(
    f"end to end, 32 prompts of {PROMPT_TOKENS}, 1 token each: prefill", VLLM, "tokens/s", 1.0, 1.3
)
SHORT_DECODE = Goal("steps, batch 1 from an empty context: decode", LLAMA, "tokens/s", 1.1, 1.3)
SHORT_PREFILL = Goal("steps, 1 prompt of 256: prefill", LLAMA, "tokens/s", 2.5)
DECODE = {
    1: Goal("steps, batch 1 behind 256 tokens: decode", LLAMA, "tokens/s"),
    8: Goal("steps, batch 8 behind 256 tokens: decode", LLAMA, "tokens/s", 3.0),
    32: Goal("steps, batch 32 behind 256 tokens: decode", LLAMA, "tokens/s", 4.0),
}
PREFILL = Goal("steps, 32 prompts of 256: prefill", LLAMA, "tokens/s")

T = TypeVar("T")


class Contenders(NamedTuple):
    """Workers and programs that are compared; None: that rival is not there."""

    ours: Worker
    vllm: Worker | None
    llama: LlamaCpp | None


class Prompts:
    """Pieces of a text as token ids, each behind a number of its own, so that no two share a KV block."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(text, False)
        self._number = self._at = 0

    def take(self, count: int) -> list[list[int]]:
        return [self._next() for _ in range(count)]

    def _next(self) -> list[int]:
        head = self._tokenizer.encode(f"{self._number}. ", False)
        end = self._at + PROMPT_TOKENS - len(head)
        if end > len(self._ids):
            self._at, end = 0, PROMPT_TOKENS - len(head)
        piece = self._ids[self._at : end]
        self._number, self._at = self._number + 1, end
        return head + piece


def in_turn(number: int, ours: Callable[[], T], rival: Callable[[], T] | None) -> tuple[T, T | None]:
    """Results of both sides; ours runs first in every other round."""
    if number % 2:
        return ours(), rival and rival()
    theirs = rival and rival()
    return ours(), theirs


def a_round(contenders: Contenders, prompts: Prompts, number: int) -> Iterator[tuple[Goal, Pair]]:
    for batch, goal in END_TO_END.items():
        yield goal, end_to_end(contenders, prompts.take(batch), ANSWER_TOKENS, batch * ANSWER_TOKENS, number)
    count = max(BATCHES)
    yield END_TO_END_PREFILL, end_to_end(contenders, prompts.take(count), 1, count * PROMPT_TOKENS, number)
    llama = contenders.llama
    short = in_turn(
        number,
        lambda: our_bench(contenders.ours),
        llama and (lambda: llama.bench(STEP_PROMPT_TOKENS, SHORT_TOKENS, REPETITIONS)),
    )
    yield from speeds(SHORT_PREFILL, SHORT_DECODE, *short)
    many = in_turn(
        number,
        lambda: our_batched(contenders.ours),
        llama and (lambda: llama.batched(STEP_PROMPT_TOKENS, ANSWER_TOKENS, BATCHES)),
    )
    for batch, goal in DECODE.items():
        yield from speeds(
            PREFILL if batch == count else None, goal, many[0][batch], None if many[1] is None else many[1][batch]
        )


def end_to_end(
    contenders: Contenders, prompts: list[list[int]], max_tokens: int, counted_tokens: int, number: int
) -> Pair:
    """Counted tokens per second of both, for the same prompts."""
    ours, vllm = contenders.ours, contenders.vllm
    rival = None if vllm is None else (lambda: generated(vllm, prompts, max_tokens))
    seconds = in_turn(number, lambda: generated(ours, prompts, max_tokens), rival)
    return Pair(counted_tokens / seconds[0], counted_tokens / seconds[1] if seconds[1] else None)


def generated(contender: Worker, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds that greedy answers to all prompts take. Raises RuntimeError where an answer is shorter than asked for,
    or a prefix was found again."""
    said = contender.ask("generate", prompts=prompts, max_tokens=max_tokens)
    if said["tokens"] != [max_tokens] * len(prompts) or said.get("cached"):
        raise RuntimeError(
            f"{len(prompts)} answers have {said['tokens']} tokens, not {max_tokens} each; {said.get('cached')} prompt "
            "tokens were cached"
        )
    return float(said["seconds"])


def our_bench(ours: Worker) -> Speed:
    """Speeds measured as llama-bench does: medians of the repetitions."""
    read = [stepped(ours, 1, STEP_PROMPT_TOKENS, 1).prefill for _ in range(REPETITIONS)]
    return Speed(
        statistics.median(read), statistics.median(stepped(ours, 1, 0, SHORT_TOKENS).decode for _ in range(REPETITIONS))
    )


def our_batched(ours: Worker) -> dict[int, Speed]:
    """Speeds by batch, measured as llama-batched-bench does; the first batch runs once before it counts."""
    return {batch: stepped(ours, batch, STEP_PROMPT_TOKENS, ANSWER_TOKENS) for batch in (BATCHES[0], *BATCHES)}


def stepped(ours: Worker, batch: int, prompt_tokens: int, tokens: int) -> Speed:
    said = ours.ask("decode", batch=batch, prompt_tokens=prompt_tokens, tokens=tokens)
    return Speed(batch * prompt_tokens / said["prefill_s"], batch * tokens / said["decode_s"])


def speeds(prefill: Goal | None, decode: Goal, ours: Speed, theirs: Speed | None) -> Iterator[tuple[Goal, Pair]]:
    if prefill is not None:
        yield prefill, Pair(ours.prefill, theirs and theirs.prefill)
    yield decode, Pair(ours.decode, theirs and theirs.decode)


def all_rounds(contenders: Contenders, prompts: Prompts, count: int) -> list[Finding]:
    found: dict[Goal, list[Pair]] = {}
    for number in range(count + 1):
        for goal, pair in a_round(contenders, prompts, number):
            print(
                f"{f'round {number} of {count}' if number else 'warming'}, {goal.what}: {_said(pair, goal)}",
                file=sys.stderr,
            )
            if number:
                found.setdefault(goal, []).append(pair)
    return [Finding(goal, pairs) for goal, pairs in found.items()]


def _said(pair: Pair, goal: Goal) -> str:
    beside = f", {goal.rival} {pair.rival:.1f}, ratio {pair.ours / pair.rival:.2f}" if pair.rival else ""
    return f"{pair.ours:.1f} {goal.unit}{beside}"


def our_command(settings: Mapping[str, object]) -> list[str]:
    """Command line of our engine's worker. settings: fields of EngineConfig that differ from its defaults."""
    return module_command(
        sys.executable, "bench.support.engine_worker", msgspec.json.encode({"threads": THREADS, **settings}).decode()
    )


def vllm_environment(cores: Iterable[int]) -> dict[str, str]:
    """Environment that vLLM's documentation recommends for so few cores; what is set already stays."""
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(cores))),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {**defaults, **os.environ}


def has_amx(cpuinfo: str) -> bool:
    """Whether the CPU has AMX, by the text of /proc/cpuinfo; llama.cpp is quicker with it."""
    return "amx_tile" in cpuinfo.split()


def unrecorded(only: Sequence[str] | None, rounds: int, settings: Mapping[str, object]) -> str | None:
    """Reason why a run with these options is not recorded; None: it is recorded."""
    if only:
        return f"only {', '.join(only)}"
    if settings:
        return f"not the default settings: {msgspec.json.encode(settings).decode()}"
    return None if rounds >= LEAST_ROUNDS else f"rounds: {rounds}, at least {LEAST_ROUNDS} are"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these contenders")
    parser.add_argument("--quality", action="store_true", help="with --only: perplexity and memory too")
    parser.add_argument("--vllm", default=os.environ.get("PENSTOCK_VLLM_PYTHON"), help="a Python that has vLLM")
    parser.add_argument(
        "--llama", default=os.environ.get("PENSTOCK_BENCH_LLAMA"), help="a folder with llama.cpp's programs"
    )
    parser.add_argument("--engine", type=msgspec.json.decode, default={}, help="settings of EngineConfig, as JSON")
    return parser.parse_args()


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that contenders are ended
    named = options.only or CONTENDERS
    cores = sorted(os.sched_getaffinity(0))[:THREADS]
    os.sched_setaffinity(0, cores)  # everybody's, by inheritance
    source = resolve(MODEL)
    texts = find_texts(os.environ.get("PENSTOCK_TEST_DATA"))
    prompts = Prompts(load_tokenizer(source), "\n\n".join(texts.held_out.values()))
    llama = LlamaCpp(Path(options.llama), source.path, THREADS) if options.llama and LLAMA in named else None
    weights = "SmolLM2-135M-Instruct, Q4_1 (vLLM: the same weights in bf16)"
    notes = [
        f"{weights}, {THREADS} threads; our kernels at level {level()}; {options.rounds} rounds; texts: {texts.origin}"
    ]
    if llama is not None:
        amx = "has AMX" if has_amx(Path("/proc/cpuinfo").read_text(encoding="utf-8")) else "has no AMX"
        notes.append(f"llama.cpp, as llama-bench says: {llama.build()}; this CPU {amx}")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        vllm = None
        if options.vllm and VLLM in named:
            command = module_command(options.vllm, "bench.support.vllm_worker", str(prepare_folder(source)))
            vllm = stack.enter_context(worker("vllm", command, folder, env=vllm_environment(cores)))
            notes.append(f"vLLM {vllm.ask('version')}")
        ours = stack.enter_context(worker("penstock", our_command(options.engine), folder))
        begin = Spent.now(os.getpid(), cores)
        findings = all_rounds(Contenders(ours, vllm, llama), prompts, options.rounds)
        others, stolen = Spent.now(os.getpid(), cores).others_since(begin)
        notes.append(
            f"of the cores' time in the rounds, {100 * others:.1f} % went to processes outside of the benchmark and "
            f"{100 * stolen:.1f} % to other machines"
        )
        if not options.only or options.quality:
            findings += perplexities(ours, llama, texts.held_out, folder)
            stack.pop_all().close()
            findings += memory(our_command, options.engine, llama, folder)
    return report(findings, notes, unrecorded(options.only, options.rounds, options.engine))


def level() -> str:
    """Name of the level of instructions that our kernels use on this CPU."""
    kernels = load_kernels()
    return "torch" if kernels is None else kernels.matmul.level().name.lower()


def report(findings: list[Finding], notes: list[str], why_not: str | None) -> int:
    """Print or record the findings; returns the exit status. why_not: reason not to record them."""
    table = [row for finding in findings for row in rows(finding)]
    notes = [*notes, *filter(None, map(verdict, findings))]
    if why_not is None:
        write_report("engine", table, notes=notes, variant=level())
    else:
        print_table("engine", table, [*notes, f"not recorded ({why_not})"])
    return 0 if all(finding.is_met for finding in findings) or why_not is not None else 1


if __name__ == "__main__":
    sys.exit(main())
