#!/usr/bin/env bash
# The GPU backend's tests on an NVIDIA GPU: kernels against float32 twins, the model against the CPU, the platform with device: cuda.
#   PYTHON=.venv/bin/python tests/gpu/run.sh [pytest arguments]
# The interpreter needs penstock with its dependencies, pytest, and torch made for CUDA with the Triton that belongs to it.
set -euo pipefail
cd "$(dirname "$0")/../.."
unset TRITON_INTERPRET
python=${PYTHON:-python3}
"$python" -c '
import sys, torch, triton
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU here: these tests need one, and torch made for CUDA")
name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
print(f"{name}, compute capability {capability[0]}.{capability[1]}; torch {torch.__version__}, Triton {triton.__version__}")'
exec "$python" -m pytest tests/gpu "$@"
