"""Memory that a process has, has had and may have: what Linux says of it."""

import re
from contextlib import suppress
from pathlib import Path


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
