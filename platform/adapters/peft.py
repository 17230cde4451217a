"""PEFT's LoRA format, read and checked: `adapter_config.json` and `adapter_model.safetensors`, nothing else.

Reads headers and JSON only; what computes with the tensors is the worker's. Whatever would make the answer differ from
peft's own is refused with a sentence: an option that is not known is refused when it is switched on. Invariant: an
adapter that has been checked fits the base model, tensor by tensor, and holds no code.

Source: peft's `LoraConfig` and `get_peft_model_state_dict`; the safetensors format (8 bytes of length, JSON, tensors).
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.wire.errors import InvalidRequest

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
TYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of tensors, and bytes of an element."""
MAX_ALPHA = 1e6
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 4 * 2**20
"""Ten times that of an adapter of every linear layer of a model with 126 layers."""
MAX_DIMENSIONS = 8

_NAME = re.compile(
    r"base_model\.model\.(?:model\.)?layers\.(0|[1-9]\d{0,4})"
    r"\.(self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.lora_([AB])\.weight"
)
_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
        "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
        "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
        "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Options that are read, or that say only how the adapter was made: which modules it has is read off its tensors."""
_SENTENCES = {
    "use_dora": "DoRA (use_dora) is not supported; train it as plain LoRA",
    "modules_to_save": (
        "whole modules beside the adapter (modules_to_save) are not supported; train it with modules_to_save=None"
    ),
    "fan_in_fan_out": (
        "transposed weights (fan_in_fan_out) are not supported: no linear layer of this model is stored that way"
    ),
    "lora_bias": "biases of the adapter (lora_bias) are not supported",
    "layer_replication": "replicated layers (layer_replication) are not supported",
    "trainable_token_indices": "trained token embeddings (trainable_token_indices) are not supported",
    "target_parameters": "adapted parameters outside of linear layers (target_parameters) are not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
}
_INITS_THAT_KEEP_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model as it is. The others (PiSSA, OLoRA, LoftQ, CorDA) train against
a changed one."""


class BaseShapes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The linear layers of a base model that an adapter may adapt."""

    num_layers: int
    modules: dict[str, tuple[int, int]]
    """[out, in] by name, the same in every layer: q_proj, k_proj and so on."""


class Pair(NamedTuple):
    """Names of the two tensors of one module: A [rank, in], B [out, rank]."""

    a: str
    b: str


class Checked(NamedTuple):
    """An adapter that fits its base model."""

    rank: int
    scaling: float
    """Factor of the product B A."""
    pairs: dict[tuple[int, str], Pair]
    """Names of the two tensors of each adapted module, by layer and module."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted modules."""
        return tuple(sorted({module for _, module in self.pairs}))


class Tensor(msgspec.Struct, frozen=True):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_folder(folder: Path, base: BaseShapes, max_rank: int) -> Checked:
    """Read and check the adapter in a folder. Raises InvalidRequest with a sentence, OSError where a file can't be
    read."""
    rank, scaling = check_config(_small_file(folder / CONFIG_FILE), max_rank)
    return Checked(rank, scaling, check_tensors(read_header(folder / WEIGHTS_FILE), rank, base))


def check_config(data: bytes, max_rank: int) -> tuple[int, float]:
    """Rank and scaling of an adapter. data: the content of adapter_config.json. Raises InvalidRequest."""
    try:
        config = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{CONFIG_FILE} is not a JSON object: {error}.") from None
    except RecursionError:
        raise InvalidRequest(f"{CONFIG_FILE} is nested too deeply.") from None
    if config.get("peft_type") != "LORA":
        raise InvalidRequest(f"{CONFIG_FILE} is of the type {_shown(config.get('peft_type'))}; only LORA is supported.")
    _refuse_options(config)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InvalidRequest(f"{CONFIG_FILE} must have a rank r of 1 or more, not {_shown(rank)}.")
    if rank > max_rank:
        raise InvalidRequest(
            f"The adapter's rank is {_shown(rank)}; this model serves ranks up to {max_rank}"
            " (engine.adapters.max_rank)."
        )
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise InvalidRequest(
            f"{CONFIG_FILE} must have a number lora_alpha of at most {MAX_ALPHA:g}, not {_shown(alpha)}."
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _refuse_options(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if value and name in _SENTENCES:
            raise InvalidRequest(f"The adapter can't be served: {_SENTENCES[name]}.")
        if value and name not in _HARMLESS:
            raise InvalidRequest(
                f"The adapter can't be served: its option {_shown(name)} is not known here, and it is switched on"
                f" ({_shown(value)})."
            )
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise InvalidRequest(
                f"The adapter can't be served: ranks or alphas of its own per module ({name}) are not supported."
            )
    if config.get("bias") not in (None, "none"):
        raise InvalidRequest(
            f"The adapter can't be served: trained biases of the base model (bias: {_shown(config['bias'])}) are not"
            " supported."
        )
    init = config.get("init_lora_weights", True)
    if init not in _INITS_THAT_KEEP_THE_BASE:
        raise InvalidRequest(
            f"The adapter can't be served: it was trained with init_lora_weights {_shown(init)}, which changes the base"
            " model; convert it to plain LoRA with peft."
        )


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, checked to fill it without gap or overlap."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise _not_safetensors("its header is cut short or too long")
        data = file.read(length)
    try:
        entries = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        tensors = {
            name: msgspec.json.decode(entry, type=Tensor) for name, entry in entries.items() if name != "__metadata__"
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _not_safetensors("its header can't be read") from None
    _check_extents(tensors, size - 8 - length)
    return tensors


def _check_extents(tensors: Mapping[str, Tensor], num_bytes: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in TYPES:
            raise InvalidRequest(
                f"Tensor {_shown(name)} has the type {_shown(tensor.dtype)}; supported are {', '.join(TYPES)}."
            )
        if len(tensor.shape) > MAX_DIMENSIONS:  # their product could take minutes
            raise _not_safetensors(f"tensor {_shown(name)} has {len(tensor.shape)} dimensions")
        begin, until = tensor.data_offsets
        if (
            begin != end
            or any(count < 0 for count in tensor.shape)
            or until - begin != math.prod(tensor.shape) * TYPES[tensor.dtype]
        ):
            raise _not_safetensors(f"tensor {_shown(name)} does not lie where its shape says")
        end = until
    if end != num_bytes:
        raise _not_safetensors(f"its tensors end at byte {end} of {num_bytes}")


def check_tensors(tensors: Mapping[str, Tensor], rank: int, base: BaseShapes) -> dict[tuple[int, str], Pair]:
    """The tensors by layer and module; every one has its place in the base model, its shape, and its partner."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        module = "" if match is None else match[2].rpartition(".")[2]
        if match is None or module not in base.modules:
            raise InvalidRequest(
                f"The adapter has a tensor {_shown(name)}; of this model only {', '.join(sorted(base.modules))} can be"
                " adapted."
            )
        layer, side = int(match[1]), match[3]
        if layer >= base.num_layers:
            raise InvalidRequest(
                f"The adapter has a tensor {_shown(name)}, but the base model has only {base.num_layers} layers."
            )
        rows, columns = base.modules[module]
        wanted = (rank, columns) if side == "A" else (rows, rank)
        if tensor.shape != wanted:
            raise InvalidRequest(
                f"Tensor {_shown(name)} has the shape {list(tensor.shape)}; rank {rank} and the base model ask for"
                f" {list(wanted)}."
            )
        if found.setdefault((layer, module), {}).setdefault(side, name) != name:
            raise InvalidRequest(
                f"The adapter has two tensors for one place: {_shown(found[layer, module][side])} and {_shown(name)}."
            )
    if not found:
        raise InvalidRequest(f"{WEIGHTS_FILE} holds no tensor.")
    for (layer, module), sides in found.items():
        if len(sides) != 2:
            raise InvalidRequest(f"The adapter has only one of the two tensors of {module} in layer {layer}.")
    return {place: Pair(sides["A"], sides["B"]) for place, sides in found.items()}


def refused_name(name: str) -> InvalidRequest:
    """The error that answers an upload of a file of any other name than the two."""
    if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
        return InvalidRequest(
            f"{_shown(name)} is a pickle, which can run code when it is read; save the adapter as safetensors"
            f" ({WEIGHTS_FILE})."
        )
    return InvalidRequest(f"An adapter is the two files {' and '.join(FILES)}, not {_shown(name)}.")


def _small_file(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidRequest(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes.")
    return data


def _not_safetensors(why: str) -> InvalidRequest:
    return InvalidRequest(f"{WEIGHTS_FILE} is not a safetensors file: {why}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
