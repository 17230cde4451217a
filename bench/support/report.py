"""What every benchmark ends with: a table on standard output, and bench/NAME.json with the commit, the hardware and the
command."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parents[1]
RECORDS = (":(top,exclude)bench/*.json", ":(top,exclude)docs/*.png")


@dataclass(frozen=True, slots=True)
class Row:
    """One line: our median and the rival's, in `unit`; None where there is none."""

    name: str
    ours: float | None
    rival: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """Quotient ours / rival; None without a rival."""
        return self.ours / self.rival if self.ours is not None and self.rival else None


def write_report(
    name: str, rows: Iterable[Row], *, notes: Iterable[str] = (), variant: str = "", folder: Path = FOLDER
) -> Path:
    """Print the table and write folder/name.json, or folder/name_variant.json; returns that path."""
    rows, notes = list(rows), list(notes)
    report = {
        "name": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "command": " ".join(["python -m", f"bench.{name.replace('-', '_')}", *map(_without_folder, sys.argv[1:])]),
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        "notes": notes,
    }
    path = folder / f"{name}{variant and '_'}{variant}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(name, rows, notes)
    return path


def commit() -> str:
    """Hash of the checkout's commit, with `-dirty` when files other than records and pictures differ from it; `unknown`
    outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *RECORDS) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def hardware() -> dict[str, str | int]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
    }


def _without_folder(argument: str) -> str:
    """The argument without the folder of a path, which is this machine's affair."""
    return Path(argument).name if argument.startswith("/") else argument


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=FOLDER, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def print_table(name: str, rows: Iterable[Row], notes: Iterable[str] = ()) -> None:
    table = Table(title=name)
    table.add_column("")
    for heading in ("ours", "rival", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    for row in rows:
        table.add_row(row.name, _figure(row.ours), _figure(row.rival), _figure(row.ratio), row.unit)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
