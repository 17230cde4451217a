import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.batches.results import ResultFile, assemble


def explain(number: int) -> bytes:
    return b"not run: %d" % number


def assembled(folder: Path, marks: list[int]) -> tuple[list[bytes], list[bytes]]:
    output, errors = folder / "output", folder / "errors"
    for path in (output, errors):
        path.unlink(missing_ok=True)
    assemble(folder / "results", marks, explain, output, errors)
    return output.read_bytes().splitlines(), errors.read_bytes().splitlines()


def test_results_come_in_the_order_of_the_input_each_in_its_file(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "results", 1)
    results.append(2, "completed", b"two\twith tabs")
    results.append(0, "completed", b"zero")
    results.append(1, "failed", b"one")
    results.close()

    assert assembled(tmp_path, [1, 1, 1, 0]) == ([b"zero", b"two\twith tabs"], [b"one", b"not run: 3"])


def test_of_a_line_that_two_gateways_ran_the_marked_one_counts(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        results = ResultFile(tmp_path / "results", epoch)
        results.append(0, "completed", b"of %d" % epoch)
        results.close()

    assert assembled(tmp_path, [2]) == ([b"of 2"], [])
    assert assembled(tmp_path, [0]) == ([], [b"not run: 0"])
    assert assembled(tmp_path, [4]) == ([], [b"not run: 0"]), "its result is lost"


@given(st.integers(0, 30))
def test_a_row_that_was_cut_off_is_no_result(size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = ResultFile(folder / "results", 1)
        results.append(0, "completed", b"zero")
        results.append(1, "completed", b"one")
        results.close()
        path = folder / "results" / "1"
        whole = path.read_bytes()
        path.write_bytes(whole[:size])

        output, errors = assembled(folder, [1, 1])

        num_whole = whole[:size].count(b"\n")
        assert output == [b"zero", b"one"][:num_whole]
        assert errors == [b"not run: 0", b"not run: 1"][num_whole:]


def test_a_row_that_the_disk_did_not_take_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = ResultFile(tmp_path / "results", 1)
    results.append(0, "completed", b"zero")
    real = os.pwrite

    def half(descriptor: int, data: bytes, at: int) -> int:
        real(descriptor, data[:7], at)
        raise OSError("no space left")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="no space"):
        results.append(1, "completed", b"first try")
    monkeypatch.setattr(os, "pwrite", real)
    results.append(1, "completed", b"second")
    results.close()

    assert assembled(tmp_path, [1, 1])[0] == [b"zero", b"second"]


def test_nothing_is_written_to_results_that_are_closed(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "results", 1)
    results.close()

    with pytest.raises(OSError, match="closed"):
        results.append(0, "completed", b"x")
