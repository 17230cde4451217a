"""A pool's checkpoint as a directory that vLLM reads.

vLLM reads Hugging Face directories. A GGUF file becomes one, dequantized to bfloat16, in the user's cache folder under
the checkpoint's digest; it arrives by rename, so replicas that start at once, or a crash in the middle, can't leave
half of it. Without a tokenizer: vLLM gets token ids.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.kernels.build import cache_folder
from penstock.workers.compute.model_config import from_gguf, to_hf
from penstock.workers.compute.quant.quantized import TorchQuantizedMatrix
from penstock.workers.compute.weights import layout, load_weights


def prepare_folder(source: ModelSource, cache: Path | None = None) -> Path:
    """The checkpoint's directory for vLLM; that of a GGUF file is made, in seconds, the first time. Raises
    ConfigError."""
    if source.format == "safetensors":
        return source.path
    cache = cache or cache_folder().parent / "vllm"
    folder = cache / source.digest
    if not folder.exists():
        try:
            _export(source, folder)
        except OSError as error:
            raise ConfigError(
                f"{source.path} can't be written as a directory for vLLM under {cache}: {error}"
            ) from error
    return folder


def _export(source: ModelSource, folder: Path) -> None:
    config = from_gguf(source.gguf)
    if config.has_rope_factors:
        raise ConfigError(
            f"{source.path} brings RoPE factors of its own, which a directory for vLLM has no place for; "
            "use the model's safetensors"
        )
    weights = load_weights(source, config, torch.bfloat16)
    tensors = {}
    for name, piece in layout(config).items():
        whole = weights[piece.target]
        assert not isinstance(whole, TorchQuantizedMatrix), "GGUF types are dequantized"
        tensors[name] = whole[piece.start : piece.start + piece.shape[0]].clone()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(to_hf(config), indent=1) + "\n", encoding="utf-8")
        _move(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _move(made: Path, folder: Path) -> None:
    """Rename a finished folder to its place. Another replica may have been quicker: its folder is the same."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise
