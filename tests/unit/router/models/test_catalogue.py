import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.router.config import PoolSpec, ProviderConfig
from penstock.router.models.catalogue import build_served_models
from penstock.text.reasoning import FORMS
from penstock.text.tools.forms import OWN_FORM
from tests.unit.router.completions.test_candidates import CHECKPOINTS, PROVIDER, pool


def models(*pools: PoolSpec, providers: tuple[ProviderConfig, ...] = ()) -> dict[str, bool]:
    """Whether each is exact, by name."""
    found = build_served_models(pools, providers, CHECKPOINTS, lambda specs: max(spec.max_model_len for spec in specs))
    return {name: model.exact for name, model in found.items()}


def test_a_name_is_exact_only_where_whoever_may_answer_is() -> None:
    exact = msgspec.structs.replace(pool("e", "edge", "small"), exact=True)

    assert models(exact) == {"m": True}
    assert models(exact, pool("l", "cloud", "large")) == {"m": False}
    assert models(exact, providers=(PROVIDER,)) == {"m": False}


def test_a_provider_stands_behind_the_names_it_was_given_and_no_other() -> None:
    two_names = msgspec.structs.replace(pool("e", "edge", "small"), served_names=("m", "n"))
    found = build_served_models([two_names], [PROVIDER], CHECKPOINTS, lambda specs: specs[0].max_model_len)

    assert [[route.provider for route in found[name].routes] for name in ("m", "n")] == [[None, "up"], [None]]


def test_a_model_thinks_as_its_pools_say() -> None:
    opened = msgspec.structs.replace(pool("e", "edge", "small"), reasoning_parser="deepseek_r1")
    found = build_served_models([opened], [], CHECKPOINTS, lambda specs: specs[0].max_model_len)

    assert found["m"].tokenizer.reasoning_form == FORMS["deepseek_r1"]
    assert CHECKPOINTS["small"].tokenizer.reasoning_form is None


def test_a_model_is_told_of_tools_as_its_pools_say() -> None:
    text = msgspec.structs.replace(pool("e", "edge", "small"), tool_parser="text")
    found = build_served_models([text], [], CHECKPOINTS, lambda specs: specs[0].max_model_len)

    assert found["m"].tokenizer.tool_form == OWN_FORM
    with pytest.raises(ConfigError, match="tool_parser: mistral"):
        models(msgspec.structs.replace(text, tool_parser="mistral"))
