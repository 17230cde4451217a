"""Prompts that a draft head is measured on: Spec-Bench's by category and HumanEval's, of no file that it was trained
on."""

import json
import os
from pathlib import Path
from typing import Any

MAX_WORDS = 250
"""Longest prompt, in words: with longer ones reading it would be most of the time."""
TEMPERATURES = (0.0, 0.8)


def data_folder() -> Path | None:
    """Where the texts are; None where PENSTOCK_TEST_DATA names no folder."""
    folder = os.environ.get("PENSTOCK_TEST_DATA")
    return None if folder is None else Path(folder) / "text"


def drafted_prompts(folder: Path, count: int) -> dict[str, list[str]]:
    """The first `count` of each category that are short enough, in the files' order."""
    found: dict[str, list[str]] = {}
    rows = [(row["category"], row["turns"][0]) for row in _rows(folder / "spec_bench.jsonl")]
    rows += [
        ("humaneval", f"Complete this Python function:\n{row['prompt']}") for row in _rows(folder / "humaneval.jsonl")
    ]
    for category, prompt in rows:
        if len(prompt.split()) <= MAX_WORDS:
            found.setdefault(category, []).append(prompt)
    return {category: prompts[:count] for category, prompts in found.items()}


def chat(prompt: str, number: int, temperature: float, max_tokens: int) -> dict[str, Any]:
    """The body of a request, without its model."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "seed": number,
        "temperature": temperature,
        "return_token_ids": True,
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
