"""Constrained answers of the demo model: they keep to their schemas, and a seed gives the same text with drafts, after
a preemption and by itself.

A small share of bench/structured.py, whose record has 200 schemas.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch

from bench.support.json_schemas import SchemaTask, make_schemas
from penstock.text.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.wire.frames import Constraint, Finish
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.sequence import Sequence
from tests.unit.workers.constrained import Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 80
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "exact": True,
    "threads": 2,
    "kv_memory_bytes": 200_000_000,
    "max_num_seqs": 10,
    "max_batched_tokens": 256,
}
ASKED = make_schemas(20)
PLAIN, DRAFTING = (
    EngineConfig(**ENGINE, speculation=SpeculationConfig(method=method, adaptive=False))  # type: ignore[arg-type]
    for method in ("none", "ngram")
)
FEW_BLOCKS = 45
"""KV blocks that hold some of the sequences of a batch, and no more."""


@pytest.fixture(scope="module", autouse=True)
def _torch_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("demo"))


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    """The demo model's runner, which looks up n-grams where the scheduler has places for drafts."""
    return load_runner(resolve("demo"), DRAFTING)


def sequences(bench: Bench, tokenizer: Tokenizer, temperature: float) -> list[Sequence]:
    def one(seed: int, asked: SchemaTask) -> Sequence:
        prompt = tokenizer.encode_chat([{"role": "user", "content": asked.prompts[1]}])
        wanted = Constraint("json_schema", json.dumps(asked.schema))
        return bench.sequence(wanted, prompt, temperature=temperature, seed=seed, max_tokens=MAX_TOKENS)

    return [one(seed, asked) for seed, asked in enumerate(ASKED)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_keep_to_their_schemas_and_a_seed_gives_the_same_text(
    runner: TorchRunner, tokenizer: Tokenizer, temperature: float
) -> None:
    plain, drafting, cramped = Bench(runner, PLAIN), Bench(runner, DRAFTING), Bench(runner, PLAIN, FEW_BLOCKS)
    expected = sequences(plain, tokenizer, temperature)
    drafted = sequences(drafting, tokenizer, temperature)
    crowded = sequences(cramped, tokenizer, temperature)

    outputs = plain.run(*expected)

    assert drafting.run(*drafted) == outputs
    assert cramped.run(*crowded) == outputs
    assert drafting.scheduler.drafts is not None
    assert drafting.scheduler.drafts.num_accepted > 0
    assert sum(seq.num_preemptions for seq in crowded) > 0
    finished = [number for number, seq in enumerate(expected) if seq.finish is Finish.STOP]
    assert len(finished) >= 10
    for number in finished:
        jsonschema.validate(json.loads(tokenizer.decode(outputs[number])), ASKED[number].schema)
    assert {seq.finish for seq in expected} <= {Finish.STOP, Finish.LENGTH}
