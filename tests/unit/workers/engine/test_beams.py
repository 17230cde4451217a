"""The choice among continuations; what a whole search finds is held against transformers in the compute tests."""

from typing import Any

from penstock.wire.frames import SamplingParams, TokenLogprobs
from penstock.workers.engine.beams import BeamSearch

NUM_BEAMS = 4


class Row(tuple[tuple[int, float], ...]):
    """Likeliest tokens that count how often a part of them was taken."""

    num_taken = 0

    def __getitem__(self, key: Any) -> Any:
        self.num_taken += 1
        return super().__getitem__(key)


def test_only_continuations_that_are_kept_are_described() -> None:
    search = BeamSearch(SamplingParams(9, num_beams=NUM_BEAMS, stop_token_ids=(0, 1, 2), logprobs=2), frozenset())
    row = Row((token_id, -0.5 * token_id) for token_id in range(search.num_candidates))
    going = search.advance([TokenLogprobs(0.0, row)])

    assert [each.token_id for each in going] == [3, 4, 5, 6]
    assert search.paths[1].logprobs == (TokenLogprobs(-2.0, ((0, -0.0), (1, -0.5))),)
    assert row.num_taken == 3 + NUM_BEAMS  # those that end an answer, and those that go on


def test_where_nobody_wants_log_probabilities_none_are_kept() -> None:
    search = BeamSearch(SamplingParams(9, num_beams=NUM_BEAMS), frozenset())
    row = Row((token_id, -0.5 * token_id) for token_id in range(search.num_candidates))
    search.advance([TokenLogprobs(0.0, row)])

    assert row.num_taken == 0
    assert {path.logprobs for path in search.paths} == {()}
