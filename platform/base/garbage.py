"""Python's garbage collector in processes that answer within milliseconds.

A full collection walks all objects that a process has, and modules, Ray and tokenizers are half a million of them: some
60 ms in which no token goes out. None of them is ever garbage, so they are taken out of the collector's sight once.
"""

import gc


def freeze_startup() -> None:
    """Have later collections walk only what is made from now on. For the moment when a process is ready; takes as long
    as a full collection."""
    gc.collect()
    gc.freeze()
