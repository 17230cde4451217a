"""An adapter out of a tenant's import folder: copied, and never from outside of that folder.

Links are followed as long as they stay inside. What was found is opened part by part without following links again: a
link that appears in between leads nowhere.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from penstock.adapters.peft import FILES, refused_name
from penstock.wire.errors import InvalidRequest

_CHUNK_BYTES = 2**20
_PASSED = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags by which a folder on the way is opened; where there is O_PATH it need not be readable."""


def copy_adapter(home: Path, path: str, draft: Path, max_bytes: int) -> None:
    """Copy both files of the folder `path` under `home` into the draft. Raises InvalidRequest."""
    try:
        files = _find_files(home.resolve(), path)
        num_left = max_bytes
        for file, name in zip(files, FILES, strict=True):
            with open_resolved(file) as source, (draft / name).open("xb") as target:
                while part := source.read(_CHUNK_BYTES):
                    num_left -= len(part)
                    if num_left < 0:
                        raise _refused(f"The adapter is larger than {max_bytes} bytes (adapters.max_bytes).")
                    target.write(part)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a byte 0, a ring of links, not readable
        raise _refused(f"The folder {path[:200]!r} can't be read ({type(error).__name__}).") from error


def _find_files(home: Path, path: str) -> list[Path]:
    """The two files in a folder under `home`, links resolved. Raises InvalidRequest where they are missing, or lie
    outside of `home`."""
    folder = (home / path).resolve()
    if not folder.is_relative_to(home) or not folder.is_dir():
        raise _refused(f"There is no folder {path[:200]!r} in your import folder.")
    files = [(folder / name).resolve() for name in FILES]
    for file, name in zip(files, FILES, strict=True):
        if not file.is_relative_to(home) or not file.is_file():
            pickles = sorted(other.name for other in folder.iterdir() if other.suffix in (".bin", ".pt"))
            raise (
                refused_name(pickles[0]) if pickles else _refused(f"The folder {path[:200]!r} lacks the file {name}.")
            )
    return files


def open_resolved(file: Path) -> BinaryIO:
    """Open a regular file by a path without links. Raises OSError."""
    folder = os.open(file.anchor, _PASSED)
    try:
        for part in file.parts[1:-1]:
            inner = os.open(part, _PASSED, dir_fd=folder)
            os.close(folder)
            folder = inner
        descriptor = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    opened = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        opened.close()
        raise OSError("it is no file any more")
    return opened


def _refused(sentence: str) -> InvalidRequest:
    return InvalidRequest(sentence, param="source")
