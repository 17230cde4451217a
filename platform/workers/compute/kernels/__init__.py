"""C++ kernels for CPUs behind a plain C ABI, and their Python side: built on first use, loaded with ctypes (which
releases the GIL), replaceable by torch's operators.

Not models or layers: nothing here knows a checkpoint. May import torch, and nothing else of compute.
"""
