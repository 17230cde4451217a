"""What machine this is, as one line of JSON: asked in a process of its own, because importing torch takes seconds and
memory, and may fail; and whether it is enough."""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASK_S = 120.0
"""Longest time for importing torch and finding the GPU, seconds."""
LEAST = {"torch": (2, 11), "triton": (3, 6)}
"""Oldest versions that will do, as in pyproject.toml."""
NO_GPU = (
    "This needs an NVIDIA GPU and torch made for CUDA, and torch finds no GPU here: nothing was checked or measured. "
    "`--check` runs all of it, tiny, on the CPU."
)


def ask(python: str, root: Path, environment: Mapping[str, str], timeout_s: float = ASK_S) -> dict[str, Any]:
    """What `main` says in that environment; `error` where it can't."""
    failed = f"torch can't be asked what machine this is, {python} "
    try:
        done = subprocess.run(
            [python, "-m", "bench.gpu.probe"], cwd=root, env=dict(environment), capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"{failed}took more than {timeout_s:.0f} s to import it"}
    except OSError as error:
        return {"error": f"{failed}can't be started: {error}"}
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return {"error": f"{failed}ended with status {done.returncode}: {said[-1] if said else 'without a word'}"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"{failed}said {done.stdout[-200:]!r}"}
    return found


def refusal(found: Mapping[str, Any], *, is_check: bool) -> str | None:
    """A sentence where the machine is not enough. is_check: no GPU is needed."""
    if "error" in found:
        return str(found["error"])
    for name, least in LEAST.items():
        if _numbers(found[name]) < least:
            return f"This needs {name} {least[0]}.{least[1]} or newer, and {name} {found[name]} is installed."
    return None if is_check or found["gpu"] else NO_GPU


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as 2.11.0+cu130."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def main() -> None:
    found: dict[str, object] = {"python": platform.python_version(), "gpu": None}
    try:
        import torch  # noqa: PLC0415 (it may be absent)

        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "gpu": properties.name,
                "gpu_memory_gib": round(properties.total_memory / 2**30),
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "cuda": torch.version.cuda,
            }
    except (ImportError, OSError) as error:
        found["error"] = f"torch can't be imported: {error}"
    try:
        import triton  # noqa: PLC0415 (likewise)

        found["triton"] = triton.__version__
    except (ImportError, OSError) as error:
        found.setdefault("error", f"Triton can't be imported: {error}")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
