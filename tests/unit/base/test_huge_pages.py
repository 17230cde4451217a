import ctypes
import mmap

from penstock.base.huge_pages import MAX_BYTES, PAGE_BYTES, _find_pages, gather_memory


def test_full_memory_moves_with_its_contents_and_memory_that_nobody_has_used_stays_unused() -> None:
    full, empty = mmap.mmap(-1, 4 * PAGE_BYTES, mmap.MAP_PRIVATE), mmap.mmap(-1, 4 * PAGE_BYTES, mmap.MAP_PRIVATE)
    pattern = bytes(range(256)) * (len(full) // 256)
    full[:] = pattern
    address = ctypes.addressof(ctypes.c_char.from_buffer(full))
    can_move = _moves(address)

    num_bytes = gather_memory()

    assert full[:] == pattern
    assert (num_bytes >= 2 * PAGE_BYTES) == can_move
    assert _count_resident(ctypes.addressof(ctypes.c_char.from_buffer(empty)), len(empty)) == 0


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


def _moves(address: int) -> bool:
    """Whether the kernel moves one page of this memory."""
    first = -(-address // PAGE_BYTES) * PAGE_BYTES
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise(first, PAGE_BYTES, 25) == 0


def _count_resident(address: int, num_bytes: int) -> int:
    """Small pages in use within so many bytes."""
    first = address // 4096 * 4096
    found = ctypes.create_string_buffer(num_bytes // 4096)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    assert mincore(first, num_bytes, found) == 0
    return sum(found.raw)
