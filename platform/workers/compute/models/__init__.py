"""Models of the Llama family: the forward pass over a paged KV cache, by torch's layers, in one call of the CPU
kernels, or replayed on a GPU.

Not which sequences a step has, and not how tokens are chosen. May import everything of compute but runner, loading,
step_model, sampling and speculation.
"""
