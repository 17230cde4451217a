"""The engine's kernels for a GPU, in Triton, and the tensors and matrices that they take.

Without Triton only `segments`, `staging`, `attention.plan`, `attention.block_tables`, `sampling.sampling_inputs`,
`products.tiling`, `.kernel_choice`, `.grouped` and the modules of matrices can be imported. May import `quant`, `noise`
and `truncation` of compute; nothing here knows a model.
"""
