"""What a process keeps resident without using it: pages of libraries that only importing touched, and freed memory that
the allocator holds.

Importing torch touches most of its libraries' code and constants once (its static initializers register every
operator), and Linux counts those pages as the process's until memory is short. What is used comes back from the page
cache, page by page, at the next use.
"""

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)")


class Mapping(NamedTuple):
    """Addresses [start, end)."""

    start: int
    end: int


def release_unused() -> None:
    """Gives such pages back to the system; does nothing elsewhere than on Linux with glibc."""
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


def resident_bytes(status: str) -> int:
    """The memory that a process has now, by the text of its /proc/PID/status (proc_pid_status(5))."""
    return _field(status, "VmRSS")


def peak_bytes(status: str) -> int:
    """The most memory that it has had, since its start or since `forget_peak`."""
    return _field(status, "VmHWM")


def forget_peak(clear_refs: Path = Path("/proc/self/clear_refs")) -> None:
    """Begin this process's peak anew (proc_pid_clear_refs(5)); where that is not allowed it stays what it was."""
    with suppress(OSError):
        clear_refs.write_text("5", encoding="ascii")


def usable_bytes(own_bytes: int, meminfo: str, limit: str = "max", stat: str = "") -> int:
    """Memory that this process may have, with the `own_bytes` that it has: of its container (cgroup v2), what others in
    it have not taken; without a limit, what the machine has available.

    meminfo: the text of /proc/meminfo. limit, stat: those of the container's memory.max and memory.stat.
    """
    available = own_bytes + _field(meminfo, "MemAvailable")
    if limit.strip() in ("", "max"):
        return available
    taken = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("anon ")), own_bytes)
    return min(available, own_bytes + max(0, int(limit) - max(own_bytes, taken)))


def usable_here(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """`usable_bytes` of this process; of a system without these files 0."""
    return usable_bytes(
        resident_bytes(_read(proc / "self/status")),
        _read(proc / "meminfo"),
        _read(cgroup / "memory.max"),
        _read(cgroup / "memory.stat"),
    )


def most_bytes(meminfo: str, limit: str = "max") -> int:
    """Memory that a process can ever have: its container's limit (cgroup v2), or all of the machine's, whatever others
    hold now. meminfo, limit: as of `usable_bytes`."""
    total = _field(meminfo, "MemTotal")
    return total if limit.strip() in ("", "max") else min(total, int(limit))


def most_here(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """`most_bytes` of this process; of a system without these files 0."""
    return most_bytes(_read(proc / "meminfo"), _read(cgroup / "memory.max"))


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii")
    return ""


def _field(text: str, name: str) -> int:
    """A size that the kernel gives in kB, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return 0 if found is None else 1024 * int(found[1])
