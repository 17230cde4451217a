from pathlib import Path

import pytest

from penstock.router.batches import scan as scan_module
from penstock.router.batches.scan import ScannedInput, most_lines, scan
from tests.unit.router.batches.batch_fakes import ENDPOINT, line, lines


def scanned(folder: Path, data: bytes, max_lines: int = 100, max_line_bytes: int = 1000) -> ScannedInput:
    path = folder / "in.jsonl"
    path.write_bytes(data)
    return scan(path, ENDPOINT, max_lines, max_line_bytes)


def test_lines_are_found_where_they_are_whatever_ends_them(tmp_path: Path) -> None:
    rows = [line("a"), line("b") + b"\r", b"", b"  ", line("c")]

    found = scanned(tmp_path, b"\n".join(rows))

    assert found.errors == []
    assert [found.read(number).custom_id for number in range(3)] == ["a", "b", "c"]
    assert len(found.starts) == 3


def test_errors_name_lines_of_the_file_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    rows = [line("a"), b"", b"{", line("a"), line("b", url="/v1/embeddings"), line("c")]

    found = scanned(tmp_path, b"\n".join(rows))

    assert [(error.line, error.code) for error in found.errors] == [
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_url"),
    ]


def test_a_line_that_is_too_long_is_skipped_and_named(tmp_path: Path) -> None:
    rows = [line("a"), line("b", prompt="x" * 5000), line("c")]

    found = scanned(tmp_path, b"\n".join(rows))

    assert [(error.line, error.code) for error in found.errors] == [(2, "line_too_long")]
    assert [found.read(number).custom_id for number in range(2)] == ["a", "c"]


def test_too_many_lines_and_none_are_errors(tmp_path: Path) -> None:
    assert [error.code for error in scanned(tmp_path, lines(6), max_lines=5).errors] == ["too_many_lines"]
    assert scanned(tmp_path, lines(5), max_lines=5).errors == []
    assert [error.code for error in scanned(tmp_path, b"\n \n").errors] == ["empty_file"]


def test_a_file_of_nothing_but_errors_is_not_read_to_its_end(tmp_path: Path) -> None:
    found = scanned(tmp_path, b"{\n" * 1000)

    assert len(found.errors) == 32


def test_blank_lines_are_bounded_too(tmp_path: Path) -> None:
    most = most_lines(5)

    assert scanned(tmp_path, lines(1) + b"\n" * most, max_lines=5).errors == []
    [error] = scanned(tmp_path, lines(1) + b"\n" * 1_000_000, max_lines=5).errors
    assert (error.code, error.line) == ("too_many_lines", most + 1)


def test_what_is_over_is_not_read_any_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "TURN_S", -1.0)
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(50))
    num_asked = 0

    def is_over() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked == 10

    assert len(scan(path, ENDPOINT, 100, 1000, is_over).starts) == 10
