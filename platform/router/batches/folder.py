"""The folder of the files' texts, which all gateways share. Every method blocks. Layout:

    {tenant}/{file id}                 a file's text
    {tenant}/draft-*                   a file, or a form, that is on its way
    {tenant}/{batch id}/{epoch}        results of a batch's lines, by the number of the taking (`results`)

Files appear whole: a draft is renamed into place. Invariant: no name comes from a request but those of tenants, which
are plain names.
"""

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

_DRAFT = "draft-"
_CHUNK_BYTES = 2**20


class BatchFolder:
    """folder: made, readable by its owner only, when the first file comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, tenant: str, file_id: str) -> Path:
        """Where a file's text is, if it is there."""
        return self._folder / tenant / file_id

    def results(self, tenant: str, batch_id: str) -> Path:
        """The folder of a batch's results."""
        return self._folder / tenant / batch_id

    def free_bytes(self) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return shutil.disk_usage(self._folder).free

    def open_draft(self, tenant: str) -> Path:
        """An empty folder for what is on its way; `discard` must follow."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = self._folder / tenant
        home.mkdir(mode=0o700, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_DRAFT, dir=home))

    def discard(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def put(self, draft: Path, tenant: str, file_id: str) -> None:
        """Put a file of a draft in its place; one that is there is replaced."""
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self.path(tenant, file_id))

    def remove(self, tenant: str, name: str) -> None:
        """Remove a file's text, or a batch's results, if they are there."""
        place = self._folder / tenant / name
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)

    def tenants(self) -> list[str]:
        """Tenants that have a folder, sorted."""
        if not self._folder.is_dir():
            return []
        return sorted(place.name for place in self._folder.iterdir() if place.is_dir())

    def sweep(self, tenant: str, known: Collection[str], before: float) -> list[str]:
        """Remove what is not among `known` and was not changed since `before` (Unix time); returns the names."""
        home = self._folder / tenant
        if not home.is_dir():
            return []
        old = [place.name for place in home.iterdir() if place.name not in known and _changed_at(place) < before]
        for name in old:
            self.remove(tenant, name)
        return old


def count_lines(path: Path) -> int:
    """Lines of a file, the last one also without its end. Blocks."""
    num_lines, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_lines += chunk.count(b"\n")
            last = chunk[-1:]
    return num_lines + (last != b"\n")


def _changed_at(place: Path) -> float:
    """Unix time of the latest change of a file, or of what a folder holds."""
    try:
        parts = [place, *place.iterdir()] if place.is_dir() else [place]
        return max(part.stat().st_mtime for part in parts)
    except OSError:  # just removed
        return float("inf")
