"""Inputs for the fuzz targets: good ones with a few things wrong, shaped ones with odd values, and noise."""

import struct
from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

ODD = (
    b"", b"\x00", b"\xff", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\xc3\x28", b"\xed\xa0\x80", b"\r\n", b"\r\n\r\n",
    b"\n", b":", b",", b'"', b"\\", b"\\u0000", b"\\ud800", b"null", b"true", b"{}", b"[]", b"-1", b"1e999", b"NaN",
    b"Infinity", b"9" * 400, b"-" + b"9" * 30, b"[" * 3000, b'{"a":' * 3000, b"0x10", b"%s%n", b" - at `key` in `$.a`",
    b"`", b"...",
)  # fmt: skip
"""Bytes that parsers trip over."""


@st.composite
def edited(draw: st.DrawFn, seeds: Sequence[bytes], max_edits: int = 4) -> bytes:
    """One of the seeds, with some bytes replaced, left out, repeated or put in between."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, max_edits))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(("replace", "cut", "repeat", "truncate")))
        if kind == "truncate":
            data = data[:begin]
        elif kind == "cut":
            data = data[:begin] + data[end:]
        elif kind == "repeat":
            data = data[:end] + data[begin:end] * draw(st.integers(1, 50)) + data[end:]
        else:
            data = data[:begin] + draw(st.one_of(st.sampled_from(ODD), st.binary(max_size=12))) + data[end:]
    return data


def bytes_like(*seeds: bytes) -> st.SearchStrategy[bytes]:
    """The seeds, edited, and now and then plain noise."""
    return st.one_of(edited(seeds), edited(seeds, max_edits=1), st.binary(max_size=200))


odd_numbers = st.one_of(
    st.integers(-(2**66), 2**66),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from((0, 1, -1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 1e308, 1e-320)),
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(("", "\x00", "a" * 300, "${x}", " - at `$.a`", "`key` in `$`", "😀" * 40, "\u2028", "\ufeff")),
)
json_values: st.SearchStrategy[object] = st.recursive(
    st.one_of(st.none(), st.booleans(), odd_numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


def objects(fields: Sequence[str], usual: dict[str, object]) -> st.SearchStrategy[bytes]:
    """JSON objects: the usual fields, with some of `fields` set to anything, and some fields that nobody knows."""
    changed = st.dictionaries(st.one_of(st.sampled_from(sorted(fields)), texts), json_values, max_size=4)
    return changed.map(lambda some: encoded(usual | some))


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


u32s = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1), st.sampled_from((2**31, 2**32 - 1)))
u64s = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1), st.sampled_from((2**31, 2**63 - 1, 2**63, 2**64 - 1)))


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    """GGUF files of the right form, whose numbers may be anything, cut anywhere."""

    def text(value: bytes | None = None) -> bytes:
        data = draw(st.binary(max_size=8)) if value is None else value
        size = len(data) if draw(st.integers(0, 9)) else draw(u64s)
        return struct.pack("<Q", size) + data

    def scalar(kind: int) -> bytes:
        layouts = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
        return (
            text() if kind == 8 else draw(st.binary(min_size=1, max_size=1)) * struct.calcsize(layouts.get(kind, "B"))
        )

    def value() -> bytes:
        kind = draw(st.one_of(st.integers(0, 13), u32s))
        if kind != 9:
            return struct.pack("<I", kind) + scalar(kind)
        item, count = draw(st.integers(0, 13)), draw(st.integers(0, 3))
        said = count if draw(st.integers(0, 4)) else draw(u64s)
        return struct.pack("<IIQ", 9, item, said) + b"".join(scalar(item) for _ in range(count))

    names = (b"general.architecture", b"general.alignment", b"split.count", b"llama.context_length", None)
    values = [text(draw(st.sampled_from(names))) + value() for _ in range(draw(st.integers(0, 4)))]
    tensors = []
    for _ in range(draw(st.integers(0, 3))):
        shape = draw(st.lists(st.one_of(st.integers(0, 64), u64s), max_size=5))
        num_dims = len(shape) if draw(st.integers(0, 9)) else draw(u32s)
        name = text(draw(st.sampled_from((b"token_embd.weight", b"blk.0.attn_q.weight", b"x", None))))
        kind, offset = draw(st.one_of(st.integers(0, 32), u32s)), draw(st.one_of(st.just(0), u64s))
        tensors.append(name + struct.pack(f"<I{len(shape)}QIQ", num_dims, *shape, kind, offset))
    counts = [said if draw(st.integers(0, 9)) else draw(u64s) for said in (len(tensors), len(values))]
    head = b"GGUF" + struct.pack("<IQQ", draw(st.sampled_from((1, 2, 3, 3, 3, 4))), *counts)
    data = head + b"".join(values) + b"".join(tensors) + bytes(draw(st.integers(0, 600)))
    return data if draw(st.integers(0, 3)) else data[: draw(st.integers(0, len(data)))]


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    """Safetensors files whose header may say anything about their tensors."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    numbers = st.one_of(st.integers(0, 64), st.integers(-1, 2**64))
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(("F32", "F16", "BF16", "F64", "I32", "", "F8")),
            "shape": st.lists(numbers, max_size=10),
            "data_offsets": st.lists(numbers, min_size=2, max_size=2),
        }
    )
    names = st.one_of(st.sampled_from((name, name.replace("_A", "_B"), "__metadata__")), texts)
    header = encoded(draw(st.dictionaries(names, st.one_of(entry, entry, json_values), max_size=4)))
    header = draw(edited([header], max_edits=1))
    size = len(header) if draw(st.integers(0, 4)) else draw(u64s)
    return struct.pack("<Q", size) + header + bytes(draw(st.integers(0, 300)))
