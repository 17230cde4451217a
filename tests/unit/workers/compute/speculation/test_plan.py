import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource, resolve
from penstock.text.vocabulary import load_vocabulary
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.speculation.plan import DraftPlan, plan_draft
from penstock.workers.config import EngineConfig, SpeculationConfig
from tests.unit.workers.tiny_models import saved, tiny_model

DEMO = resolve("demo")
DEMO_CONFIG = read_config(DEMO)


def tiny(folder: Path, **sizes: int) -> ModelSource:
    """A small random model of the demo model's vocabulary, unless `sizes` say otherwise."""
    source = saved(tiny_model("llama", **{"vocab_size": DEMO_CONFIG.vocab_size} | sizes), folder)
    load_vocabulary(DEMO).raw.save(str(folder / "tokenizer.json"))
    return source


def plan(model: str, draft_layers: int | None = None) -> DraftPlan | None:
    speculation = SpeculationConfig(method="draft", model=model, draft_layers=draft_layers)
    return plan_draft(DEMO, DEMO_CONFIG, EngineConfig(speculation=speculation))


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_other_methods_need_no_model(method: str) -> None:
    config = EngineConfig(speculation=SpeculationConfig(method=method))  # type: ignore[arg-type]
    assert plan_draft(DEMO, DEMO_CONFIG, config) is None


def test_the_target_may_draft_with_its_own_first_layers() -> None:
    found = plan("demo", 7)

    assert found is not None
    assert found.is_target
    assert (found.whole.num_layers, found.config) == (30, replace(DEMO_CONFIG, num_layers=7))


def test_another_model_of_the_same_vocabulary_is_taken(tmp_path: Path) -> None:
    found = plan(str(tiny(tmp_path).path))

    assert found is not None
    assert not found.is_target
    assert found.config == found.whole
    assert found.config.num_layers == 2


def test_more_layers_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft_layers is 31, and demo has only 30 layers"):
        plan("demo", 31)


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    small, shuffled = tmp_path / "small", tmp_path / "shuffled"
    with pytest.raises(ConfigError, match=r"has a vocabulary of 96 tokens, and .* one of 49152; they must be the same"):
        plan(str(tiny(small, vocab_size=96).path))
    tiny(shuffled)
    tokenizer = json.loads((shuffled / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġof"] = vocabulary["Ġof"], vocabulary["Ġthe"]
    (shuffled / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match="number their tokens differently"):
        plan(str(shuffled))
