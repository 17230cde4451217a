"""Checkpoints as they lie on the disk: which tensors there are, and how each is copied to where the model wants it.

Not what a model does with them (`weights` puts them together). May import `quant`, `model_config` and
`quantization_config` of compute.
"""
