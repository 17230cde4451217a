"""Smallest inputs by which fuzzing found parsers that answer with an error that they do not document."""

import struct

import pytest

from tests.fuzz.check import check
from tests.fuzz.targets import TARGETS

TYPE = b"multipart/form-data; boundary="


def gguf(*values: bytes, tensors: tuple[bytes, ...] = ()) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join((*values, *tensors)) + bytes(64)


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def tensor(name: bytes, *shape: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)


FOUND: dict[str, tuple[str, object]] = {
    "an opening with a string that is no UTF-8": ("openings", [b"\x91\x91\x94\xa1h\xa1\xff\x02\xc4\x00"]),
    "an opening that is nested deeply": ("openings", [b"\x92\x90" + b"\x91" * 3000 + b"\xc0"]),
    "a router's frame with a string that is no UTF-8": ("router-frames", b"\x91\x91\x94\xa1h\xa1\xff\x02\xc4\x00"),
    "a router's frame that is nested deeply": ("router-frames", b"\x92\x90" + b"\x91" * 3000 + b"\xc0"),
    "a replica's frame with a string that is no UTF-8": ("replica-frames", b"\x94\x90\xc0\xc0\xa2\xffno"),
    "a replica's frame that is nested deeply": ("replica-frames", b"\x95\x90\xc0\xc0\xc0" + b"\x91" * 3000 + b"\xc0"),
    "a provider's event that is nested deeply": ("provider-event", b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    "a provider's refusal that is nested deeply": (
        "provider-refusal",
        (400, b"1", b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    ),
    "a boundary of more than 256 bytes": ("multipart", (TYPE + b"B" * 257, b"", 1)),
    "a GGUF string of 2^63 bytes in an array": (
        "gguf-header",
        gguf(text(b"k") + struct.pack("<IIQQ", 9, 8, 3, 2**63)),
    ),
    "a GGUF tensor without dimensions": ("gguf-tensors", gguf(tensors=(tensor(b"x.y"),))),
    "a GGUF tensor whose name has no dot": ("gguf-tensors", gguf(tensors=(tensor(b"x", 1),))),
    "a GGUF tensor of 60,000 dimensions": ("gguf-tensors", gguf(tensors=(tensor(b"x.y", *[2**64 - 1] * 60_000),))),
    "a safetensors file of three bytes": ("safetensors-digest", b"abc"),
    "a safetensors header said to be longer than any": ("safetensors-digest", struct.pack("<Q", 2**64 - 1) + b"{}"),
    "a safetensors header said to be longer than memory": ("safetensors-digest", struct.pack("<Q", 2**62) + b"{}"),
    "a safetensors header said to be 64 MB": ("safetensors-digest", struct.pack("<Q", 2**26) + b"{}"),
    "a trace's line that is nested deeply": ("trace-mooncake", b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    "a line of lengths that is nested deeply": ("servegen-lengths", b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"),
}
"""Target and input, by what is wrong with the input."""


@pytest.mark.parametrize("what", FOUND)
def test_what_fuzzing_found_is_answered_as_documented(what: str) -> None:
    name, given = FOUND[what]

    with TARGETS[name].open() as run:
        check(run, given, TARGETS[name].base_bytes)
