import subprocess
import sys

from penstock.base.huge_pages import MAX_BYTES, MAX_S, PAGE_BYTES, _find_pages, gather_memory

MOVE = """
import ctypes, mmap, re
from pathlib import Path
from penstock.base.huge_pages import PAGE_BYTES, gather_memory

def count_huge(address):
    is_it = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif is_it and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024

def count_resident(address, size):
    found = ctypes.create_string_buffer(size // 4096)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    assert libc.mincore(address // 4096 * 4096, size, found) == 0
    return sum(found.raw)

libc = ctypes.CDLL(None)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
maps = []
for mode in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE):
    maps.append(mmap.mmap(-1, 4 * PAGE_BYTES, mmap.MAP_PRIVATE, mode))  # the one between keeps the others apart
full, _, empty = maps
pattern = bytes(range(256)) * (len(full) // 256)
full[:] = pattern
at, at_empty = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (full, empty))
can_move = libc.madvise(-(-at // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES, 25) == 0
num_bytes = gather_memory(lambda: 0.0)
assert full[:] == pattern
assert (num_bytes >= 2 * PAGE_BYTES) == can_move, num_bytes
assert (count_huge(at) >= 2 * PAGE_BYTES) == can_move, count_huge(at)
assert count_resident(at_empty, len(empty)) == 0
"""


def test_full_memory_moves_with_its_contents_and_memory_that_nobody_has_used_stays_unused() -> None:
    subprocess.run([sys.executable, "-c", MOVE], check=True, timeout=60)


def test_it_ends_when_its_time_is_over() -> None:
    times_s = iter([0.0, MAX_S])

    assert gather_memory(lambda: next(times_s, MAX_S)) == 0


def test_only_whole_pages_of_private_anonymous_memory_are_found() -> None:
    page = PAGE_BYTES
    maps = [
        f"{page - 4096:x}-{3 * page + 4096:x} rw-p 00000000 00:00 0",
        f"{8 * page:x}-{9 * page:x} rw-p 00000000 00:00 0 [heap]",
        f"{10 * page:x}-{11 * page:x} rw-p 00000000 00:00 0 [stack]",
        f"{12 * page:x}-{13 * page:x} rw-s 00000000 00:01 17 /dev/zero (deleted)",
        f"{14 * page:x}-{15 * page:x} r-xp 00000000 08:01 42 /usr/lib/libpython3.11.so.1.0",
        f"{16 * page + 4096:x}-{17 * page:x} rw-p 00000000 00:00 0",
        f"{20 * page:x}-{20 * page + MAX_BYTES + page:x} rw-p 00000000 00:00 0",
    ]

    assert list(_find_pages(maps)) == [page, 2 * page, 8 * page]
