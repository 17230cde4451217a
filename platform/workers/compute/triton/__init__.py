"""The engine's kernels for a GPU, in Triton, and the tensors that they take.

Without Triton only `plan`, `segments`, `sampling_inputs`, `staging`, `block_tables`, `grouped` and `grouped_matrix` can
be imported. May import `quant`, `noise` and `truncation` of compute; nothing here knows a model.
"""
