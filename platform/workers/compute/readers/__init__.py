"""Checkpoints as they lie on the disk: which tensors there are, and how each is copied to where the model wants it."""
