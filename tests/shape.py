"""The shape of the code as figures: modules of each package, lengths of files and functions, lines of each layer.

    python -m tests.shape [ROOT]

ROOT: a checkout, this one by default, so that two commits can be held side by side. Counts are of tracked Python files;
a function's length is from `def` to its last line, docstring included.
"""

import ast
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.unit.test_docstrings import docstrings, is_refused

LAYERS = ("platform", "loadtest", "tests", "bench", "examples")
MAX_COLUMNS = 120


class Source(NamedTuple):
    """A Python file: its path below the root, and its text."""

    path: Path
    text: str

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


def read_sources(root: Path) -> list[Source]:
    """Every tracked Python file, ordered by path."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=root, capture_output=True, check=True, text=True)
    names = sorted(name for name in listed.stdout.split("\0") if name and not (root / name).is_symlink())
    return [Source(Path(name), (root / name).read_text(encoding="utf-8")) for name in names if (root / name).is_file()]


def function_lengths(source: Source) -> Iterator[int]:
    """Lines of each function and method."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def late_imports(source: Source) -> int:
    """Import statements inside of functions."""
    functions = [
        node for node in ast.walk(ast.parse(source.text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = {
        id(node)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return len(found)


def spread_of(values: Sequence[int]) -> str:
    """Median, ninetieth percentile and maximum, as `median / p90 / max`."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):g} / {ordered[int(0.9 * (len(ordered) - 1))]} / {ordered[-1]}"


def describe(root: Path) -> list[tuple[str, str]]:
    """Rows of the table: what is counted, and the figure."""
    sources = read_sources(root)
    product = [source for source in sources if source.path.parts[0] in ("platform", "loadtest")]
    modules = Counter(source.path.parent for source in product if source.path.name != "__init__.py")
    refused = [text for source in sources for _, text in docstrings(ast.parse(source.text)) if is_refused(text)]
    num_docstrings = sum(1 for source in sources for _ in docstrings(ast.parse(source.text)))
    rows = [(f"modules in {package}", str(count)) for package, count in sorted(modules.items())]
    rows += [
        ("most modules at one level", "{1} in {0}".format(*modules.most_common(1)[0])),
        ("lines of a file, product: median / p90 / max", spread_of([source.num_lines for source in product])),
        (
            "lines of a function, product: median / p90 / max",
            spread_of([length for source in product for length in function_lengths(source)]),
        ),
    ]
    layers = Counter[str]()
    for source in sources:
        name = "/".join(source.path.parts[:2]) if source.path.parts[0] == "platform" else source.path.parts[0]
        layers[name] += source.num_lines
    rows += [(f"lines in {name}", str(count)) for name, count in sorted(layers.items())]
    rows += [
        ("docstrings that do not stand alone", f"{len(refused)} of {num_docstrings}"),
        (
            f"lines over {MAX_COLUMNS} columns",
            str(sum(len(line) > MAX_COLUMNS for source in sources for line in source.text.splitlines())),
        ),
        ("imports inside functions, product", str(sum(late_imports(source) for source in product))),
    ]
    return rows


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    for name, figure in describe(root):
        sys.stdout.write(f"{name:52} {figure}\n")


if __name__ == "__main__":
    main()
