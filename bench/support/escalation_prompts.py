"""Prompts of bench.escalation: grade-school sums and simple requests, some to tune a threshold with and others to
measure it on; no prompt is in both."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.cli.tiers.questions import Message, Question, read_questions

NUMBER_WISH, WORDS_WISH = "\nAnswer with one number only.", "\nAnswer in a few words."
"""What is asked beside the prompt: a small model else writes until it is cut off, and has no final answer."""
NUM_TUNING_SUMS, NUM_MEASURED_SUMS = 60, 120
SIMPLE = ("eagle_qa.jsonl", "eagle_alpaca.jsonl")


class Prompts(NamedTuple):
    tuning: list[Question]
    measured: list[Question]


def read_prompts(folder: Path) -> Prompts:
    """Prompts of the folder that PENSTOCK_TEST_DATA names. Raises ConfigError."""
    texts = folder / "text"
    simple = [question for name in SIMPLE for question in _read(texts / name, WORDS_WISH)]
    tuning_sums = _read(texts / "gsm8k_train3000.jsonl", NUMBER_WISH)[:NUM_TUNING_SUMS]
    measured_sums = _read(texts / "gsm8k_test.jsonl", NUMBER_WISH)[:NUM_MEASURED_SUMS]
    return Prompts([*tuning_sums, *simple[::2]], [*measured_sums, *simple[1::2]])


def is_sum(question: Question) -> bool:
    return question.label is not None


def _read(path: Path, wish: str) -> Sequence[Question]:
    return [
        Question((Message("user", question.messages[0].content + wish),), question.label)
        for question in read_questions(path)
    ]
