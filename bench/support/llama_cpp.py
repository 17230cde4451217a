"""llama.cpp's own programs, run and read: llama-bench, llama-batched-bench and llama-perplexity of one folder, with as
many threads as everybody gets.

Everything that is not set here is its default (flash attention, f16 KV, micro-batches of 512, weights repacked for the
CPU).
"""

import json
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.support.worker import peak_bytes

RUN_S = 900.0
POLL_S = 0.02
_CHUNK = re.compile(r"\[(\d+)\]([0-9.]+),")


class Speed(NamedTuple):
    """Tokens per second of reading prompts and of decoding."""

    prefill: float
    decode: float


class LlamaCpp(NamedTuple):
    folder: Path
    """Folder that holds its programs."""
    model: Path
    """Path of the GGUF file."""
    threads: int

    def build(self) -> str:
        """Commit and target of llama-bench's build."""
        return read_build(
            self._run(
                "llama-bench",
                "-m",
                str(self.model),
                "-t",
                str(self.threads),
                "-p",
                "1",
                "-n",
                "0",
                "-r",
                "1",
                "-o",
                "json",
            )
        )

    def bench(self, prompt_tokens: int, tokens: int, repetitions: int) -> Speed:
        """A prompt read at once, and decoding from an empty context, each behind a warm-up of its own."""
        counts = ["-p", str(prompt_tokens), "-n", str(tokens), "-r", str(repetitions)]
        return read_bench(
            self._run("llama-bench", "-m", str(self.model), "-t", str(self.threads), *counts, "-o", "json")
        )

    def batched(self, prompt_tokens: int, tokens: int, batches: Sequence[int]) -> dict[int, Speed]:
        """Prompts of as many sequences read, and then decoded together. The first batch is run once before it
        counts."""
        return read_batched(self._run(*self._batched(prompt_tokens, tokens, [batches[0], *batches])))

    def perplexity(self, text: Path, window: int, num_windows: int) -> float:
        """Perplexity over the second half of each window of the text's tokens (the program's own way). Raises
        RuntimeError where it saw fewer windows."""
        sizes = ["-c", str(window), "-b", str(window), "--chunks", str(num_windows)]
        seen, value = read_perplexity(
            self._run(
                "llama-perplexity",
                "-m",
                str(self.model),
                "-t",
                str(self.threads),
                "-f",
                str(text),
                "--no-escape",
                *sizes,
            )
        )
        if seen != num_windows:
            raise RuntimeError(f"llama-perplexity read {seen} windows of {window} tokens, not {num_windows}")
        return value

    def peak_bytes(self, prompt_tokens: int, tokens: int, batch: int) -> int:
        """The most memory that llama-batched-bench has had resident, with a KV cache for just these tokens."""
        program, *arguments = self._batched(prompt_tokens, tokens, [batch])
        with subprocess.Popen(
            [self.folder / program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            peak, until_s = 0, time.monotonic() + RUN_S
            while process.poll() is None:
                if time.monotonic() > until_s:
                    process.kill()
                with suppress(FileNotFoundError, ProcessLookupError):  # it is about to end
                    peak = max(peak, peak_bytes(process.pid))
                time.sleep(POLL_S)
            if process.returncode:
                raise RuntimeError(f"{program} ended with {process.returncode}")
        return peak

    def _batched(self, prompt_tokens: int, tokens: int, batches: Sequence[int]) -> list[str]:
        context = max(batches) * (prompt_tokens + tokens)
        counts = [
            "-npp",
            str(prompt_tokens),
            "-ntg",
            str(tokens),
            "-npl",
            ",".join(map(str, batches)),
            "-c",
            str(context),
        ]
        return [
            "llama-batched-bench",
            "-m",
            str(self.model),
            "-t",
            str(self.threads),
            *counts,
            "--output-format",
            "jsonl",
        ]

    def _run(self, program: str, *arguments: str) -> str:
        """Run a program; returns what it prints, errors included where the result is among them. Raises RuntimeError
        with the end of that."""
        done = subprocess.run(
            [self.folder / program, *arguments], capture_output=True, text=True, timeout=RUN_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{program} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return done.stdout if program == "llama-bench" else done.stdout + done.stderr


def read_bench(printed: str) -> Speed:
    """Speed in llama-bench's JSON: medians of the repetitions."""
    speeds = {row["n_gen"] > 0: statistics.median(row["samples_ts"]) for row in json.loads(printed)}
    return Speed(prefill=speeds[False], decode=speeds[True])


def read_build(printed: str) -> str:
    """Commit and target that llama-bench was built of and for, from its JSON."""
    row = json.loads(printed)[0]
    return f"commit {row['build_commit']} (build {row['build_number']}), backends {row['backends']}"


def read_batched(printed: str) -> dict[int, Speed]:
    """llama-batched-bench's lines of JSON by number of sequences; of equal ones the last counts."""
    rows = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    return {row["pl"]: Speed(row["speed_pp"], row["speed_tg"]) for row in rows}


def read_perplexity(printed: str) -> tuple[int, float]:
    """How many windows llama-perplexity has read, and the perplexity over all of them. Raises RuntimeError where it
    says neither."""
    found = _CHUNK.findall(printed)
    if not found:
        raise RuntimeError(f"llama-perplexity says no perplexity:\n{printed[-3000:]}")
    count, value = found[-1]
    return int(count), float(value)
