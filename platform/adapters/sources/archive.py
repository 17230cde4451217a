"""An adapter out of an archive: tar, tar.gz or zip, with the two files in one folder, beside whatever else.

Both kinds are read by what is here or by `zipfile`, never by something that makes files of an archive's own names: of a
member only its bytes are taken, into one of two places. Everything is bounded before it is held: headers, the directory
of a zip, and all bytes that come out, those that are passed over included.
"""

import errno
import gzip
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Protocol

from penstock.adapters.peft import FILES, refused_name
from penstock.wire.errors import InvalidRequest

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_MEMBERS = 4096
MAX_DIRECTORY_BYTES = 4 * 2**20
"""Longest directory of a zip, which `zipfile` holds in memory."""
MAX_NAME_BYTES = 2**16
"""Longest header of a tar that holds a member's name."""
SLACK_BYTES = 2**20
"""Bytes that an archive may hold beside an adapter of the largest size."""
_BLOCK_BYTES = 512
_CHUNK_BYTES = 2**20
_PAX_PATH = re.compile(rb"(?:\A|\n)\d+ path=([^\n]*)\n")
_PAX_OTHER_SIZE = re.compile(rb"(?:\A|\n)\d+ (?:size=|GNU\.sparse)")
_ZIP_END = struct.Struct("<4s4HLLH")


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Member(NamedTuple):
    """A file that a tar announces."""

    name: str
    size: int
    is_file: bool


def is_archive(name: str) -> bool:
    """Whether a file of that name is taken for an archive."""
    return name.lower().endswith(SUFFIXES)


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Write the adapter's two files to the folder. Raises InvalidRequest."""
    with archive.open("rb") as file, _readable():
        start = file.read(4)
        file.seek(0)
        if start.startswith(b"PK"):
            _Unpacking(folder, max_bytes).take_zip(file)
        elif start.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as unzipped:
                _Unpacking(folder, max_bytes).take_tar(unzipped)
        else:
            _Unpacking(folder, max_bytes).take_tar(file)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (
        gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError,
        ValueError,
    ) as error:  # fmt: skip
        raise _unreadable(f"it is cut short, or no archive ({type(error).__name__})") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a seek to a place before the file, which a zip's directory may name
            raise
        raise _unreadable("it is cut short, or no archive (it names a place outside of itself)") from error


class _Unpacking:
    """One archive. max_bytes: of the adapter."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_left = max_bytes + SLACK_BYTES
        self._num_taken = 0
        self._found: dict[str, str] = {}
        """Folder in the archive of each of the two files, by name."""
        self._pickle: str | None = None

    def take_zip(self, file: BinaryIO) -> None:
        _check_directory(file)
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                is_link = stat.S_ISLNK(info.external_attr >> 16)
                name = self._place(info.filename, is_file=not info.is_dir() and not is_link)
                if name is None:
                    continue
                if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise _unreadable(f"{name} is encrypted, or compressed by another method than deflate")
                with archive.open(info) as member:
                    self._copy(member, name, info.file_size)
        self._check()

    def take_tar(self, stream: _Stream) -> None:
        for _ in range(MAX_MEMBERS):
            member = self._read_header(stream)
            if member is None:
                break
            name = self._place(member.name, member.is_file)
            if name is None:
                self._skip(stream, member.size)
            else:
                self._copy(stream, name, member.size)
            self._skip(stream, -member.size % _BLOCK_BYTES)
        else:
            raise _unreadable(f"it holds more than {MAX_MEMBERS} files")
        while rest := stream.read(min(_CHUNK_BYTES, self._num_left + 1)):  # to the sum at the end of a gzip
            if len(rest) > self._num_left:
                raise self._too_large()
            self._num_left -= len(rest)
        self._check()

    def _read_header(self, stream: _Stream) -> _Member | None:
        """The next file or folder, by its longer name where one goes before it (pax, GNU). Returns None at the end."""
        long_name: bytes | None = None
        while True:
            header = self._read(stream, _BLOCK_BYTES)
            if not header.strip(b"\0"):
                return None
            size, kind = _read_fields(header)
            if kind not in b"xgLK":
                break
            if size > MAX_NAME_BYTES:
                raise _unreadable("a name in it is too long")
            data = self._read(stream, size)
            self._skip(stream, -size % _BLOCK_BYTES)
            if _PAX_OTHER_SIZE.search(data) and kind == b"x":
                raise _unreadable("it holds sparse files, or files of more than 8 GiB")
            pax_name = _PAX_PATH.findall(data)
            if kind == b"L":
                long_name = data.rstrip(b"\0")
            elif kind == b"x" and pax_name:
                long_name = pax_name[-1]
        prefix = header[345:500] if header[257:263] == b"ustar\0" else b""
        short = b"/".join(part for part in (prefix.split(b"\0")[0], header[:100].split(b"\0")[0]) if part)
        name = (short if long_name is None else long_name).decode("utf-8", "replace")
        is_file = kind in (b"0", b"\0", b"7") and not name.endswith("/")
        return _Member(name, size if kind not in b"123456" else 0, is_file)

    def _place(self, member: str, is_file: bool) -> str | None:
        """Name of the one of the two files that a member is. Returns None for anything else. Raises InvalidRequest for
        a name that leads out of the archive, a link in place of a file, and a second adapter."""
        path = PurePosixPath(member.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or "\0" in member:
            raise _unreadable(f"a name in it leads out of it: {member[:100]!r}")
        if path.suffix in (".bin", ".pt", ".pth") and is_file:
            self._pickle = path.name
        if path.name not in FILES or member.endswith("/"):
            return None
        if not is_file:
            raise _unreadable(f"{path.name} is a link in it, or something else that is no file")
        if path.name in self._found:
            raise _unreadable(f"it holds {path.name} twice; an archive is one adapter")
        self._found[path.name] = str(path.parent)
        return path.name

    def _copy(self, stream: _Stream, name: str, size: int) -> None:
        self._num_taken += size
        if self._num_taken > self._max_bytes:
            raise self._too_large()
        with (self._folder / name).open("xb") as file:
            while size:
                part = self._read(stream, min(size, _CHUNK_BYTES))
                file.write(part)
                size -= len(part)

    def _skip(self, stream: _Stream, size: int) -> None:
        if size > self._num_left:
            raise self._too_large()
        while size:
            size -= len(self._read(stream, min(size, _CHUNK_BYTES)))

    def _read(self, stream: _Stream, size: int) -> bytes:
        """Exactly `size` bytes. Raises EOFError, and InvalidRequest for more than an archive may hold."""
        if size > self._num_left:
            raise self._too_large()
        self._num_left -= size
        data = stream.read(size)
        while len(data) < size:
            more = stream.read(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _check(self) -> None:
        missing = [name for name in FILES if name not in self._found]
        if missing and self._pickle is not None:
            raise refused_name(self._pickle)
        if missing:
            raise InvalidRequest(f"The archive lacks the file {' and '.join(missing)}.", param="source")
        if len(set(self._found.values())) > 1:
            raise _unreadable("its two files are not in one folder")

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(
            f"The archive holds more than {self._max_bytes} bytes (adapters.max_bytes).", param="source"
        )


def _read_fields(header: bytes) -> tuple[int, bytes]:
    """Size and kind of a tar's member. Raises ValueError."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    if total != _octal(header[148:156]):
        raise ValueError("a header's sum does not fit")
    return _octal(header[124:136]), header[156:157]


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0") or b"0"
    if not digits.isdigit():  # a sign, an underscore, or GNU's form for more than 8 GiB
        raise ValueError("a header's number is none")
    return int(digits, 8)


def _check_directory(file: BinaryIO) -> None:
    """Refuse a zip whose directory is long, before `zipfile` holds it: by the record at its end, which is looked for as
    `zipfile` does."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 2**16 - _ZIP_END.size))
    tail = file.read()
    file.seek(0)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _ZIP_END.size > len(tail):
        raise _unreadable("it is cut short, or no archive")
    _, _, _, _, num_members, num_bytes, _, _ = _ZIP_END.unpack_from(tail, at)
    if tail[max(0, at - 20) : at].startswith(b"PK\6\7"):
        raise _unreadable("it is a ZIP64; make it a zip without, or a tar")
    if num_members > MAX_MEMBERS or num_bytes > MAX_DIRECTORY_BYTES:
        raise _unreadable(f"it holds more than {MAX_MEMBERS} files, or names that are too long")


def _unreadable(why: str) -> InvalidRequest:
    return InvalidRequest(f"The archive can't be taken: {why}.", param="source")
