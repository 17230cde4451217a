"""A published system prompt on a real engine, through a whole platform: two tenants share it, and nothing else."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from bench.published_prefix import CONFIG, PUBLISHED, ask, count_public_tokens, faults_of, publish, run_round
from bench.support.loopback import prompt
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.tenants import make_keys
from penstock.tenancy.tenants import Settings

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def clients(platform: PlatformProcess) -> Iterator[list[httpx.Client]]:
    keys = asyncio.run(make_keys(platform, {"first": Settings(), "second": Settings()}))
    made = [
        httpx.Client(base_url=platform.url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False)
        for key in keys.values()
    ]
    yield made
    for client in made:
        client.close()


def test_both_tenants_report_the_published_tokens_as_cached_and_nothing_else_is(
    platform: PlatformProcess, clients: list[httpx.Client]
) -> None:
    found = run_round(platform, clients, random.Random(1))

    assert faults_of(found) == []
    assert found.public_tokens > 500
    assert found.public_tokens < found.asked[PUBLISHED].prompt_tokens - 16, "a block of the question lies behind it"


def test_an_answer_behind_a_shared_prefix_is_the_one_that_was_computed_alone(
    platform: PlatformProcess, clients: list[httpx.Client]
) -> None:
    first, second = clients
    text = prompt(random.Random(2), 200)
    before = ask(second, text, max_tokens=12)
    publish(platform, text)
    computed, shared = ask(first, text, max_tokens=12), ask(second, text, max_tokens=12)

    assert (before.cached_tokens, computed.cached_tokens) == (0, 0)
    assert shared.cached_tokens == count_public_tokens(text) > 100
    assert before.text == computed.text == shared.text
