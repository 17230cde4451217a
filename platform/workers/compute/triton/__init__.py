"""The engine's kernels for a GPU, in Triton. Only `plan` may be imported where there is no Triton."""
