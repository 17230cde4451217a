"""`make clients`: its table is no older than the API, and every client has what it takes."""

import pytest

from penstock.router.api.openapi import document
from tests.clients.run import CLIENTS, HERE, PAGE, Client, Server, run_all
from tests.clients.table import BEGIN, END, Row, TableWithoutPlace, digest, read, replace

OLD = "docs/clients.md is older than /openapi.json: run `make clients`, which writes it again"
EMPTY = replace(f"before\n{BEGIN}\n{END}\nafter", [])
ROWS = [
    Row("a", "1.0", ("a chat", "a stream"), (), "0123456789ab"),
    Row("b", "", (), ("everything, x is not there",), "0123456789ab"),
]


def test_the_table_is_not_older_than_the_api() -> None:
    rows = read(PAGE.read_text(encoding="utf-8"))

    assert {row.client for row in rows} == {client.name for client in CLIENTS}, OLD
    assert {row.digest for row in rows} == {digest(document())}, OLD


def test_no_row_of_the_table_tells_of_a_failure() -> None:
    rows = read(PAGE.read_text(encoding="utf-8"))

    assert [row for row in rows if any(item.startswith("failed: ") for item in row.did_not)] == []


def test_every_client_has_a_script_and_exact_pins() -> None:
    scripts = {path.stem for path in HERE.glob("*.py")} - {"run", "table"}
    pinned = {path.stem for path in (HERE / "pins").glob("*.txt")}

    assert scripts == {client.name for client in CLIENTS}
    assert pinned == {client.name for client in CLIENTS if client.package is not None and client.interpreter is None}
    for path in (HERE / "pins").glob("*.txt"):
        assert all("==" in line for line in path.read_text(encoding="utf-8").split()), path.name


def test_a_table_is_read_as_it_was_written_in_the_order_of_names() -> None:
    page = replace(EMPTY, reversed(ROWS))

    assert read(page) == ROWS
    assert page.startswith("before\n")
    assert page.endswith("\nafter")
    assert replace(page, ROWS) == page


def test_what_a_client_says_can_not_break_the_table() -> None:
    rows = [Row("a", "1", (), ("failed: a | b\nc",), "0123456789ab")]

    assert read(replace(EMPTY, rows))[0].did_not == ("failed: a / b c",)


@pytest.mark.parametrize("page", ["", END, EMPTY.replace(END, f"| a | b |\n{END}")])
def test_a_page_without_its_place_or_columns_is_refused(page: str) -> None:
    with pytest.raises(TableWithoutPlace):
        read(page)


def test_the_digest_changes_with_the_api_and_not_with_the_version() -> None:
    described = document()
    released = described | {"info": described["info"] | {"version": "99"}}
    without = described | {"paths": {path: described["paths"][path] for path in list(described["paths"])[1:]}}

    assert digest(described) == digest(released)
    assert digest(described) != digest(without)


def test_a_client_without_its_api_or_packages_is_not_run_and_its_row_says_so() -> None:
    server = Server("", "", HERE)
    clients = [Client("x", None, path="/v1/none"), Client("y", "y", interpreter="NOWHERE"), Client("z", "z")]
    rows, failures = run_all(clients, {"x": None, "y": None, "z": None}, server, document())

    assert failures == 1
    assert [row.did_not for row in rows] == [
        ("everything, the API has no /v1/none yet",),
        ("everything, NOWHERE names no interpreter",),
        ("failed: it could not be installed",),
    ]
