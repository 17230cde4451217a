"""The chart's values as a table: path, default, and the comment that stands beside them in values.yaml.

    python -m deploy.chart_values      # writes docs/chart-values.md

Every value has its comment on its own line. What stands below an annotations, resources, peers or pools key is an
example or data, not a value of its own.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VALUES = ROOT / "deploy" / "helm" / "values.yaml"
TARGET = ROOT / "docs" / "chart-values.md"
LINE = re.compile(
    r"^(?P<indent> *)(?P<name>[A-Za-z]\w*):(?: +(?P<value>[^#\s](?:[^#]|#(?<! #))*?))?(?: +# (?P<comment>.*))?$"
)
WHOLE = ("pools", "resources", "annotations", "networkPolicy.monitoring", "operator", "dns", "internetExcept", "first")
"""Keys, or whole paths, whose value is shown as what it is about, not key by key."""
HEAD = """# The chart's values

Generated from `deploy/helm/values.yaml` by `python -m deploy.chart_values`; `helm show values deploy/helm` shows the \
same with the layout of a values file.
`deploy/helm/values.schema.json` refuses an unknown name, a wrong type or an impossible value, and says where it stands.

| value | default | what |
|---|---|---|
"""


class Value(NamedTuple):
    path: str
    default: str
    """The default as it is written; empty for a mapping or list on lines of its own."""
    comment: str


def read(text: str) -> Iterator[Value]:
    """Values that can be set one by one, and sections that have a comment."""
    path: list[tuple[int, str]] = []
    skip: int | None = None
    for line in text.splitlines():
        found = LINE.match(line)
        indent = len(line) - len(line.lstrip())
        if skip is not None and line.strip() and indent > skip:
            continue
        if found is None:
            continue
        skip = None
        path = [*(part for part in path if part[0] < indent), (indent, found["name"])]
        value = Value(".".join(name for _, name in path), (found["value"] or "").strip(), found["comment"] or "")
        if (found["name"] in WHOLE or value.path in WHOLE) and not value.default:
            skip = indent
        if value.default or value.comment or skip is not None:
            yield value


def table(text: str) -> str:
    rows = (
        f"| `{value.path}` | {_code(value.default)} | {value.comment.replace('|', chr(92) + '|')} |"
        for value in read(text)
    )
    return HEAD + "\n".join(rows) + "\n"


def _code(default: str) -> str:
    return f"`{default}`" if default else "see there"


if __name__ == "__main__":
    TARGET.write_text(table(VALUES.read_text(encoding="utf-8")), encoding="utf-8")
