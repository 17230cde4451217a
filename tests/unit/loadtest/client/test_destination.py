"""URL and keys, from options and environment."""

import pytest

from penstock_loadtest.client.destination import find_destination, read_keys
from penstock_loadtest.errors import ScenarioInvalid, TargetUnreachable
from penstock_loadtest.scenario import Scenario, Share


def test_a_tenant_without_a_variable_has_the_default_key() -> None:
    assert read_keys(Scenario(), {"OPENAI_API_KEY": "sk-1"}) == {"default": "sk-1"}


def test_tenants_have_the_keys_of_their_variables() -> None:
    scenario = Scenario(tenants=[Share(name="a", key_env="KEY_A"), Share(name="b")])

    assert read_keys(scenario, {"KEY_A": "sk-a", "OPENAI_API_KEY": "sk-1"}) == {"a": "sk-a", "b": "sk-1"}


def test_no_key_is_no_error_for_a_server_that_asks_for_none() -> None:
    assert read_keys(Scenario(), {}) == {}


def test_a_variable_that_is_not_set_is_named() -> None:
    scenario = Scenario(tenants=[Share(name="a", key_env="KEY_A")])

    with pytest.raises(ScenarioInvalid, match=r"tenant a .* KEY_A, which is not set"):
        read_keys(scenario, {"OPENAI_API_KEY": "sk-1"})


def test_without_a_url_the_way_to_name_one_is_said() -> None:
    with pytest.raises(ScenarioInvalid, match=r"--url .* OPENAI_BASE_URL"):
        find_destination(Scenario(), None, None, {})


def test_the_url_of_the_environment_is_the_default() -> None:
    with pytest.raises(TargetUnreachable, match=r"127\.0\.0\.1:9"):
        find_destination(Scenario(), None, None, {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"})
