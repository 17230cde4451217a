"""A run's folder, read for its report. Scenario and records are enough: a killed run leaves nothing else."""

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from penstock_loadtest.errors import RecordsInvalid
from penstock_loadtest.results.columns import Columns, read_columns
from penstock_loadtest.results.records import Record, read_records, write_json
from penstock_loadtest.results.series import Observed
from penstock_loadtest.results.summary import Summary, summarize_columns
from penstock_loadtest.scenario import Scenario

SLOWEST = 12
T = TypeVar("T")


class Verdict(Protocol):
    """The part of a ledger that is shown."""

    @property
    def is_balanced(self) -> bool: ...
    @property
    def sentences(self) -> list[str]: ...


class Checked(msgspec.Struct, frozen=True):
    """The part of ledger.json that is shown."""

    is_balanced: bool
    sentences: list[str]


class Server(msgspec.Struct, frozen=True):
    """The server that was measured, from target.json."""

    url: str
    model: str
    simulated: str = ""  # what stood for the server, in sentences; empty: it was a real one
    command: str = ""  # plays scenario.yaml again; empty: the load tester does


class Ending(msgspec.Struct, frozen=True):
    """How the run ended, from run.json."""

    ended: str = ""  # ISO 8601
    is_interrupted: bool = False
    turns_not_sent: int = 0
    plan_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a report is made of."""

    name: str  # of the folder
    scenario: Scenario
    columns: Columns
    summary: Summary
    slowest: list[Record]  # by the wait for the first token
    observed: list[Observed]
    verdict: Verdict | None  # None: the run did not get as far as its ledger
    server: Server | None  # None: not noted
    ending: Ending | None  # None: it was killed before it ended


class Slowest:
    """Collector of the SLOWEST requests that waited longest for their first token, out of any number."""

    def __init__(self, *, warmup_s: float) -> None:
        self._warmup_s = warmup_s
        self._heap: list[tuple[float, int, Record]] = []
        self._count = 0

    def collect(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the same records, and keep the slowest of them."""
        for record in records:
            self._note(record)
            yield record

    def _note(self, record: Record) -> None:
        waited = measure_wait_s(record)
        if waited is None or record.intended_s < self._warmup_s:
            return
        self._count += 1
        if len(self._heap) < SLOWEST:
            heapq.heappush(self._heap, (waited, -self._count, record))
        elif waited > self._heap[0][0]:
            heapq.heapreplace(self._heap, (waited, -self._count, record))

    @property
    def records(self) -> list[Record]:
        """Slowest first."""
        return [record for _, _, record in sorted(self._heap, reverse=True)]


def measure_wait_s(record: Record) -> float | None:
    """Seconds that a request waited: its TTFT, or how long it took to end where no token came; None for one with
    neither, and for a whole answer."""
    if record.ttft_s is not None:
        return record.ttft_s
    is_answered = record.is_whole and record.outcome == "finished"
    return None if record.end_s is None or is_answered else record.end_s - record.intended_s


def read_run(folder: Path) -> Run:
    """Raises RecordsInvalid where scenario or records are missing or can't be read. Writes summary.json where there is
    none."""
    scenario = read_json(folder / "scenario.json", Scenario)
    slowest = Slowest(warmup_s=scenario.warmup_s)
    columns = read_columns(slowest.collect(read_records(folder / "records.jsonl")), warmup_s=scenario.warmup_s)
    summary = summarize_columns(columns, scenario)
    if not (folder / "summary.json").exists():
        write_json(folder / "summary.json", summary)
    return Run(
        name=folder.resolve().name,
        scenario=scenario,
        columns=columns,
        summary=summary,
        slowest=slowest.records,
        observed=list(_observed(folder / "observed.jsonl")),
        verdict=_read_if_exists(folder / "ledger.json", Checked),
        server=_read_if_exists(folder / "target.json", Server),
        ending=_read_if_exists(folder / "run.json", Ending),
    )


def _observed(path: Path) -> Iterator[Observed]:
    """A last line cut short by a kill is left out."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Observed)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise RecordsInvalid(f"{path}, line {number}: {error}") from None


def _read_if_exists(path: Path, kind: type[T]) -> T | None:
    return read_json(path, kind) if path.exists() else None


def read_json(path: Path, kind: type[T]) -> T:
    """A file's JSON as `kind`, by the standard library's decoder: it reads Infinity, which a scenario's open limits are
    written as. Raises RecordsInvalid."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), kind, strict=False, dec_hook=_path)
    except OSError as error:
        raise RecordsInvalid(f"{path} can't be read: {error.strerror}.") from None
    except msgspec.ValidationError as error:
        raise RecordsInvalid(f"{path}: {error}.") from None
    except ValueError as error:
        raise RecordsInvalid(f"{path} is not JSON: {error}.") from None


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is object:  # settings of a ladder or comparison: anything
        return value
    raise NotImplementedError(f"{kind} has no meaning in a run's folder.")
