"""Everything that a step may have, side by side in a model in parts: the tokens are those of the whole model.

Logits in parts are sums in another order. Where two tokens are as likely, to within NEAR_TIE, the other one may come;
such answers are counted, and there may be few.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jsonschema
import msgspec
import pytest

from penstock.adapters.store import digest_of
from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.lora import LoraAdapter
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.compute.parallel.engine_runs import ask, config, run_engine, search
from tests.unit.workers.compute.parallel.tiny_awq import saved_as_awq
from tests.unit.workers.constrained import SCHEMAS, ascii_source, constraint, text_of
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.tiny_models import BLOCK_SIZE, saved, tiny_model

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.timeout(180)]

NEAR_TIE = 1e-4
"""Difference of logits."""
ROUNDED_OTHERWISE = 2e-2
"""The same with keys and values in 8 bits: one that falls the other way is 1/127 of its head's largest number."""
MAX_NEAR_TIES = 1
SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.9,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
}


class Setup(NamedTuple):
    """What a replica is set to."""

    is_awq: bool
    speculation: Literal["ngram", "draft"]
    kv_dtype: Literal["auto", "int8"]


SETUPS = {
    "4 bits, look-up, KV in 8 bits": Setup(is_awq=True, speculation="ngram", kv_dtype="int8"),
    "dense, a draft model": Setup(is_awq=False, speculation="draft", kv_dtype="auto"),
    "4 bits, a draft model, KV in 8 bits": Setup(is_awq=True, speculation="draft", kv_dtype="int8"),
}


class Checkpoints(NamedTuple):
    model: ModelSource
    draft: ModelSource
    adapter: Path

    def settings(self, setup: Setup, size: int) -> EngineConfig:
        draft = (
            {"method": "draft", "model": str(self.draft.path)} if setup.speculation == "draft" else {"method": "ngram"}
        )
        speculation = SpeculationConfig(**draft, max_draft_tokens=3, adaptive=False)  # type: ignore[arg-type]
        return msgspec.structs.replace(config(size), speculation=speculation, kv_dtype=setup.kv_dtype)


def write(setup: Setup, folder: Path) -> Checkpoints:
    """The draft model is half of the model, so that some of its drafts are right."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256}
    model = ascii_source(folder / "model", saved_as_awq if setup.is_awq else saved, **sizes)
    draft = ascii_source(folder / "draft", saved, **sizes, num_hidden_layers=1)
    adapted(tiny_model("llama", **sizes), folder / "adapter", seed=1, size=0.3)
    return Checkpoints(model, draft, folder / "adapter")


class Answers(NamedTuple):
    """What was answered, by the name of what was asked."""

    tokens: dict[str, list[int]]
    beams: list[list[int]]
    scores: list[list[float]]
    """Log probabilities of the prompt's tokens that is scored."""
    num_drafted: int


def requests(runner: TorchRunner, adapter: LoraAdapter) -> dict[str, Sequence]:
    asked = {
        "greedy": ask(40, 1),
        "again and again": ask(6, 3, max_tokens=24),
        "sampled": ask(17, 2, seed=5, **SAMPLED),
        "with log probabilities": ask(23, 3, temperature=1.3, seed=6, top_k=7, logprobs=3),
        "scored": ask(31, 4, max_tokens=3, prompt_logprobs=2),
        "biased": ask(9, 5, logit_bias=((5, 2.0),)),
        "adapter": ask(20, 6, adapter=adapter),
        "adapter, sampled": ask(13, 7, adapter=adapter, seed=8, **SAMPLED),
    }
    for number, temperature in ((0, 0.0), (2, 0.9)):
        seq = ask(12, 9 + number, max_tokens=60, temperature=temperature, seed=3)
        seq.constrain(runner.compile_grammar(constraint(SCHEMAS[number]), "tenant", []))
        asked[f"schema {number}"] = seq
    return asked


def answers(runner: TorchRunner, checkpoints: Checkpoints) -> Answers:
    adapter = runner.load_adapter(digest_of(checkpoints.adapter), checkpoints.adapter, 16)
    asked = requests(runner, adapter)
    run_engine(runner, *asked.values())
    beams = search(runner, ask(14, 7, num_beams=3, num_returned=3))
    return Answers(
        {name: seq.token_ids[seq.num_prompt_tokens :] for name, seq in asked.items()},
        beams,
        [memoryview(scores.logprobs).cast("f").tolist() for scores in asked["scored"].prompt_logprobs],
        sum(seq.acceptance is not None for seq in asked.values()),
    )


def near_ties(found: Mapping[str, list[int]], wanted: Mapping[str, list[int]], whole: TorchRunner, bound: float) -> int:
    """Greedy answers that part where two tokens are as likely; none may part elsewhere."""
    count = 0
    for name, tokens in wanted.items():
        if found[name] == tokens:
            continue
        assert name in ("greedy", "again and again", "scored"), f"{name}: {found[name]} instead of {tokens}"
        [seq] = [seq for key, seq in requests(whole, None).items() if key == name]  # type: ignore[arg-type]
        place = next(place for place, pair in enumerate(zip(found[name], tokens, strict=True)) if pair[0] != pair[1])
        seq.token_ids += tokens[:place]
        seq.block_table = list(range(-(-seq.num_tokens // BLOCK_SIZE)))
        _, [logits] = whole.forward(Step([Chunk(seq, 0, seq.num_tokens)], []))
        assert logits.max() - logits[found[name][place]] < bound, name
        count += 1
    return count


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] if (size, place) not in ((2, 0), (2, 1)) else [])
        for size, (place, name) in itertools.product((2, 4), enumerate(SETUPS))
    ],
)
def test_answers_in_parts_are_those_of_the_whole_model_whatever_is_combined(
    name: str, size: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    setup = SETUPS[name]
    checkpoints = write(setup, tmp_path)
    whole = load_runner(checkpoints.model, checkpoints.settings(setup, 1), poison=True)
    wanted = answers(whole, checkpoints)
    parts = load_runner(checkpoints.model, checkpoints.settings(setup, size), poison=True)
    try:
        found = answers(parts, checkpoints)
    finally:
        parts.close()

    is_rounded = setup.kv_dtype == "int8"
    num_ties = near_ties(found.tokens, wanted.tokens, whole, ROUNDED_OTHERWISE if is_rounded else NEAR_TIE)
    record_property("near_ties", num_ties)
    assert num_ties <= MAX_NEAR_TIES
    assert found.beams == wanted.beams
    for mine, theirs in zip(found.scores, wanted.scores, strict=True):
        assert mine == pytest.approx(theirs, abs=ROUNDED_OTHERWISE if is_rounded else NEAR_TIE)
    assert found.num_drafted, "nothing was drafted"
    for number in (0, 2):
        jsonschema.validate(json.loads(text_of(found.tokens[f"schema {number}"])), SCHEMAS[number])
    assert wanted.tokens["adapter"] != wanted.tokens["greedy"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"exact": True},
            "engine.exact: true needs the whole model in one process, not engine.tensor_parallel_size: 2",
        ),
        (
            {"activations": "int8", "dtype": "auto"},
            "engine.activations: int8 is for the kernels that compute a whole model on a CPU, "
            "not for engine.tensor_parallel_size: 2",
        ),
        ({"runner": "timed"}, "engine.tensor_parallel_size: 2 is for a runner that computes, and timed sleeps"),
        ({"tensor_parallel_size": 0}, "engine.tensor_parallel_size must be between 1 and"),
        ({"tensor_parallel_size": 1000}, "engine.tensor_parallel_size must be between 1 and"),
    ],
)
def test_what_parts_can_not_do_is_refused_by_its_settings(settings: Mapping[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{"dtype": "float32", "tensor_parallel_size": 2} | settings)  # type: ignore[arg-type]

    assert sentence in str(refused.value)
