"""The files of adapters, by digest: a folder for each digest, the same for every gateway and replica.

Not who owns them (`registry`), only who has brought them: the empty file `brought/{tenant}/{digest}` marks it until the
digest's folder is swept. Every method blocks. Files appear whole (a draft is renamed into place) and never change; what
nobody owns any more is kept for a while, because answers under way may need it on another replica. Invariant: a folder
named by a digest holds exactly the files of that digest.
"""

import fcntl
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.adapters.peft import FILES

_FORMAT = b"penstock-adapter"
_DRAFT = "draft-"
_LOCK = "lock"
_BROUGHT = "brought"
_CHUNK_BYTES = 2**20


def digest_of(folder: Path) -> str:
    """32 hex digits over both files. Raises OSError."""
    state = hashlib.blake2b(digest_size=16, person=_FORMAT)
    for name in FILES:
        with (folder / name).open("rb") as file:
            state.update(struct.pack("<Q", os.fstat(file.fileno()).st_size))
            while chunk := file.read(_CHUNK_BYTES):
                state.update(chunk)
    return state.hexdigest()


def sha256_of(file: Path) -> str:
    """64 hex digits. Raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _is_whole(folder: Path, digest: str) -> bool:
    try:
        return digest_of(folder) == digest
    except OSError:
        return False


class DiskUse(NamedTuple):
    """Use of the disk, in bytes."""

    held: int
    """Bytes of the files that the tenant has brought and that have not been swept; what several have brought counts for
    each."""
    free: int
    """Bytes free on the disk."""


class AdapterStore:
    """The folder of all adapters' files. folder: made when the first adapter comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Where an adapter's files are, if it is there."""
        return self._folder / digest

    def draft(self) -> Path:
        """An empty folder for the two files, to be put or discarded."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self._folder))

    def discard(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def measure_disk_use(self, tenant: str) -> DiskUse:
        """Space that a tenant takes, and that is left."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._hold_lock():
            files = [
                file for mark in (self._folder / _BROUGHT / tenant).glob("*") for file in self.path(mark.name).glob("*")
            ]
            return DiskUse(sum(file.stat().st_size for file in files), shutil.disk_usage(self._folder).free)

    def put(self, draft: Path, tenant: str, now: float) -> str:
        """Keep a draft's files, which the tenant has brought, under their digest, which is returned; the draft is gone.
        now: Unix time.

        Files that are there already are hashed, not trusted: a sweep that was killed, or a power failure, may have left
        less than both files.
        """
        digest = digest_of(draft)
        place = self.path(digest)
        with self._hold_lock():
            marks = self._folder / _BROUGHT / tenant
            marks.mkdir(mode=0o700, parents=True, exist_ok=True)
            (marks / digest).touch(mode=0o600)
            if _is_whole(place, digest):
                self.discard(draft)
            else:
                shutil.rmtree(place, ignore_errors=True)
                draft.rename(place)
            os.utime(place, (now, now))
        return digest

    def touch(self, digest: str, now: float) -> None:
        """Keep an adapter's files as if they had been put now (Unix time)."""
        with self._hold_lock():
            if self.path(digest).is_dir():
                os.utime(self.path(digest), (now, now))

    def sweep(self, owned: Collection[str], before: float) -> list[str]:
        """Remove what is not among `owned` and was not put or touched since `before` (Unix time), drafts included;
        returns the names."""
        if not self._folder.is_dir():
            return []
        with self._hold_lock():
            kept = {*owned, _BROUGHT}
            old = [
                place
                for place in self._folder.iterdir()
                if place.is_dir() and place.name not in kept and place.stat().st_mtime < before
            ]
            for place in old:
                for mark in self._folder.glob(f"{_BROUGHT}/*/{place.name}"):
                    mark.unlink()
                shutil.rmtree(place, ignore_errors=True)
        return [place.name for place in old]

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the folder's lock, so that one gateway's sweep does not remove files that another one is just putting
        there."""
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
