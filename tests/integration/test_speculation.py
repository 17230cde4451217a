"""Speculation through the whole platform on the demo model: with any drafter a seeded request says what it says without one."""

from collections.abc import Callable, Iterator

import pytest

from bench.platform_process import PlatformProcess, running_platform
from bench.speculation import CONFIG, POOLS, Run, run

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

REQUESTS, MAX_TOKENS = 8, 14


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def runs(platform: PlatformProcess) -> dict[str, Run]:
    return {pool: run(platform, pool, REQUESTS, MAX_TOKENS) for pool in POOLS}


@pytest.mark.parametrize("pool", ["ngram", "draft"])
def test_seeded_and_greedy_answers_are_the_same_with_a_drafter_as_without(
    runs: dict[str, Run], pool: str, record_property: Callable[[str, object], None]
) -> None:
    record_property(f"{pool}_drafted_and_accepted", [runs[pool].drafted, runs[pool].accepted])

    assert runs[pool].token_ids == runs["plain"].token_ids
    assert len({tuple(token_ids) for token_ids in runs[pool].token_ids}) == REQUESTS, "the requests differ, so that equal answers say something"


@pytest.mark.parametrize("pool", ["ngram", "draft"])
def test_accepted_drafts_are_counted_on_metrics(runs: dict[str, Run], pool: str) -> None:
    assert 0 < runs[pool].accepted <= runs[pool].drafted


def test_a_pool_without_a_drafter_counts_none(runs: dict[str, Run]) -> None:
    assert (runs["plain"].drafted, runs["plain"].accepted) == (0, 0)
