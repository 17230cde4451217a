"""Log likelihoods of the demo model in float32 against transformers: what lm-eval's likelihood tasks rest on."""

import json
import os
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from bench.support.platform_process import running_platform
from penstock.text.source import ModelSource
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.frames import Finish, SamplingParams, join_prompt_logprobs, unpack_floats, unpack_token_ids
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.sequence import Sequence
from tests.integration.sizes import full

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_threads")]

CONFIG = """
gateway: {{port: {port}}}
pools:
- name: demo
  model: demo
  served_names: [demo]
  engine: {{dtype: float32, max_num_seqs: 8, max_batched_tokens: 256}}
"""
NUM_ITEMS = full(200, 40)
NUM_ASKED = 8
"""Items of all their length that go through the whole platform."""
MAX_TOKENS = 48
TOLERANCE = 2e-3
"""Bound of one log probability and of a sum. The reference is normalised in float64: log_softmax in float32 is 2e-5 off
over this vocabulary, always in the same direction, which adds up to more than this in a hundred tokens."""
NEAR_TIE = 1e-4
TIMEOUT_S = 300.0
ASKED = SamplingParams(max_tokens=0, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
SHARED = "Question: "
"""What all prompts begin with, so that the cache holds blocks of theirs."""


def make_texts() -> list[str]:
    """Questions with their answers, real ones where the folder of test data is."""
    data = os.environ.get("PENSTOCK_TEST_DATA")
    if data is None:
        return [
            f"{SHARED}What is {number} times {number + 3}, and what is that plus {number % 7}?\nAnswer: "
            + " ".join(f"{number} times {factor} is {number * factor}." for factor in range(1, number % 10 + 9))
            for number in range(NUM_ITEMS)
        ]
    lines = (Path(data) / "text" / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_ITEMS]
    return [f"{SHARED}{row['question']}\nAnswer: {row['answer']}" for row in map(json.loads, lines)]


def compute(source: ModelSource, config: EngineConfig, prompts: list[list[int]]) -> list[Sequence]:
    """The prompts through one engine at once, ended."""
    with OfflineEngine(load_runner(source, config), config) as engine:
        # every other one is followed by a token, as lm-eval asks for
        sequences = [
            engine.submit(str(number), prompt, msgspec.structs.replace(ASKED, max_tokens=number % 2))
            for number, prompt in enumerate(prompts)
        ]
        for _ in sequences:
            done = engine.wait(TIMEOUT_S)
            assert done.finish is Finish.LENGTH, done.error
    return sequences


@pytest.mark.timeout(900)
def test_log_likelihoods_of_items_are_those_of_transformers(source: ModelSource, oracle: PreTrainedModel) -> None:
    tokenizer = load_tokenizer(source)
    prompts = [tokenizer.encode(text, add_special=True, max_tokens=None)[:MAX_TOKENS] for text in make_texts()]
    assert len(prompts) == NUM_ITEMS
    config = EngineConfig(dtype="float32", max_num_seqs=16, max_batched_tokens=256, threads=2)
    sequences = compute(source, config, prompts)

    for seq, prompt in zip(sequences, prompts, strict=True):
        with torch.inference_mode():
            reference = oracle(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(dim=1)
        own = reference.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found = join_prompt_logprobs(seq.prompt_logprobs)
        assert found is not None
        ours = torch.tensor(unpack_floats(found.logprobs))
        assert float((ours - own).abs().max()) < TOLERANCE
        half = len(prompt) // 2  # a context, and what is to follow it
        assert abs(float(ours[half:].sum() - own[half:].sum())) < TOLERANCE
        best = reference.topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        likeliest = torch.tensor(unpack_token_ids(found.top_ids))
        assert bool(((likeliest == best.indices[:, 0]) | (gaps < NEAR_TIE)).all())


@pytest.mark.platform
@pytest.mark.timeout(600)
def test_lm_evals_sums_over_http_are_those_of_transformers(
    source: ModelSource, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    """A context and what follows it, as token ids, four items a request: the prompt is echoed with its log
    probabilities, and one token more is asked for."""
    tokenizer = load_tokenizer(source)
    items = [tokenizer.encode(text, add_special=True, max_tokens=None) for text in make_texts()[:NUM_ASKED]]
    found: list[list[float]] = []
    with (
        running_platform(tmp_path, CONFIG) as platform,
        httpx.Client(base_url=platform.url, timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        for first in range(0, NUM_ASKED, 4):
            body = {"model": "demo", "prompt": items[first : first + 4], "max_tokens": 1, "temperature": 0}
            answer = http.post(
                "/v1/completions",
                json=body | {"echo": True, "logprobs": 1},
                headers={"authorization": f"Bearer {platform.key}"},
            )
            assert answer.status_code == 200, answer.text
            found += [choice["logprobs"]["token_logprobs"] for choice in answer.json()["choices"]]

    assert max(map(len, items)) > 128, "a prompt in several pieces"
    for ids, ours in zip(items, found, strict=True):
        with torch.inference_mode():
            reference = oracle(torch.tensor([ids])).logits[0, :-1].double().log_softmax(dim=1)
        own = reference.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert ours[0] is None
        half = len(ids) // 2
        assert abs(sum(ours[half : len(ids)]) - sum(own[half - 1 :])) < TOLERANCE
