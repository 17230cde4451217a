"""Reports taken apart: pages as their markup says them, and records to make them of."""

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec

from penstock_loadtest.report.page import write_report
from penstock_loadtest.results.records import Record
from penstock_loadtest.scenario import Scenario
from tests.unit.loadtest.simulated import SCENARIO, write_folder

SHORT = msgspec.structs.replace(SCENARIO, duration_s=20.0, warmup_s=0.0)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page taken apart; every element must be closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def alerts(self) -> int:
        return sum(attributes.get("role") == "alert" for _, attributes in self.tags)

    def row(self, name: str) -> list[str]:
        return next(row for row in self.cells if row and row[0] == name)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def written(folder: Path) -> Page:
    """The page of a folder, written with its plots."""
    return Page(write_report(folder).read_text(encoding="utf-8"))


def reported(folder: Path, records: Sequence[Record], scenario: Scenario = SHORT) -> Page:
    return written(write_folder(folder, records, scenario))


def request(index: int = 0, **facts: object) -> Record:
    return msgspec.convert({"index": index, "intended_s": float(index), "sent_s": float(index), **facts}, Record)


def finished(index: int, *, ttft: float = 0.2, gap: float = 0.02, chunks: int = 4, **facts: object) -> Record:
    times = [index + ttft + gap * n for n in range(chunks)]
    common = {
        "first_s": times[0],
        "end_s": times[-1],
        "chunk_s": times,
        "chunk_tokens": [1] * chunks,
        "tokens": chunks,
        "outcome": "finished",
    }
    return request(index, **common, **facts)
