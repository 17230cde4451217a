"""The demo model through the real engine, in float32, against transformers: a short form of `make bench-parity`."""

import os
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from bench.parity import (
    MAX_LOGIT_DIFFERENCE,
    NEAR_TIE,
    chat_prompts,
    first_difference,
    logit_difference,
    ours,
    sample_texts,
    theirs,
    unequal_tensors,
)
from penstock.text.source import ModelSource
from penstock.workers.config import EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_threads")]

NEW_TOKENS = 24
TEXTS = [
    "What is the capital of France?",
    "Write a haiku about a river in winter, then explain each line.",
    "def fibonacci(n):\n    # Complete this function and say what it costs.\n",
    "Summarize: " + "The gate was opened at dawn, and the water ran down the pipe into the mill. " * 12,
]
"""Where there is no folder of real prompts."""


def test_dequantized_weights_equal_those_of_transformers(source: ModelSource, oracle: PreTrainedModel) -> None:
    assert unequal_tensors(source, oracle) == []


@pytest.mark.timeout(300)
def test_greedy_output_equals_that_of_transformers(source: ModelSource, oracle: PreTrainedModel) -> None:
    data = os.environ.get("PENSTOCK_TEST_DATA")
    prompts = chat_prompts(source, sample_texts(Path(data), 5) if data else TEXTS)
    config = EngineConfig(
        dtype="float32", max_num_seqs=4, max_batched_tokens=64, threads=1
    )  # less than a prompt: they go in chunks
    mine = ours(source, config, prompts, NEW_TOKENS, num_recorded=len(prompts))

    for number, prompt in enumerate(prompts):
        other = theirs(oracle, prompt, NEW_TOKENS)
        difference = first_difference(number, mine[number], other)
        assert difference is None or difference.gap <= NEAR_TIE
        assert logit_difference(mine[number], other, difference) < MAX_LOGIT_DIFFERENCE
