"""Makes autoawq_golden.safetensors: a linear layer quantized and packed by AutoAWQ's own code, with the integers it
packed.

Not a test. Needs AutoAWQ, which takes its source package: pip install --no-deps --no-build-isolation autoawq==0.2.9
"""

import importlib.util
import sys
import types
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

ROWS, COLUMNS, GROUP = 64, 256, 128


def main() -> None:
    spec = importlib.util.find_spec("awq")
    assert spec is not None, "AutoAWQ is not installed"
    package = types.ModuleType("awq")  # without running awq/__init__, which wants an old transformers
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["awq"] = package
    warnings.simplefilter("ignore")
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    torch.manual_seed(0)
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False).half()
    scales = torch.rand(COLUMNS // GROUP, ROWS).half() * 0.01 + 0.001
    zeros = torch.randint(0, 16, (COLUMNS // GROUP, ROWS)).float()
    packed = gemm.WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scales, zeros=zeros)
    integers = packing.reverse_awq_order(*packing.unpack_awq(packed.qweight, packed.qzeros, 4), 4)
    q, zero = ((part & 15).t().to(torch.uint8).contiguous() for part in integers)
    tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales, "q": q, "zero": zero}
    save_file(tensors, Path(__file__).with_name("autoawq_golden.safetensors"))


if __name__ == "__main__":
    main()
