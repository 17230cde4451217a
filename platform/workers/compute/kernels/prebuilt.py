"""Kernels built ahead, for levels of x86-64 (its psABI's microarchitecture levels): for images, which have no compiler
and start often.

Not what a developer's machine uses: there is none here, and they are built for the very CPU. Who builds these: `build
--levels`.
"""

import platform
from pathlib import Path

FOLDER = Path(__file__).with_name("prebuilt")
_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
LEVELS = {
    "x86_64_v4": _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
    "x86_64_v3": _AVX2,
}
"""CPU flags that Linux must show for each, best first. Their names are ziglang's."""


def find(flags: frozenset[str], folder: Path = FOLDER) -> Path | None:
    """The best library there for a CPU with these flags."""
    paths = (folder / f"{level}.so" for level, needed in LEVELS.items() if needed <= flags)
    return next((path for path in paths if path.exists()), None)


def cpu_flags() -> frozenset[str]:
    """Flags of the first CPU, as Linux names them; none where it is not x86-64 or Linux does not list them."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
