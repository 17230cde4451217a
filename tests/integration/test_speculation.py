"""Speculation on the demo model: with any drafter a seeded request says what it says without one, in the engine and
through the platform.

A small share of bench/speculation.py, whose record has the 200 requests.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from bench.speculation import Run, request, run_in_turn
from bench.support.platform_process import running_platform
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Sequence

pytestmark = [pytest.mark.platform, pytest.mark.timeout(200), pytest.mark.usefixtures("torch_threads")]

REQUESTS, MAX_TOKENS, STREAMS, WORDS = 6, 8, 8, 10
BODIES = [request(number, 0.8 if number % 4 > 1 else 0.0, MAX_TOKENS, WORDS) for number in range(REQUESTS)]
DRAFT = {"method": "draft", "model": "demo", "draft_layers": 25, "max_draft_tokens": 2, "adaptive": False}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "exact": True,
    "threads": 1,
    "kv_memory_bytes": 150_000_000,
    "max_num_seqs": STREAMS,
    "max_batched_tokens": 64,
}
POOL = {"name": "draft", "served_names": ["draft"], "engine": ENGINE | {"speculation": DRAFT}}
CONFIG = "gateway: {{port: {port}}}\npools:\n  - " + json.dumps(POOL).replace("{", "{{").replace("}", "}}")


class Answers(NamedTuple):
    token_ids: list[list[int]]
    drafted: int
    accepted: int


def sequence(body: dict[str, Any], hasher: ChainHasher) -> Sequence:
    ids = load_tokenizer(resolve("demo")).encode_chat(body["messages"])
    root = hasher.root("demo")
    keys = hasher.extend(root, ids)
    sampling = SamplingParams(
        **{name: value for name, value in body.items() if name not in ("messages", "return_token_ids")}
    )
    return Sequence("r", ids, sampling, len(ids), keys, keys[-1] if keys else root, 0.0)


def engine_config(method: str) -> EngineConfig:
    speculation = SpeculationConfig(method=method, adaptive=False)
    return EngineConfig(**ENGINE, speculation=speculation)  # type: ignore[arg-type]


@functools.cache
def demo_runner() -> TorchRunner:
    """A runner of the demo model that looks up n-grams where the scheduler has places for drafts."""
    return load_runner(resolve("demo"), engine_config("ngram"))


@functools.cache
def engine_answers(method: str) -> Answers:
    """All requests in one batch, without a platform around the engine."""
    config, runner = engine_config(method), demo_runner()
    hasher = ChainHasher(bytes(32), config.block_size)
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, config.block_size), hasher, config, runner.max_model_len, runner.eos_token_ids
    )
    sequences = [sequence(body, hasher) for body in BODIES]
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.commit(step, runner.launch(step)())
    drafts = scheduler.drafts
    answers = [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences]
    return Answers(answers, drafts.num_drafted if drafts else 0, drafts.num_accepted if drafts else 0)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Answers with the draft model, through the platform."""
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as platform:
        return run_in_turn(platform, ("draft",), BODIES, STREAMS, REQUESTS)["draft"]


def test_seeded_and_greedy_answers_are_the_same_with_look_up_as_without(
    record_property: Callable[[str, object], None],
) -> None:
    plain, ngram = engine_answers("none"), engine_answers("ngram")
    record_property("drafted_and_accepted", [ngram.drafted, ngram.accepted])

    assert ngram.token_ids == plain.token_ids
    assert 0 < ngram.accepted <= ngram.drafted
    assert len({tuple(token_ids) for token_ids in plain.token_ids}) == REQUESTS, (
        "the requests differ, so that equal answers say something"
    )


@pytest.mark.slow
def test_seeded_and_greedy_answers_of_the_platform_are_the_same_with_a_draft_model(drafted: Run) -> None:
    assert drafted.token_ids == engine_answers("none").token_ids


@pytest.mark.slow
def test_accepted_drafts_are_counted_on_metrics(drafted: Run, record_property: Callable[[str, object], None]) -> None:
    record_property("drafted_and_accepted", list(drafted.counts))

    assert 0 < drafted.counts.accepted <= drafted.counts.drafted
