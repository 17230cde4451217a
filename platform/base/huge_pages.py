"""The memory that a process has when it is ready, moved into huge pages.

A request touches thousands of Python objects that lie all over some 200 MB, mostly for the first time in milliseconds,
and in pages of 4 KiB each of them also costs a walk through the page tables, in a virtual machine through two of them.
Linux moves memory into pages of 2 MiB when it is asked to (MADV_COLLAPSE, since 6.1), whatever the machine's setting of
transparent huge pages. What comes later stays in small pages. Invariant: memory keeps its contents and addresses.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PAGE_BYTES = 2 * 2**20
MAX_BYTES = 512 * 2**20
"""Most memory that is tried: on a busy machine 210 MB took 1.4 s. A mapping larger than that is a model's weights."""
MAX_S = 2.0
"""Longest time that is spent."""
MAX_FAILURES = 8
"""Failures behind one another on which it ends: memory has no huge pages left, or may not."""
MIN_RESIDENT = 0.5
"""Part of a huge page that must be in use already, so that little memory is added."""
_SMALL_BYTES = 4096
_MADV_COLLAPSE = 25


def gather_memory(clock: Callable[[], float] = time.monotonic) -> int:
    """Move what this process has of anonymous memory into huge pages; returns how many bytes. 0 where the kernel
    doesn't. Blocks for up to MAX_S; other threads may go on. clock: monotonic seconds."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        madvise, mincore = libc.madvise, libc.mincore
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except (OSError, AttributeError):  # not Linux
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    is_resident = ctypes.create_string_buffer(PAGE_BYTES // _SMALL_BYTES)
    num_bytes = num_tried = num_failed = 0
    end_s = clock() + MAX_S
    for address in _find_pages(lines):
        if num_tried >= MAX_BYTES or num_failed >= MAX_FAILURES or clock() >= end_s:
            break
        if mincore(address, PAGE_BYTES, is_resident) or sum(is_resident.raw) < MIN_RESIDENT * len(is_resident):
            continue
        num_tried += PAGE_BYTES
        is_moved = not madvise(address, PAGE_BYTES, _MADV_COLLAPSE)
        num_bytes += is_moved * PAGE_BYTES
        num_failed = 0 if is_moved else num_failed + 1
    return num_bytes


def gather_memory_aside() -> None:
    """Do so in a thread of its own: who has just started is not kept from answering."""
    threading.Thread(target=gather_memory, name="huge pages", daemon=True).start()


def _find_pages(maps: list[str]) -> Iterator[int]:
    """Addresses of whole huge pages within mappings that are anonymous, private and not too large."""
    for line in maps:
        span, mode, _, _, inode, *name = line.split()
        if mode != "rw-p" or inode != "0" or (name and name[0] != "[heap]"):
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        if end - begin <= MAX_BYTES:
            yield from range(-(-begin // PAGE_BYTES) * PAGE_BYTES, end - PAGE_BYTES + 1, PAGE_BYTES)
