"""Pages that a process keeps resident without using them: of libraries that only importing touched, and freed memory
that the allocator holds.

Importing torch touches most of its libraries' code and constants once (its static initializers register every
operator), and Linux counts those pages as the process's until memory is short. What is used comes back from the page
cache, some pages at a time, at the next use.
"""

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)")


class Mapping(NamedTuple):
    """Addresses [start, end)."""

    start: int
    end: int


def release_unused() -> None:
    """Give such pages back to the system; does nothing elsewhere than on Linux with glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    maps = Path("/proc/self/smaps")
    if not maps.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for found in clean_mappings(maps.read_text(encoding="utf-8")):
        library.madvise(found.start, found.end - found.start, mmap.MADV_DONTNEED)


def clean_mappings(smaps: str) -> Iterator[Mapping]:
    """Mappings of libraries' code and constants, not writable, none of whose pages differs from its file
    (proc_pid_smaps(5)).

    A page that differs, by a relocation or a debugger, would be lost.
    """
    found: Mapping | None = None
    for line in smaps.splitlines():
        head = _HEAD.fullmatch(line)
        if head is not None:
            start, end, rights, inode, path = head.groups()
            is_library = rights in ("r-xp", "r--p") and inode != "0" and ".so" in path
            found = Mapping(int(start, 16), int(end, 16)) if is_library else None
        elif found is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield found
