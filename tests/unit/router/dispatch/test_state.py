"""The writers of a request's state, as an `ast` walk over its package shows: the dispatcher, and `obstruction` of the
one thing that is its own."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from penstock.router.dispatch import dispatcher

ROOM = Path(inspect.getfile(dispatcher)).parent


def writes(source: str) -> Iterator[str]:
    """Targets such as `state.sid` or `mailbox.state.carrier`, or of the receipt, that are assigned or deleted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] in ("state", "receipt"):
                yield f"{owner}.{node.attr}"


def test_only_the_dispatcher_and_the_receipts_one_place_write() -> None:
    found = {file.name: set(writes(file.read_text(encoding="utf-8"))) for file in ROOM.glob("*.py")}

    assert found.pop("obstruction.py") == {"state.obstruction"}
    assert {name for name, targets in found.items() if targets} == {"dispatcher.py", "receipt.py"}
