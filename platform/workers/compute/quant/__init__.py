"""4-bit weights: the normal form, the checkpoint format, and how they are made."""
