"""Pages that are given back: only what is as its file has it."""

import ctypes
import math
from pathlib import Path

import torch

from penstock.base.unused_pages import Mapping, clean_mappings, release_unused

SMAPS = """\
7f0000000000-7f0000002000 r-xp 00001000 08:01 77                         /usr/lib/with a space.so
Rss:                   8 kB
Anonymous:             0 kB
7f0000002000-7f0000003000 r-xp 00001000 08:01 78                         /usr/lib/relocated.so
Anonymous:             4 kB
7f0000002800-7f0000003000 r--p 00001000 08:01 77                         /usr/lib/constants.so
Anonymous:             0 kB
7f0000003000-7f0000004000 rw-p 00001000 08:01 77                         /usr/lib/data.so
Anonymous:             0 kB
7f0000004000-7f0000005000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f0000005000-7f0000006000 r-xp 00000000 00:00 0
Anonymous:             0 kB
"""


def test_only_what_equals_its_file_is_given_back() -> None:
    assert list(clean_mappings(SMAPS)) == [
        Mapping(0x7F0000000000, 0x7F0000002000),
        Mapping(0x7F0000002800, 0x7F0000003000),
    ]


def test_what_is_used_comes_back_and_what_is_not_stays_away() -> None:
    def file_pages() -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile:"))

    before = file_pages()
    release_unused()
    after = file_pages()

    assert after < before
    assert math.isclose(float(torch.arange(100, dtype=torch.float64).exp().log().sum()), 4950.0)
    assert ctypes.CDLL(None).abs(-3) == 3
