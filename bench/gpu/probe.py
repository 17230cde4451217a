"""What machine this is, as one line of JSON: asked in a process of its own, because importing torch takes seconds and
memory, and may fail."""

import json
import platform
import sys


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
    except ImportError as error:
        found["error"] = f"torch: {error}"
    try:
        import triton  # noqa: PLC0415 (likewise)

        found["triton"] = triton.__version__
    except ImportError as error:
        found.setdefault("error", f"triton: {error}")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
