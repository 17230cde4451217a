"""Archives: read whoever made them, and never more of them than fits."""

import gzip
import io
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.adapters.peft import CONFIG_FILE, FILES, WEIGHTS_FILE
from penstock.adapters.sources.archive import MAX_MEMBERS, SLACK_BYTES, is_archive, unpack
from penstock.wire.errors import InvalidRequest
from tests.unit.adapters.sources.servers import tar_of, zip_of

MAX_BYTES = 2**16
CONTENT = {CONFIG_FILE: b'{"r": 2}', WEIGHTS_FILE: bytes(range(256)) * 8}
LONG = "a-folder-with-a-long-name/" * 8


def taken(data: bytes, tmp_path: Path, max_bytes: int = MAX_BYTES) -> dict[str, bytes]:
    """What comes out of an archive, by name."""
    archive, folder = tmp_path / "archive", tmp_path / "out"
    archive.write_bytes(data)
    folder.mkdir()
    unpack(archive, folder, max_bytes)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def in_folder(name: str) -> dict[str, bytes]:
    return {f"{name}README.md": b"words"} | {f"{name}{file}": content for file, content in CONTENT.items()}


@pytest.mark.parametrize(
    "data",
    [
        zip_of(CONTENT),
        zip_of(in_folder("a/b/"), zipfile.ZIP_STORED),
        tar_of(CONTENT),
        tar_of(CONTENT, "w"),
        tar_of(in_folder("./a/"), form=tarfile.USTAR_FORMAT),
        tar_of(in_folder(LONG), form=tarfile.PAX_FORMAT),
        tar_of(in_folder(LONG), form=tarfile.GNU_FORMAT),
        tar_of(in_folder("größe/"), form=tarfile.PAX_FORMAT),
    ],
    ids=["zip", "stored zip", "tar.gz", "tar", "ustar", "pax", "gnu", "unicode"],
)
def test_the_two_files_come_out_of_any_usual_archive(data: bytes, tmp_path: Path) -> None:
    assert taken(data, tmp_path) == CONTENT


def linked(name: str, kind: bytes = tarfile.SYMTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
        for file, content in CONTENT.items():
            info = tarfile.TarInfo(f"b/{file}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zip_link() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo(CONFIG_FILE)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return out.getvalue()


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A header of a tar whose size is any text."""
    block = bytearray(512)
    block[: len(name)] = name.encode()
    block[124 : 124 + len(size)] = size
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (tar_of(CONTENT | {"../evil": b"x"}), "leads out of it"),
        (tar_of(CONTENT | {"a/../../evil": b"x"}), "leads out of it"),
        (tar_of(CONTENT | {"/etc/evil": b"x"}), "leads out of it"),
        (zip_of(CONTENT | {"../evil": b"x"}), "leads out of it"),
        (zip_of(CONTENT | {"a\\..\\..\\evil": b"x"}), "leads out of it"),
        (tar_of({f"../{CONFIG_FILE}": b"{}", f"../{WEIGHTS_FILE}": b""}), "leads out of it"),
        (linked(CONFIG_FILE), "is a link in it"),
        (linked(WEIGHTS_FILE, tarfile.LNKTYPE), "is a link in it"),
        (linked(CONFIG_FILE, tarfile.FIFOTYPE), "is a link in it"),
        (zip_link(), "is a link in it"),
        (tar_of(in_folder("a/") | in_folder("b/")), "holds adapter_config.json twice"),
        (tar_of({f"a/{CONFIG_FILE}": b"{}", f"b/{WEIGHTS_FILE}": b""}), "are not in one folder"),
        (tar_of({CONFIG_FILE: b"{}"}), "lacks the file adapter_model.safetensors"),
        (zip_of({"README.md": b""}), "lacks the file adapter_config.json and adapter_model.safetensors"),
        (tar_of({CONFIG_FILE: b"{}", "adapter_model.bin": b""}), "is a pickle"),
        (b"<html>not found</html>", "cut short, or no archive"),
        (b"", "cut short, or no archive"),
        (b"PK\3\4", "cut short, or no archive"),
        (zip_of(CONTENT)[:-60], "cut short, or no archive"),
        (tar_of(CONTENT)[:-20], "cut short, or no archive"),
        (tar_of(CONTENT, "w")[:1700], "cut short, or no archive"),
        (gzip.compress(b"words", mtime=0), "cut short, or no archive"),
        (b"\x1f\x8b\x08garbage" * 100, "cut short, or no archive"),
        (zip_of(CONTENT, zipfile.ZIP_BZIP2), "by another method than deflate"),
        (header(CONFIG_FILE, b"-1"), "cut short, or no archive"),
        (header(CONFIG_FILE, b"1_0"), "cut short, or no archive"),
        (header(CONFIG_FILE, b"\x80" + bytes(11)), "cut short, or no archive"),
        (header("x", b"77777777777", b"x"), "a name in it is too long"),
        (header("x", b"77777777777", b"L"), "a name in it is too long"),
        (header(CONFIG_FILE, b"77777777777"), "holds more than 65536 bytes"),
        (header("other", b"77777777777"), "holds more than 65536 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_is_refused_with_a_sentence(data: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        taken(data, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out"], "nothing was written elsewhere"


def sparse() -> bytes:
    records = b"22 GNU.sparse.major=1\n"
    return header("x", f"{len(records):o}".encode(), b"x") + records.ljust(512, b"\0") + header(CONFIG_FILE, b"0")


def many() -> bytes:
    return b"".join(header(f"file-{number}", b"0") for number in range(MAX_MEMBERS + 1))


def lying_end(num_members: int, num_bytes: int) -> bytes:
    data = bytearray(zip_of(CONTENT))
    at = data.rfind(b"PK\5\6")
    struct.pack_into("<HL", data, at + 10, num_members, num_bytes)
    return bytes(data)


def zip64() -> bytes:
    data = zip_of(CONTENT)
    at = data.rfind(b"PK\5\6")
    return data[:at] + b"PK\6\7" + bytes(16) + data[at:]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (sparse, "it holds sparse files"),
        (many, "holds more than 4096 files"),
        (lambda: lying_end(2**16 - 1, 100), "holds more than 4096 files"),
        (lambda: lying_end(2, 2**31), "names that are too long"),
        (zip64, "it is a ZIP64"),
    ],
)
def test_what_would_take_much_memory_is_refused_before_it_is_read(
    make: Callable[[], bytes], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        taken(make(), tmp_path, max_bytes=2**24)


@pytest.mark.parametrize("bomb", [WEIGHTS_FILE, "padding"])
def test_a_bomb_is_cut_off_at_the_bound_in_little_memory(bomb: str, tmp_path: Path) -> None:
    """64 MiB of zeros in 64 KiB of gzip."""
    data = tar_of({bomb: bytes(2**26), **{name: CONTENT[name] for name in FILES if name != bomb}})
    assert len(data) < 2**17
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="holds more than 65536 bytes"):
            taken(data, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 8 * 2**20
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) <= MAX_BYTES + SLACK_BYTES


def test_a_zip_that_lies_about_its_sizes_is_cut_off_too(tmp_path: Path) -> None:
    data = bytearray(zip_of({WEIGHTS_FILE: bytes(2**24), CONFIG_FILE: b"{}"}))
    for sign, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):  # a thousand bytes, it says
        struct.pack_into("<L", data, data.find(sign) + offset, 1000)

    with pytest.raises(InvalidRequest, match="cut short, or no archive"):
        taken(bytes(data), tmp_path)
    assert all(file.stat().st_size <= 1000 for file in (tmp_path / "out").iterdir())


def test_the_largest_adapter_still_fits(tmp_path: Path) -> None:
    files = {CONFIG_FILE: b"{}", WEIGHTS_FILE: bytes(MAX_BYTES - 2)}

    assert taken(tar_of(files), tmp_path) == files


def test_archives_are_told_by_their_names() -> None:
    assert [is_archive(name) for name in ("a.zip", "a.tar.gz", "a.gz", "a", *FILES)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_zip_whose_directory_names_a_place_before_the_file_is_refused(tmp_path: Path) -> None:
    data = bytearray(zip_of(CONTENT))
    end = data.rfind(b"PK\x05\x06")
    (place,) = struct.unpack_from("<I", data, end + 16)
    struct.pack_into("<I", data, end + 16, place + 1)
    with pytest.raises(InvalidRequest, match="no archive"):
        taken(bytes(data), tmp_path)
