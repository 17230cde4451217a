"""Weights of 4 and 8 bits: the normal form, the formats of checkpoints, and the forms that layers multiply with.

Not the files themselves (`readers`), nor how a checkpoint is made (`penstock.workers.quantize`). May import `kernels`
and `footprint` of compute.
"""
