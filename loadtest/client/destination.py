"""The server that a scenario is sent to: URL and keys, from options and from the environment. Shared by every command
that runs a load."""

import asyncio
from collections.abc import Mapping

from penstock_loadtest.client.target import Target, find_target
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.scenario import Scenario

URL_VARIABLE = "OPENAI_BASE_URL"
KEY_VARIABLE = "OPENAI_API_KEY"


def find_destination(scenario: Scenario, url: str | None, model: str | None, environment: Mapping[str, str]) -> Target:
    """The server, once it has listed its models. `url` None: OPENAI_BASE_URL. Raises TargetUnreachable and
    ScenarioInvalid, within about a second."""
    url = url or environment.get(URL_VARIABLE)
    if not url:
        raise ScenarioInvalid(f"Where is the server? Name it with --url http://HOST:PORT/v1, or in {URL_VARIABLE}.")
    return asyncio.run(find_target(url, keys=read_keys(scenario, environment), model=model))


def read_keys(scenario: Scenario, environment: Mapping[str, str]) -> dict[str, str]:
    """The API key of every tenant that has one; a tenant without `key_env` takes OPENAI_API_KEY, where it is set.
    Raises ScenarioInvalid."""
    keys = {}
    for tenant in scenario.tenants:
        key = environment.get(tenant.key_env or KEY_VARIABLE)
        if key:
            keys[tenant.name] = key
        elif tenant.key_env is not None:
            raise ScenarioInvalid(
                f"The key of tenant {tenant.name} is to be in the environment variable {tenant.key_env}, which is not "
                "set."
            )
    return keys
