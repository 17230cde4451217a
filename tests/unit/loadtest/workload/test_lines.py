import gzip
from pathlib import Path

import pytest

from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.workload.lines import read_csv, read_header, read_lines, to_number, to_whole


def test_a_gzip_file_is_read_as_it_is_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))

    assert [fields.values for fields in read_csv(path, ["b", "a"])] == [["2", "1"]]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceInvalid, match=r"rows.csv can't be read: No such file"):
        list(read_lines(tmp_path / "rows.csv"))


def test_a_gzip_file_that_was_cut_short_is_reported_behind_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"a\n" + b"1\n" * 100)[:-10])

    with pytest.raises(TraceInvalid, match=r"rows.csv.gz, line \d+: the gzip data are damaged or cut short"):
        list(read_lines(path))


def test_blank_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a\r\n\r\n7\r\n\r\n")

    assert list(read_csv(path, ["a"])) == [(3, ["7"])]


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\n")

    assert read_header(path) == ["a", "b"]


def test_columns_are_found_by_name_and_an_optional_one_may_lack(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("b,x,a\n1,2,3\n")

    assert list(read_csv(path, ["a", "b"], ["c"])) == [(2, ["3", "1", ""])]


def test_a_header_without_a_column_is_reported_with_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,c\n1,2\n")

    with pytest.raises(TraceInvalid, match=r"rows.csv, line 1: the header lacks b, d; it reads 'a,c'\."):
        list(read_csv(path, ["a", "b", "d"]))


def test_an_empty_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n")

    with pytest.raises(TraceInvalid, match=r"rows.csv is empty"):
        list(read_csv(path, ["a"]))


@pytest.mark.parametrize("line", ["1", "1,2,3", "1,2,"])
def test_a_line_with_another_number_of_fields_is_reported(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"a,b\n1,2\n{line}\n")

    with pytest.raises(TraceInvalid, match=r"rows.csv, line 3: \d fields where the header has 2"):
        list(read_csv(path, ["a"]))


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e999", "1_0", "0x1", "٣", "one", "1,5", '"1"'])
def test_what_is_no_number_of_0_or_more_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="rate is "):
        to_number(text, "rate")


@pytest.mark.parametrize("text", ["1.5", "10000001", "1e30"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tokens is .*, not a whole number up to 10,000,000"):
        to_whole(text, "tokens")


def test_numbers_are_read_as_files_write_them() -> None:
    assert [to_number(text, "x") for text in ("5", "5.0", ".5", "5e-1")] == [5, 5, 0.5, 0.5]
    assert to_whole("12.0", "x") == 12
