"""What is copied out of an import folder, and what is not, whoever changes it meanwhile."""

import os
from pathlib import Path

import pytest

from penstock.adapters.peft import CONFIG_FILE, FILES, WEIGHTS_FILE
from penstock.adapters.sources.folder import copy_adapter, open_resolved
from penstock.wire.errors import InvalidRequest
from tests.unit.adapters.sources.servers import adapter_files


def copied(home: Path, path: str, tmp_path: Path, max_bytes: int = 2**20) -> dict[str, bytes]:
    draft = tmp_path / "draft"
    draft.mkdir(exist_ok=True)
    copy_adapter(home, path, draft, max_bytes)
    return {file.name: file.read_bytes() for file in draft.iterdir()}


def test_links_inside_of_the_folder_are_followed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    files = adapter_files(home / "a" / "b")
    (home / "latest").symlink_to("a/b")

    assert copied(home, "latest", tmp_path) == files


def test_a_folder_that_may_be_passed_but_not_listed_is_passed(tmp_path: Path) -> None:
    files = adapter_files(tmp_path / "home" / "a")
    (tmp_path / "home").chmod(0o300)
    try:
        assert copied(tmp_path / "home", "a", tmp_path) == files
    finally:
        (tmp_path / "home").chmod(0o700)


def test_an_adapter_that_is_too_large_is_refused_while_it_is_copied(tmp_path: Path) -> None:
    adapter_files(tmp_path / "home" / "a")

    with pytest.raises(InvalidRequest, match="larger than 600 bytes"):
        copied(tmp_path / "home", "a", tmp_path, max_bytes=600)


@pytest.mark.parametrize("what", ["file", "folder", "pipe"])
def test_what_was_put_in_place_of_a_file_meanwhile_is_not_opened(what: str, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / WEIGHTS_FILE).write_bytes(b"secret")
    home = tmp_path / "home"
    home.mkdir()
    if what == "folder":
        (home / "a").symlink_to(tmp_path / "secret")
    else:
        (home / "a").mkdir()
    if what == "file":
        (home / "a" / WEIGHTS_FILE).symlink_to(tmp_path / "secret" / WEIGHTS_FILE)
    elif what == "pipe":
        os.mkfifo(home / "a" / WEIGHTS_FILE)

    with pytest.raises(OSError):
        open_resolved(home / "a" / WEIGHTS_FILE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    adapter_files(tmp_path / "home" / "a")
    (tmp_path / "home" / "a" / CONFIG_FILE).unlink()

    with pytest.raises(InvalidRequest, match=f"lacks the file {FILES[0]}"):
        copied(tmp_path / "home", "a", tmp_path)
