"""Quality checks for bench.engine: perplexity of the timed process, and memory.

Perplexity counts the second half of windows of 512 tokens, as llama-perplexity does: exp of the mean negative log
likelihood. Ours is computed by each path that is timed: a window at once, as in prefill, and token by token behind the
first half, at batch 1 and at batch 32. llama-perplexity tokenizes by itself: it is checked that it saw as many windows,
and that the model wants no token before a text (add_bos is false), which llama-perplexity would put there and our
windows don't have. transformers' bfloat16 and ours get our token ids.

Memory is the most that a process of its own has had resident (VmHWM), libraries included, with a KV cache for 512
tokens a sequence (llama.cpp makes room in steps of 256): llama-batched-bench with prompts of 384 and 128 decoded, and
ours with the same.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from bench.support.engine_goals import BF16, LLAMA, Finding, Goal, Pair
from bench.support.llama_cpp import LlamaCpp
from bench.support.worker import Worker, module_command, peak_bytes, worker
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.quantize.quantize import evaluation_tokens
from penstock.workers.vllm.model import prepare_folder

MODEL = "demo"
WINDOW, NUM_WINDOWS = 512, 16
"""Tokens of a window, and windows of each text."""
FIRST = WINDOW // 2
"""The last place of a window whose token is only read."""
PATHS = {"prefill": 0, "decode at batch 1": 1, "decode at batch 32": 32}
"""Path of computing to the batch by which our worker knows it."""
WORST = {LLAMA: 1.02, BF16: 1.03}
MEMORY_BATCHES, MEMORY_PROMPT_TOKENS, MEMORY_ANSWER_TOKENS, MOST_MEMORY = (1, 32), 384, 128, 1.8
BLOCK_SIZE = 16


def perplexities(ours: Worker, llama: LlamaCpp | None, texts: Mapping[str, str], folder: Path) -> list[Finding]:
    """Perplexities of each text by each path of ours, and by llama.cpp. texts: by name; each has windows enough.
    folder: for what llama-perplexity reads."""
    windows = {name: windows_of(text) for name, text in texts.items()}
    rivals: dict[str, dict[str, float | None]] = {
        BF16: dict(_by_text(_bf16_losses(windows, folder), windows)),
        LLAMA: {},
    }
    for number, (name, text) in enumerate(texts.items()):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
        rivals[LLAMA][name] = llama and llama.perplexity(folder / f"{number}.txt", WINDOW, NUM_WINDOWS)
    found = []
    for path, batch in PATHS.items():
        every = [ids for ids_of_text in windows.values() for ids in ids_of_text]
        for name, value in _by_text(ours.ask("losses", windows=every, first=FIRST, batch=batch), windows):
            print(f"perplexity on {name}, {path}: {value:.3f}", file=sys.stderr)
            found += [Finding(_goal(name, path, rival), [Pair(value, rivals[rival][name])]) for rival in WORST]
    return found


def windows_of(text: str) -> list[list[int]]:
    """Token ids of the text's windows. Raises RuntimeError for a text that is too short, and for a model whose texts
    begin with a token of their own."""
    tokenizer = load_tokenizer(resolve(MODEL))
    if tokenizer.encode("a", True) != tokenizer.encode("a", False):
        raise RuntimeError(
            f"{MODEL} wants a token before or behind a text, which llama-perplexity has in its windows and these have "
            "not"
        )
    ids = evaluation_tokens(MODEL, text, WINDOW * NUM_WINDOWS).tolist()
    if len(ids) < WINDOW * NUM_WINDOWS:
        raise RuntimeError(f"a text of {len(ids)} tokens has no {NUM_WINDOWS} windows of {WINDOW}")
    return [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]


def perplexity(losses: list[float]) -> float:
    """Perplexity over windows. losses: summed over each window's second half."""
    return math.exp(sum(losses) / (len(losses) * (WINDOW - 1 - FIRST)))


def _by_text(losses: list[float], windows: Mapping[str, list[list[int]]]) -> Iterator[tuple[str, float]]:
    start = 0
    for name, ids in windows.items():
        yield name, perplexity(losses[start : start + len(ids)])
        start += len(ids)


def _bf16_losses(windows: Mapping[str, list[list[int]]], folder: Path) -> list[float]:
    command = module_command(sys.executable, "bench.support.bf16_worker", str(prepare_folder(resolve(MODEL))))
    with worker("bf16", command, folder) as reference:
        found: list[float] = reference.ask(
            "losses", windows=[ids for ids_of_text in windows.values() for ids in ids_of_text], first=FIRST
        )
    return found


def _goal(name: str, path: str, rival: str) -> Goal:
    return Goal(f"perplexity on {name}, {path}", rival, "", WORST[rival], is_ceiling=True)


def memory(
    our_command: Callable[[Mapping[str, object]], list[str]],
    settings: Mapping[str, object],
    llama: LlamaCpp | None,
    folder: Path,
) -> list[Finding]:
    """Findings of our engine and of its references. our_command: makes our worker's command of EngineConfig's settings;
    `settings` are further ones."""
    found = []
    for batch in MEMORY_BATCHES:
        tokens = MEMORY_PROMPT_TOKENS + MEMORY_ANSWER_TOKENS
        room = (
            KvCache.block_bytes(read_config(resolve(MODEL)), BLOCK_SIZE, torch.bfloat16)
            * batch
            * (tokens // BLOCK_SIZE)
        )
        own = {"kv_memory_bytes": room, "max_num_seqs": batch, "max_model_len": tokens, "block_size": BLOCK_SIZE}
        with worker(f"penstock-{batch}", our_command({**own, **settings}), folder) as ours:
            ours.ask("decode", batch=batch, prompt_tokens=MEMORY_PROMPT_TOKENS, tokens=MEMORY_ANSWER_TOKENS)
            most = peak_bytes(ours.pid)
        theirs = llama and llama.peak_bytes(MEMORY_PROMPT_TOKENS, MEMORY_ANSWER_TOKENS, batch)
        goal = Goal(
            f"most resident memory, batch {batch}, {tokens} tokens each", LLAMA, "MB", MOST_MEMORY, is_ceiling=True
        )
        found.append(Finding(goal, [Pair(most / 1e6, theirs and theirs / 1e6)]))
    return found
