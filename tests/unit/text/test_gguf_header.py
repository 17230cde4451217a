"""The direct reader against the `gguf` package."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.text.gguf_header import Strings, read_gguf_header
from penstock.text.source import ModelSource


def every_type(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -3)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -300)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -7)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**40))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 1e300)
    writer.add_bool("t.yes", True)
    writer.add_bool("t.no", False)
    writer.add_string("t.text", "grüße 👋")
    writer.add_array("t.texts", ["a", "", "ß" * 300])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.25, -1.5])
    writer.add_array("t.flags", [True, False])


def test_it_reads_what_the_gguf_package_reads(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(every_type, weights=np.arange(24, dtype=np.float32).reshape(4, 6))
    oracle = gguf.GGUFReader(path)

    header = read_gguf_header(path)

    expected = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert {
        name: value.decoded() if isinstance(value, Strings) else value for name, value in header.metadata.items()
    } == expected
    assert header.texts("t.texts") == ["a", "", "ß" * 300]
    assert header.metadata["t.yes"] is True
    (tensor,) = header.tensors
    assert (tensor.name, tensor.shape, tensor.ggml_type) == ("token_embd.weight", (6, 4), 0)
    assert tensor.offset == oracle.tensors[0].data_offset
    assert header.data_offset == oracle.data_offset
    assert np.fromfile(path, np.float32, 24, offset=tensor.offset).tolist() == list(range(24))


def test_it_reads_the_demo_model_as_the_gguf_package_does(demo: ModelSource) -> None:
    oracle = gguf.GGUFReader(demo.path)

    header = demo.gguf

    assert [(t.name, list(t.shape), t.ggml_type, t.offset) for t in header.tensors] == [
        (t.name, t.shape.tolist(), t.tensor_type.value, t.data_offset) for t in oracle.tensors
    ]
    for name in (
        "tokenizer.chat_template",
        "llama.context_length",
        "llama.rope.freq_base",
        "tokenizer.ggml.add_bos_token",
    ):
        assert header.metadata[name] == oracle.fields[name].contents()
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert header.texts(name) == oracle.fields[name].contents()
    assert header.integers("tokenizer.ggml.token_type") == oracle.fields["tokenizer.ggml.token_type"].contents()


@pytest.mark.parametrize("size", [0, 3, 20, 60, 300])
def test_a_file_cut_short_is_refused(make_gguf: Callable[..., Path], size: int) -> None:
    path = make_gguf(every_type)
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(ConfigError, match=str(path)):
        read_gguf_header(path)


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "old.gguf").write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(100))

    with pytest.raises(ConfigError, match="not a GGUF file"):
        read_gguf_header(tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="version 1"):
        read_gguf_header(tmp_path / "old.gguf")
    with pytest.raises(ConfigError, match="can't read"):
        read_gguf_header(tmp_path / "absent.gguf")


def test_one_part_of_several_is_refused(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(lambda writer: writer.add_uint16("split.count", 3))

    with pytest.raises(ConfigError, match="one of 3 parts"):
        read_gguf_header(path)


def test_a_value_of_the_wrong_type_is_named(make_gguf: Callable[..., Path]) -> None:
    header = read_gguf_header(make_gguf(every_type))

    for read in (header.text, header.flag, header.texts):
        with pytest.raises(ConfigError, match=r"t\.i32"):
            read("t.i32")
    with pytest.raises(ConfigError, match=r"t\.text"):
        header.integer("t.text")
    assert header.integer("absent") is None
    assert header.integers("t.ints") == [1, -2, 3]
