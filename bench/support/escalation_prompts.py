"""Prompts of bench.escalation: grade-school sums and simple requests, some to tune a threshold with and others to
measure it on; no prompt is in both.

Each ends in the beginning of its answer, so that even a small model comes to its final answer at once: without that it
writes until it is cut off, and has none.
"""

from pathlib import Path
from typing import NamedTuple

from penstock.cli.tiers.questions import Message, Question, read_questions

NUM_TUNING_SUMS, NUM_MEASURED_SUMS = 200, 400
SIMPLE = ("eagle_qa.jsonl", "eagle_alpaca.jsonl")
BEGINNING = "The answer is"


class Prompts(NamedTuple):
    tuning: list[Question]
    measured: list[Question]


def read_prompts(folder: Path) -> Prompts:
    """Prompts of the folder that PENSTOCK_TEST_DATA names. Raises ConfigError."""
    texts = folder / "text"
    simple = [question for name in SIMPLE for question in _read(texts / name)]
    return Prompts(
        _read(texts / "gsm8k_train3000.jsonl")[:NUM_TUNING_SUMS] + simple[::2],
        _read(texts / "gsm8k_test.jsonl")[:NUM_MEASURED_SUMS] + simple[1::2],
    )


def is_sum(question: Question) -> bool:
    return question.label is not None


def _read(path: Path) -> list[Question]:
    beginning = Message("assistant", BEGINNING)
    return [Question((*question.messages, beginning), question.label) for question in read_questions(path)]
