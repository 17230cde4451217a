"""Downloads the wheels of wheels.txt for one Python version into a folder, and says their size.

    make gpu-wheels WHEELS=FOLDER [ARGS="--python 3.12"]

Runs where there is a network; the folder is then carried to the machine with the GPU. Versions are those of
constraints.txt. Status 1 where they exceed 30 MiB together.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from bench.gpu import wheels

ROOT = Path(__file__).resolve().parents[2]
GLIBCS = (*range(28, 4, -1), *range(29, 40))
"""Minor versions of glibc 2 whose wheels are taken, the first that there is: up to 28, which every distribution still
kept has, then what a package asks that is built for no older one."""


def command(names: list[str], folder: Path, python: str, machine: str) -> list[str]:
    """The call of pip that downloads these, `NAME==VERSION` each, and nothing that they depend on."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBCS]
    platforms += [f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")]
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-q", "--no-deps",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", python,
        *(part for name in platforms for part in ("--platform", name)), "-d", str(folder), *names,
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the Python that will use them (3.12)")
    parser.add_argument("--machine", default="x86_64", help="its processor (x86_64)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    names = wheels.listed(wheels.LIST.read_text(encoding="utf-8"))
    pinned = wheels.pins(names, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    done = subprocess.run(command(pinned, options.folder, options.python, options.machine), check=False)
    if done.returncode:
        return done.returncode
    major, minor = (int(part) for part in options.python.split("."))
    found = [path for path in options.folder.glob("*.whl") if wheels.fits(path, (major, minor), options.machine)]
    total = sum(path.stat().st_size for path in found)
    for path in sorted(found, key=lambda path: -path.stat().st_size):
        print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path.name}")
    print(f"{total / 2**20:6.2f} MiB  {len(found)} wheels for Python {options.python} on {options.machine}")
    if total > wheels.MAX_BYTES:
        print(f"That is more than {wheels.MAX_BYTES / 2**20:.0f} MiB.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
