from pathlib import Path

import pytest

from penstock.router.batches.folder import BatchFolder, count_lines


def put(folder: BatchFolder, tenant: str, file_id: str, text: bytes) -> None:
    draft = folder.open_draft(tenant)
    (draft / "text").write_bytes(text)
    folder.put(draft / "text", tenant, file_id)
    folder.discard(draft)


def test_a_file_lies_in_its_tenants_folder_which_is_its_owners_only(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "state" / "batches")

    put(folder, "a", "file-1", b"one")
    put(folder, "a", "file-1", b"two")

    assert folder.path("a", "file-1").read_bytes() == b"two"
    assert folder.tenants() == ["a"]
    assert [path.name for path in (tmp_path / "state" / "batches" / "a").iterdir()] == ["file-1"]
    for path in (tmp_path / "state" / "batches", tmp_path / "state" / "batches" / "a"):
        assert path.stat().st_mode & 0o077 == 0
    folder.remove("a", "file-1")
    folder.remove("a", "file-1")
    assert not folder.path("a", "file-1").exists()


def test_a_folder_that_is_not_there_yet_holds_nothing(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "batches")

    assert folder.tenants() == []
    assert folder.sweep("a", set(), 10**10) == []
    assert not (tmp_path / "batches").exists()
    assert folder.free_bytes() > 0


@pytest.mark.parametrize(("text", "count"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n" * 3, 3)])
def test_lines_are_counted_with_or_without_a_last_end(text: bytes, count: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(text)

    assert count_lines(tmp_path / "x") == count
