"""Runs that are computed instead of made: what ladder, compare and overhead measure of a server whose figures are
known."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from penstock_loadtest.client.target import Target
from penstock_loadtest.results.ledger import check_ledger
from penstock_loadtest.results.records import Record
from penstock_loadtest.results.summary import summarize
from penstock_loadtest.scenario import Scenario
from penstock_loadtest.studies.measure import Measurement

TARGET = Target(url="http://127.0.0.1:1/v1", model="m", models=["m"], keys={}, exact=None, metrics_url=None)


def target(url: str) -> Target:
    return Target(url=url, model="m", models=["m"], keys={}, exact=None, metrics_url=None)


def answered(index: int, at_s: float, *, ttft_s: float, gap_s: float = 0.01, tokens: int = 4) -> Record:
    chunks = [at_s + ttft_s + place * gap_s for place in range(tokens)]
    return Record(
        index=index,
        intended_s=at_s,
        sent_s=at_s,
        first_s=chunks[0],
        end_s=chunks[-1],
        chunk_s=chunks,
        chunk_tokens=[1] * tokens,
        outcome="finished",
        status=200,
        finish_reason="length",
        tokens=tokens,
        tokens_from="ids",
        metered_tokens=tokens,
    )


def refused(index: int, at_s: float) -> Record:
    return Record(index=index, intended_s=at_s, sent_s=at_s, end_s=at_s, outcome="failed", error="connection refused")


class Modelled:
    """A `run` that takes no time. `records` makes those of a run; `stop_at` names the run, counted from 1, that Ctrl-C
    comes into."""

    def __init__(
        self,
        records: Callable[[Scenario, Target], list[Record]],
        *,
        stop_at: int | None = None,
        kill_at: int | None = None,
    ) -> None:
        self.scenarios: list[Scenario] = []
        self.targets: list[Target] = []
        self.folders: list[str] = []
        self._records = records
        self._stop_at = stop_at
        self._kill_at = kill_at

    def __call__(self, scenario: Scenario, target: Target, folder: Path, console: Console | None) -> Measurement:
        assert not folder.exists(), "a run has a folder of its own"
        folder.mkdir(parents=True)
        self.scenarios.append(scenario)
        self.targets.append(target)
        self.folders.append(folder.name)
        if len(self.scenarios) == self._kill_at:
            raise KeyboardInterrupt
        records = self._records(scenario, target)
        return Measurement(
            folder,
            summarize(records, scenario),
            check_ledger(records, exact=None),
            len(self.scenarios) == self._stop_at,
        )
