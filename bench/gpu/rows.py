"""Rows as a step writes them, a line of JSON each, at once: what is written stays when the step is killed."""

import json
from pathlib import Path

from bench.gpu.record import RowData


class Rows:
    """What a step has found, in a file and on standard output."""

    def __init__(self, path: Path | None) -> None:
        """path: None prints only."""
        self._path = path

    def add(
        self, name: str, ours: float | None = None, rival: float | None = None, unit: str = "", note: str = ""
    ) -> None:
        """Add a row. ours, rival: figures in `unit`; None where there is none. note: what else is to be known, or why
        there is no figure."""
        ratio = ours / rival if ours is not None and rival else None
        row: RowData = {"name": name, "ours": ours, "rival": rival, "unit": unit, "ratio": ratio}
        if note:
            row["note"] = note
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(describe(row), flush=True)


def read_rows(path: Path) -> list[RowData]:
    """Rows that have been written whole."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
            if line.endswith("\n")]  # fmt: skip


def describe(row: RowData) -> str:
    """The row as one line of text."""
    figures = [f"{row[side]:.4g}" for side in ("ours", "rival") if row[side] is not None]
    ratio = "" if row["ratio"] is None else f" (ratio {row['ratio']:.3g})"
    note = f"; {row['note']}" if row.get("note") else ""
    return f"{row['name']}: {' beside '.join(figures)} {row['unit']}{ratio}".rstrip(": ") + note
