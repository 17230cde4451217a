"""Everything with tensors: the torch runner, attention, sampling and noise, layers, LoRA, weights, and the devices they
lie on.

Rooms: models, readers (of checkpoints), quant (formats), speculation (drafters), grammar, kernels (C++ for CPUs),
triton (GPUs). Not which sequences run (`engine`). May import engine and config.
"""
