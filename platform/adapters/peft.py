"""PEFT's LoRA format, read and checked: `adapter_config.json` and `adapter_model.safetensors`, nothing else.

Reads headers and JSON only; what computes with the tensors is the worker's. Whatever would make the answer differ from
peft's own is refused with a sentence: an option that is not known is refused when it is switched on. Invariant: an
adapter that has been checked fits the base model, tensor by tensor, and holds no code.

Ranks and alphas may be a module's own, by patterns of names: peft takes regular expressions, of which the first one
that matches counts. Here they may have no operator but a dot and a leading ^: a tenant's expression must not keep a
gateway busy.

Source: peft's `LoraConfig`, `get_pattern_key` and `get_peft_model_state_dict`; the safetensors format (8 bytes of
length, JSON, tensors).
"""

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.wire.errors import InvalidRequest

T = TypeVar("T")

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
    r"\.(self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.lora_([AB]\.weight|magnitude_vector)"
)
_SIDES = ("A", "B", "magnitude_vector")
_PREFIX = "base_model.model."
"""What peft puts before the names of a model's modules."""
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.){1,200}", re.ASCII)
MAX_PATTERNS = 1024
_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
        "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
        "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
        "rank_pattern", "revision", "target_modules", "task_type", "use_dora", "use_rslora",
    }
)  # fmt: skip
"""Options that are read, or that only record how the adapter was made: its modules are known by its tensors."""
_SENTENCES = {
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


class Adapted(NamedTuple):
    """What an adapter has of one module: names of tensors, and its scaling."""

    a: str
    """[rank, in]."""
    b: str
    """[out, rank]."""
    scaling: float
    """Factor of the product B A."""
    magnitude: str | None = None
    """[out], the length of each of the module's rows (DoRA); None: whatever it is."""

    @property
    def tensors(self) -> list[str]:
        return [self.a, self.b] if self.magnitude is None else [self.a, self.b, self.magnitude]


class Checked(NamedTuple):
    """An adapter that fits its base model."""

    rank: int
    """The highest of any module."""
    modules: dict[tuple[int, str], Adapted]
    """Each adapted module, by layer and module."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted modules."""
        return tuple(sorted({module for _, module in self.modules}))

    @property
    def has_magnitudes(self) -> bool:
        """Whether it is DoRA."""
        return any(adapted.magnitude is not None for adapted in self.modules.values())


@dataclass(frozen=True, slots=True)
class Settings:
    """What an adapter's configuration says of its modules."""

    rank: int
    alpha: float
    ranks: Mapping[re.Pattern[str], int]
    """Ranks of the modules whose names match; the first one counts."""
    alphas: Mapping[re.Pattern[str], float]
    is_rank_stabilized: bool
    """Whether scaling is alpha by the root of the rank (Kalajdzievski 2023), not by the rank."""
    has_magnitudes: bool
    """Whether it is DoRA (Liu et al. 2024)."""

    def rank_of(self, name: str) -> int:
        """name: the module's in the base model, as peft has it."""
        return _first_match(self.ranks, name, self.rank)

    def scaling_of(self, name: str) -> float:
        rank, alpha = self.rank_of(name), _first_match(self.alphas, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


class Tensor(msgspec.Struct, frozen=True):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_folder(folder: Path, base: BaseShapes, max_rank: int) -> Checked:
    """Read and check the adapter in a folder. Raises InvalidRequest with a sentence, OSError where a file can't be
    read."""
    settings = check_config(_small_file(folder / CONFIG_FILE), max_rank)
    header = read_header(folder / WEIGHTS_FILE)
    modules = check_tensors(header, settings, base)
    return Checked(max(header[adapted.a].shape[0] for adapted in modules.values()), modules)


def check_config(data: bytes, max_rank: int) -> Settings:
    """data: the content of adapter_config.json. Raises InvalidRequest."""
    try:
        config = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{CONFIG_FILE} is not a JSON object: {error}.") from None
    except RecursionError:
        raise InvalidRequest(f"{CONFIG_FILE} is nested too deeply.") from None
    if config.get("peft_type") != "LORA":
        raise InvalidRequest(f"{CONFIG_FILE} is of the type {_shown(config.get('peft_type'))}; only LORA is supported.")
    _refuse_options(config)
    return Settings(
        _rank(config.get("r"), "a rank r", max_rank),
        _alpha(config.get("lora_alpha"), "a number lora_alpha"),
        {key: _rank(value, "ranks in rank_pattern", max_rank) for key, value in _patterns(config, "rank_pattern")},
        {key: _alpha(value, "numbers in alpha_pattern") for key, value in _patterns(config, "alpha_pattern")},
        bool(config.get("use_rslora")),
        bool(config.get("use_dora")),
    )


def _rank(value: object, what: str, max_rank: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{CONFIG_FILE} must have {what} of 1 or more, not {_shown(value)}.")
    if value > max_rank:
        raise InvalidRequest(
            f"The adapter's rank is {_shown(value)}; this model serves ranks up to {max_rank}"
            " (engine.adapters.max_rank)."
        )
    return value


def _alpha(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_ALPHA:
        raise InvalidRequest(f"{CONFIG_FILE} must have {what} of at most {MAX_ALPHA:g}, not {_shown(value)}.")
    return value


def _patterns(config: Mapping[str, Any], option: str) -> Iterator[tuple[re.Pattern[str], object]]:
    """The keys of a pattern as peft would match them, and what they stand for."""
    found = config.get(option) or {}
    if not isinstance(found, dict):
        raise InvalidRequest(f"{CONFIG_FILE} must have an object {option}, not {_shown(found)}.")
    if len(found) > MAX_PATTERNS:
        raise InvalidRequest(f"{CONFIG_FILE} has {len(found)} entries in {option}; {MAX_PATTERNS} are supported.")
    for key, value in found.items():
        if not _PATTERN.fullmatch(key):
            raise InvalidRequest(
                f"The adapter can't be served: {_shown(key)} in {option} is more than the name of a module, or the end"
                " of one; write out the names that it stands for."
            )
        yield re.compile(rf"(.*\.)?({key})$"), value


def _first_match(patterns: Mapping[re.Pattern[str], T], name: str, otherwise: T) -> T:
    return next((value for pattern, value in patterns.items() if pattern.match(name)), otherwise)


def _refuse_options(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if value and name in _SENTENCES:
            raise InvalidRequest(f"The adapter can't be served: {_SENTENCES[name]}.")
        if value and name not in _HARMLESS:
            raise InvalidRequest(
                f"The adapter can't be served: its option {_shown(name)} is not known here, and it is switched on"
                f" ({_shown(value)})."
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


def check_tensors(
    tensors: Mapping[str, Tensor], settings: Settings, base: BaseShapes
) -> dict[tuple[int, str], Adapted]:
    """The tensors by layer and module; every one has its place in the base model, its shape, and its partners."""
    ranks: dict[tuple[int, str], int] = {}
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        module = "" if match is None else match[2].rpartition(".")[2]
        side = "" if match is None else match[3].removesuffix(".weight")
        is_wanted = side in _SIDES[: 2 + settings.has_magnitudes]
        if match is None or module not in base.modules or not is_wanted:
            raise InvalidRequest(
                f"The adapter has a tensor {_shown(name)}; of this model only {', '.join(sorted(base.modules))} can be"
                " adapted."
            )
        layer = int(match[1])
        if layer >= base.num_layers:
            raise InvalidRequest(
                f"The adapter has a tensor {_shown(name)}, but the base model has only {base.num_layers} layers."
            )
        rows, columns = base.modules[module]
        if (layer, module) not in ranks:
            ranks[layer, module] = settings.rank_of(_module_of(name))
        rank = ranks[layer, module]
        wanted = {"A": (rank, columns), "B": (rows, rank), "magnitude_vector": (rows,)}[side]
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
        if not {"A", "B"} <= set(sides):
            raise InvalidRequest(f"The adapter has only one of the two tensors of {module} in layer {layer}.")
        if settings.has_magnitudes and len(sides) != len(_SIDES):
            raise InvalidRequest(f"The adapter is DoRA, but has no lora_magnitude_vector of {module} in layer {layer}.")
    return {
        place: Adapted(
            sides["A"], sides["B"], settings.scaling_of(_module_of(sides["A"])), sides.get("magnitude_vector")
        )
        for place, sides in found.items()
    }


def _module_of(tensor: str) -> str:
    """The module's name in the base model."""
    return tensor.removeprefix(_PREFIX).rpartition(".lora_")[0]


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
