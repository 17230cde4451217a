"""What a draft head is measured on is nothing that it was trained on."""

import json
from pathlib import Path

import pytest

from bench.support.drafted_prompts import data_folder, drafted_prompts
from penstock.text.corpus import read_lines
from penstock.text.source import DEMO, resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer

OVERLAP = 32
"""Tokens in a row that no prompt may share with what the head was trained on."""
TRAINED_ON = ("aibrix_sharegpt_8min.jsonl", "gsm8k_train3000.jsonl")


def runs(tokenizer: Tokenizer, text: str) -> set[tuple[int, ...]]:
    ids = tokenizer.encode(text, add_special=False)
    return {tuple(ids[start : start + OVERLAP]) for start in range(len(ids) - OVERLAP + 1)}


def test_measured_prompts_share_no_run_of_tokens_with_those_trained_on() -> None:
    folder = data_folder()
    if folder is None:
        pytest.skip("PENSTOCK_TEST_DATA names no folder of prompts")
    tokenizer = load_tokenizer(resolve(DEMO))
    trained = set[tuple[int, ...]]()
    for name in TRAINED_ON:
        for texts in read_lines(folder / name):
            trained |= runs(tokenizer, texts[0])
    assert len(trained) > 100_000
    measured = drafted_prompts(folder, 100)
    assert set(measured) > {"qa", "translation", "summarization", "humaneval"}
    assert min(map(len, measured.values())) >= 3
    shared = [prompt[:60] for prompts in measured.values() for prompt in prompts if runs(tokenizer, prompt) & trained]
    assert shared == []


def test_prompts_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    rows = [{"category": "qa", "turns": ["word " * count]} for count in (10, 300, 20, 30)]
    (tmp_path / "spec_bench.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "humaneval.jsonl").write_text(json.dumps({"prompt": "def f():"}), encoding="utf-8")
    found = drafted_prompts(tmp_path, 2)
    assert [len(prompt.split()) for prompt in found["qa"]] == [10, 20]
    assert found["humaneval"] == ["Complete this Python function:\ndef f():"]
