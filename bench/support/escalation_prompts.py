"""Prompts of bench.escalation: grade-school sums and simple requests, some to tune a threshold with and others to
measure it on; no prompt is in both."""

from pathlib import Path
from typing import NamedTuple

from penstock.cli.tiers_questions import Message, Question, read_questions

WISH = "\nAnswer with one number only."
"""What is asked of a sum beside the sum: a small model else writes until it is cut off."""
NUM_TUNING_SUMS, NUM_MEASURED_SUMS = 60, 120
SIMPLE = ("eagle_qa.jsonl", "eagle_alpaca.jsonl")


class Prompts(NamedTuple):
    tuning: list[Question]
    measured: list[Question]


def read_prompts(folder: Path) -> Prompts:
    """Prompts of the folder that PENSTOCK_TEST_DATA names. Raises ConfigError."""
    texts = folder / "text"
    simple = [question for name in SIMPLE for question in read_questions(texts / name)]
    return Prompts(
        [*_sums(texts / "gsm8k_train3000.jsonl", NUM_TUNING_SUMS), *simple[::4]],
        [*_sums(texts / "gsm8k_test.jsonl", NUM_MEASURED_SUMS), *simple[1::4]],
    )


def _sums(path: Path, count: int) -> list[Question]:
    return [
        Question((Message("user", question.messages[0].content + WISH),), question.label)
        for question in read_questions(path)[:count]
    ]
