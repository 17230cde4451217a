"""Targets of files: checkpoints, adapters, traces."""

import gzip
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from hypothesis import strategies as st

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, check_config, check_folder, read_header
from penstock.adapters.sources.archive import unpack
from penstock.base.errors import ConfigError
from penstock.text.gguf_header import read_gguf_header
from penstock.text.source import ModelSource
from penstock.wire.errors import InvalidRequest
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.readers.gguf_file import gguf_entries
from penstock_loadtest.errors import ScenarioInvalid, TraceInvalid
from penstock_loadtest.workload.servegen import read_client_rates
from penstock_loadtest.workload.servegen_lengths import LengthTable
from penstock_loadtest.workload.traces import READERS
from tests.fuzz.check import Target, raising
from tests.fuzz.inputs import bytes_like, encoded, gguf_files, objects, safetensors_files
from tests.unit.adapters.files import BASE, config, safetensors, tensors_of
from tests.unit.adapters.sources.servers import tar_of, zip_of

ARCHIVE_BYTES = 2**16
"""Bytes that may come out of an archive."""
MAX_ROWS = 200
"""Rows that are read of a trace."""
ROWS_BYTES = 2**30
"""Bytes that MAX_ROWS rows may take: a prompt of MAX_TOKENS tokens has 625,000 blocks with a number each."""


def _with_file(parse: Callable[[Path], object], name: str = "file") -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            parse(path)

    return run


_LLAMA = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    has_rope_factors=False,
    max_position_embeddings=64,
    sliding_window=None,
    is_tied=True,
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
    has_qk_norm=False,
    eos_token_ids=frozenset({2}),
)


def _read_tensors(path: Path) -> None:
    gguf_entries(path, read_gguf_header(path), _LLAMA)


def _rows(read: Callable[[Path], Iterator[object]]) -> Callable[[bytes], None]:
    return _with_file(lambda path: list(islice(read(path), MAX_ROWS)))


def _read_folder(given: tuple[bytes, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CONFIG_FILE).write_bytes(given[0])
        (folder / WEIGHTS_FILE).write_bytes(given[1])
        check_folder(folder, BASE, 8)


def _safetensors_digest(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        (folder / "model.safetensors").write_bytes(data)
        assert ModelSource("safetensors", folder, "x").digest


def _unpack(data: bytes) -> None:
    """What comes out has one of two names, and lies in the folder."""
    with tempfile.TemporaryDirectory() as name:
        archive, folder = Path(name) / "archive", Path(name) / "deep" / "out"
        archive.write_bytes(data)
        folder.mkdir(parents=True)
        try:
            unpack(archive, folder, ARCHIVE_BYTES)
        finally:
            found = {path for path in Path(name).rglob("*") if path.is_file()} - {archive}
            assert found <= {folder / CONFIG_FILE, folder / WEIGHTS_FILE}


_ADAPTER = safetensors(tensors_of())
_CONFIG = encoded(config())
_ARCHIVED = {f"a/{CONFIG_FILE}": _CONFIG, "a/README.md": b"words", f"a/{WEIGHTS_FILE}": bytes(600)}
_ARCHIVES = (zip_of(_ARCHIVED), tar_of(_ARCHIVED), tar_of(_ARCHIVED, "w"))
_MOONCAKE = b'{"timestamp": 1000, "input_length": 1100, "output_length": 9, "hash_ids": [3, 4, 5]}\n' * 2
_AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04,1,2\n"
_BURSTGPT = b"Timestamp,Session ID,Model,Request tokens,Response tokens\n5,a,ChatGPT,472,18\n6,,GPT-4,1,0\n"
_SERVEGEN = b"t_s,client,input_tokens,output_tokens\n0.5,1,10,20\n0.9,2,10,20\n"
_RATES = b"t_s,client,rate_rps,cv,pattern,shape,scale\n0,1,0.5,1,G,1.0,1\n600,1,0.5,1,W,0.7,1\n"
_LENGTHS = encoded({"t_s": 0, "client": 1, "output_tokens": [5.0] * 15, "input_tokens": [7.0] * 15}) + b"\n"
_TRACES = {"mooncake": _MOONCAKE, "azure": _AZURE, "burstgpt": _BURSTGPT, "servegen": _SERVEGEN}


def _trace_inputs(good: bytes) -> st.SearchStrategy[bytes]:
    return bytes_like(good, gzip.compress(good, mtime=0))


FILE_TARGETS: dict[str, Target] = {
    "gguf-header": Target(gguf_files(), raising(ConfigError)(_with_file(read_gguf_header, "m.gguf"))),
    "gguf-tensors": Target(gguf_files(), raising(ConfigError)(_with_file(_read_tensors, "m.gguf"))),
    "safetensors-digest": Target(safetensors_files(), raising(ConfigError)(_safetensors_digest)),
    "adapter-header": Target(
        st.one_of(safetensors_files(), bytes_like(_ADAPTER)), raising(InvalidRequest)(_with_file(read_header))
    ),
    "adapter-config": Target(
        st.one_of(objects(list(config()), config()), bytes_like(_CONFIG)),
        raising(InvalidRequest)(lambda data: check_config(data, 8)),
    ),
    "adapter": Target(
        st.tuples(bytes_like(_CONFIG), st.one_of(safetensors_files(), bytes_like(_ADAPTER))),
        raising(InvalidRequest)(_read_folder),
    ),
    "adapter-archive": Target(bytes_like(*_ARCHIVES), raising(InvalidRequest)(_unpack)),
    "servegen-rates": Target(_trace_inputs(_RATES), raising(TraceInvalid)(_rows(read_client_rates))),
    "servegen-lengths": Target(
        _trace_inputs(_LENGTHS), raising(TraceInvalid)(_with_file(lambda path: LengthTable.read(path, 1)))
    ),
    **{
        f"trace-{name}": Target(
            _trace_inputs(good), raising(TraceInvalid, ScenarioInvalid)(_rows(READERS[name])), ROWS_BYTES
        )
        for name, good in _TRACES.items()
    },
}
