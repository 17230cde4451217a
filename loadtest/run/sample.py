"""The requests of a run that are sent again at its end: a uniform sample of those whose answer must be the same."""

import random
from typing import NamedTuple

from penstock_loadtest.client.client import Answer
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.records import Record


class Repeatable(NamedTuple):
    planned: Planned
    body: bytes
    record: Record


class Sampler:
    """Keeps `size` of the requests offered, each with the same probability (Vitter's algorithm R)."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self._size = size
        self._rng = rng
        self._offered = 0
        self.kept: list[Repeatable] = []

    def offer(self, planned: Planned, answer: Answer) -> None:
        """Take a request into the sample by chance; left out unless it finished, with an answer to compare, and is
        greedy or seeded."""
        record = answer.record
        if (
            not self._size
            or record.outcome != "finished"
            or record.answer_digest is None
            or (planned.temperature > 0 and planned.seed is None)
        ):
            return
        self._offered += 1
        if len(self.kept) < self._size:
            self.kept.append(Repeatable(planned, answer.body, record))
        elif (place := self._rng.randrange(self._offered)) < self._size:
            self.kept[place] = Repeatable(planned, answer.body, record)
