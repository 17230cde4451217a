"""The tests that may be skipped: a list of node ids with their reasons, both with shell wildcards, one to a line, `id |
reason`."""

from fnmatch import fnmatchcase
from typing import NamedTuple


class Skip(NamedTuple):
    node_id: str
    reason: str


def parse(text: str) -> list[Skip]:
    """The list's entries; blank lines and lines that begin with # are comments. Raises ValueError on a line without a
    reason."""
    entries = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        node_id, bar, reason = (part.strip() for part in line.partition("|"))
        if not (node_id and bar and reason):
            raise ValueError(f"an allowed skip is `node id | reason`, not {line!r}")
        entries.append(Skip(node_id, reason))
    return entries


def unlisted(skipped: list[Skip], allowed: list[Skip]) -> list[Skip]:
    """The skipped tests that no entry names with its reason. Brackets in node ids are taken literally."""
    return [skip for skip in skipped if not any(_is_covered(skip, entry) for entry in allowed)]


def _is_covered(skip: Skip, entry: Skip) -> bool:
    return fnmatchcase(skip.node_id, entry.node_id.replace("[", "[[]")) and fnmatchcase(
        skip.reason, entry.reason.replace("[", "[[]")
    )
