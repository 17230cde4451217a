"""The sample of requests that are sent again."""

import random
from collections import Counter
from typing import Any

import pytest

from penstock_loadtest.client.client import Answer
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.records import Record
from penstock_loadtest.run.sample import Sampler


def planned(index: int, **more: Any) -> Planned:
    return Planned(index=index, at_s=0.0, max_tokens=1, **more)


def answer(index: int, **more: Any) -> Answer:
    return Answer(
        Record(**({"index": index, "intended_s": 0.0, "outcome": "finished", "answer_digest": "d"} | more)), "", b"body"
    )


def test_every_request_is_as_likely_as_any_other() -> None:
    kept: Counter[int] = Counter()
    for seed in range(2000):
        sampler = Sampler(5, random.Random(seed))
        for index in range(20):
            sampler.offer(planned(index), answer(index))
        kept.update(item.planned.index for item in sampler.kept)

    assert kept.total() == 2000 * 5
    assert all(count == pytest.approx(500, abs=100) for count in kept.values())
    assert len(kept) == 20


def test_no_more_than_asked_for_and_all_where_there_are_few() -> None:
    sampler, none = Sampler(5, random.Random(0)), Sampler(0, random.Random(0))
    for index in range(3):
        sampler.offer(planned(index), answer(index))
        none.offer(planned(index), answer(index))

    assert [item.planned.index for item in sampler.kept] == [0, 1, 2]
    assert none.kept == []


@pytest.mark.parametrize(
    ("settings", "facts", "is_kept"),
    [
        ({"temperature": 0.0}, {}, True),
        ({"temperature": 1.0, "seed": 3}, {}, True),
        ({"temperature": 1.0}, {}, False),
        ({}, {"outcome": "cancelled"}, False),
        ({}, {"answer_digest": None}, False),
    ],
)
def test_only_answers_that_must_come_again_are_kept(
    settings: dict[str, Any], facts: dict[str, Any], is_kept: bool
) -> None:
    sampler = Sampler(1, random.Random(0))

    sampler.offer(planned(0, **settings), answer(0, **facts))

    assert bool(sampler.kept) is is_kept
