"""`penstock quantize`, its command line: what it reads, says and refuses. What it makes is tested where it is made."""

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.main import app
from penstock.cli.quantize import read_text


def test_text_is_read_plain_packed_or_out_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("one\ntwo", encoding="utf-8")
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"three"))
    # that separator may stand in JSON as it is
    lines = '{"prompt": "a\u2028b", "id": 1}\n\n{"turns": ["c", "d"]}\r\n{"question": "e", "answer": "f"}\n'
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8", newline="")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))

    assert [read_text(tmp_path / name) for name in ("plain.txt", "packed.txt.gz")] == ["one\ntwo", "three"]
    assert [read_text(tmp_path / name) for name in ("rows.jsonl", "rows.jsonl.gz")] == ["a\u2028b\n\nc\n\nd\n\ne"] * 2


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.txt", None, r"can't read .*absent.txt: No such file"),
        ("latin.txt", "é".encode("latin-1"), "is not UTF-8 text"),
        ("cut.txt.gz", gzip.compress(b"a long enough text", mtime=0)[:-9], r"can't read .*cut.txt.gz"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt": ', r"bad.jsonl, line 2: "),
        (
            "other.jsonl",
            b'{"answer": "a"}',
            "other.jsonl, line 1: none of the fields prompt, text, question, turns holds text",
        ),
    ],
)
def test_text_that_can_not_be_read_is_refused_with_file_and_line(
    tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        read_text(tmp_path / name)


def test_a_mistake_ends_the_command_with_a_sentence_before_the_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it where nobody has
    (tmp_path / "text.txt").write_text("word " * 2000, encoding="utf-8")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    text = ["--calibration", str(tmp_path / "text.txt")]

    def told(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["quantize", *arguments])
        assert done.exit_code == 2
        return done.stderr

    assert "exists already" in told("demo", str(tmp_path), *text)
    assert "group size 100 is not supported" in told("demo", str(tmp_path / "int4"), *text, "--group-size", "100")
    assert "the evaluation text has 0 tokens" in told(
        "demo", str(tmp_path / "int4"), *text, "--evaluation", str(tmp_path / "empty.txt")
    )
    assert "does not exist" in told("./absent", str(tmp_path / "int4"), *text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "text.txt"]
