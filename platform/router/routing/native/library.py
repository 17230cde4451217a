"""The C ABI of the choice among replicas, as Python calls it.

The calls take microseconds and keep the interpreter's lock: a thread that gives it up for each of them may wait
milliseconds for it.
"""

import ctypes
from pathlib import Path

ABI = 3
"""penstock_choice_abi() of choice.cpp."""

_P, _I64, _F64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Library:
    """A loaded library. Raises OSError if `path` is no such library, or one of another ABI."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        if not hasattr(library, "penstock_choice_abi") or library.penstock_choice_abi() != ABI:
            raise OSError(f"{path} is not a library of the choice's ABI {ABI}")
        self.path = path
        self.compare = library.penstock_choice_compare
        self.compare.restype, self.compare.argtypes = None, [_P, _I64, _P, _I64, _F64, _I64, _I64]
        self.keep = library.penstock_choice_keep
        self.keep.restype, self.keep.argtypes = None, [_P, _I64, _P, _I64, _I64]
