"""The machine: what nvidia-smi says of the GPU that torch computes on and of its clocks, and whether Triton can compile
for it."""

import shutil
import subprocess

import torch
import triton
import triton.language as tl

from bench.gpu.rows import Rows
from tests.gpu.cases import DEVICE

FIELDS = (
    "name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "clocks.mem",
    "clocks.max.mem", "power.limit", "temperature.gpu", "clocks_throttle_reasons.active", "mig.mode.current",
)  # fmt: skip


@triton.jit
def _double(x, out, lanes: tl.constexpr):
    places = tl.arange(0, lanes)
    tl.store(out + places, 2 * tl.load(x + places))


def run(rows: Rows, *, is_check: bool) -> bool:
    """Rows of nvidia-smi's fields and of torch's and Triton's versions; False where a kernel of one line fails."""
    rows.add("versions", note=f"torch {torch.__version__}, Triton {triton.__version__}")
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    rows.add("a C compiler for Triton's launchers", note=compiler or "none: Triton can't launch kernels without one")
    if not is_check:
        _add_gpu(rows)
    x = torch.arange(64, dtype=torch.float32, device=DEVICE)
    out = torch.empty_like(x)
    _double[(1,)](x, out, lanes=64)
    is_good = bool((out == 2 * x).all())
    rows.add("Triton compiles and runs a kernel", note="yes" if is_good else "no: its result is wrong")
    return is_good


def _add_gpu(rows: Rows) -> None:
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    rows.add("compute capability", note=f"{major}.{minor}")
    rows.add("memory of the GPU that is free", free / 2**30, None, "GiB", f"{total / 2**30:.1f} GiB in all")
    add_clocks(rows, f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def add_clocks(rows: Rows, uuid: str) -> None:
    """Rows of nvidia-smi's fields of one GPU, or one that says why there are none. uuid: the GPU's, since nvidia-smi
    counts otherwise than torch and knows those that CUDA_VISIBLE_DEVICES hides."""
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        rows.add("nvidia-smi", note=f"not asked: {error}")
        return
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines()
        rows.add("nvidia-smi", note=f"ended with status {done.returncode}: {said[-1] if said else 'without a word'}")
        return
    for name, value in zip(FIELDS, (part.strip() for part in lines[0].split(",")), strict=False):
        rows.add(f"nvidia-smi {name}", note=value)
