"""Prompts of bench.escalation: grade-school sums and simple requests, some to tune a threshold with and others to
measure it on; no prompt is in both.

Each stands behind three turns of its kind that are answered in a word or a number, so that even a small model comes to
its final answer at once: without them it writes until it is cut off, and has none.
"""

from pathlib import Path
from typing import NamedTuple

from penstock.cli.tiers.curve import final_answer
from penstock.cli.tiers.questions import Message, Question, read_questions

NUM_SHOWN = 3
NUM_TUNING_SUMS, NUM_MEASURED_SUMS = 100, 200
SIMPLE = ("eagle_qa.jsonl", "eagle_alpaca.jsonl")
SHOWN_REQUESTS = (
    ("What is the capital of France?", "Paris"),
    ("Who wrote Hamlet?", "William Shakespeare"),
    ("Give the opposite of the word 'early'.", "late"),
)


class Prompts(NamedTuple):
    tuning: list[Question]
    measured: list[Question]


def read_prompts(folder: Path) -> Prompts:
    """Prompts of the folder that PENSTOCK_TEST_DATA names. Raises ConfigError."""
    texts = folder / "text"
    train, test = (read_questions(texts / name) for name in ("gsm8k_train3000.jsonl", "gsm8k_test.jsonl"))
    shown, tuning_sums = train[:NUM_SHOWN], train[NUM_SHOWN : NUM_SHOWN + NUM_TUNING_SUMS]
    sums = [(question.messages[0].content, final_answer(question.label or "", "number")) for question in shown]
    simple = [question for name in SIMPLE for question in read_questions(texts / name)]
    return Prompts(
        [_behind(sums, each) for each in tuning_sums] + [_behind(SHOWN_REQUESTS, each) for each in simple[::2]],
        [_behind(sums, each) for each in test[:NUM_MEASURED_SUMS]]
        + [_behind(SHOWN_REQUESTS, each) for each in simple[1::2]],
    )


def is_sum(question: Question) -> bool:
    return question.label is not None


def _behind(shown: tuple[tuple[str, str], ...] | list[tuple[str, str]], question: Question) -> Question:
    turns = [message for asked, said in shown for message in (Message("user", asked), Message("assistant", said))]
    return Question((*turns, *question.messages), question.label)
