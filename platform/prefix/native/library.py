"""The C ABI of the mirror's map, as Python calls it.

The calls take microseconds and keep the interpreter's lock: a thread that gives it up for each of them may wait
milliseconds for it.
"""

import ctypes
from pathlib import Path

ABI = 1
"""penstock_mirror_abi() of mirror.cpp."""

_P, _I32, _U32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64
_KEYS = ctypes.c_char_p

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "begin": (_P, []),
    "end": (None, [_P]),
    "open": (_I64, [_P]),
    "close": (None, [_P, _U32]),
    "origin": (_U32, [_P, _U32]),
    "num_held": (_I64, [_P, _U32]),
    "apply": (None, [_P, _U32, _KEYS, _I64, _KEYS, _I64, _I64]),
    "replace": (_I64, [_P, _U32, _KEYS, _I64, _I64]),
    "expect": (_I64, [_P, _U32, _U32, _KEYS, _I64, _I64, _P]),
    "lapse": (None, [_P, _I64, _U32, _U32, _KEYS, _I64]),
    "look_up": (_I64, [_P, _KEYS, _I64, _P, _P]),
    "num_slots": (_U32, [_P]),
    "list": (_I64, [_P, _U32, _P]),
    "collect": (_I64, [_P]),
}


class Library:
    """A loaded library. Raises OSError if `path` is no such library, or one of another ABI."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        if not hasattr(library, "penstock_mirror_abi") or library.penstock_mirror_abi() != ABI:
            raise OSError(f"{path} is not a library of the mirror's ABI {ABI}")
        self.path = path
        self.functions = {}
        """Functions of the map, by what they do."""
        for name, (result, arguments) in _SIGNATURES.items():
            function = self.functions[name] = library[f"penstock_mirror_{name}"]
            function.restype, function.argtypes = result, arguments
