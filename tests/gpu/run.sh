#!/usr/bin/env bash
# The GPU backend's tests alone, by pytest, with its arguments: PYTHON=.venv/bin/python tests/gpu/run.sh -k decode
# `make gpu-tests` runs them file by file, each with a time limit, and keeps a record.
# The interpreter needs what `make gpu-tests PYTHON=` needs; without Ray and openai the platform's tests are left out.
set -euo pipefail
cd "$(dirname "$0")/../.."
unset TRITON_INTERPRET
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/.src:$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" -c '
import sys, torch, triton
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU here: these tests need one, and torch made for CUDA")
name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
print(f"{name}, compute capability {capability[0]}.{capability[1]}; torch {torch.__version__}, Triton {triton.__version__}")'
exec "$python" -m pytest tests/gpu "$@"
