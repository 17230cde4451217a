"""A draft head as a file: one safetensors file of matrices in groups of 8 or 4 bits, with what it was trained for in
its metadata.

The head (after EAGLE-3, Li et al. 2025, arXiv 2503.01840) reads what the target has computed. Slot p of a sequence
holds the token t_p and the target's features behind t_{p-1}: the residual streams behind `taps` of its layers. All
parts are divided by their root mean square, side by side, and multiplied with `first`: that is the input of one decoder
layer of the target's shape, whose output, normed, the head's own output matrix turns into scores of the tokens of
`vocabulary`. They are of t_{p+1}. One token further on there are no features of the target: there `chained` takes the
token and the layer's own output before the last norm.

A slot knows no token behind its own, so the head's keys and values may be shared wherever the target's are.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.quant.quantized import QuantizedTensor, quantize, quantize_int8

MATRICES = ("first", "chained", "qkv", "o", "gate_up", "down", "lm_head")
VECTORS = ("input_norm", "post_norm", "norm")
GROUP_SIZE = 32
MIN_TAPS = 2
"""Fewest layers that features are of: a single part is a head's own output."""
_FORMAT = "penstock-draft-head-1"
_KEY = "head"


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a head is, and of which target."""

    format: str = _FORMAT
    target: str
    """Name of the model it was trained for."""
    target_vocab_size: int
    target_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: list[int]
    """Numbers of the target's layers behind which features are taken, ascending, the first is 0."""
    trained_tokens: int = 0
    """Tokens of answers that it was trained on, each as often as it was seen."""

    def check_fits(self, config: ModelConfig) -> None:
        """Raises ConfigError if the head is not for a target of that shape."""
        for name, own, other in (
            ("hidden_size", self.hidden_size, config.hidden_size),
            ("layers", self.target_layers, config.num_layers),
            ("vocab_size", self.target_vocab_size, config.vocab_size),
            ("head_dim", self.head_dim, config.head_dim),
            ("attention heads", self.num_heads, config.num_heads),
            ("key/value heads", self.num_kv_heads, config.num_kv_heads),
        ):
            if own != other:
                raise ConfigError(
                    f"the draft head was trained for {self.target}, with {name} of {own}, and this model has {other}"
                )


@dataclass(frozen=True, slots=True)
class DraftHead:
    spec: HeadSpec
    matrices: dict[str, QuantizedTensor]
    """Matrices by the names of MATRICES, [out, in]."""
    vectors: dict[str, Tensor]
    """float32 [hidden_size], by the names of VECTORS."""
    vocabulary: Tensor
    """int64 [rows of lm_head]: the target's token ids, ascending."""


def quantize_head(spec: HeadSpec, weights: dict[str, Tensor], vocabulary: Tensor, bits: int) -> DraftHead:
    """Round a trained head to nearest. weights: float32, by the names of MATRICES and VECTORS. bits: 4 or 8."""
    matrices = {name: to_groups(weights[name], bits) for name in MATRICES}
    return DraftHead(spec, matrices, {name: weights[name].float() for name in VECTORS}, vocabulary)


def to_groups(weight: Tensor, bits: int) -> QuantizedTensor:
    """A matrix of a head, rounded. bits: 4 or 8."""
    return quantize(weight, GROUP_SIZE) if bits == 4 else quantize_int8(weight, GROUP_SIZE)


def write_head(head: DraftHead, path: Path) -> None:
    """Write the file, which appears as a whole."""
    tensors = {name: head.vectors[name].contiguous() for name in VECTORS}
    tensors["vocabulary"] = head.vocabulary.to(torch.int32)
    for name, matrix in head.matrices.items():
        # two values of four bits in a byte, the lower first
        q = matrix.q if matrix.bits == 8 else matrix.q[:, 0::2] | matrix.q[:, 1::2] << 4
        tensors[f"{name}.q"], tensors[f"{name}.scale"] = q.contiguous(), matrix.scale.half()
        if matrix.offset is not None:
            tensors[f"{name}.zero"] = matrix.zero.round().to(torch.uint8)
    partial = path.with_name(f"{path.name}.tmp")
    save_file(tensors, partial, metadata={_KEY: msgspec.json.encode(head.spec).decode()})
    partial.rename(path)


def read_spec(path: Path) -> HeadSpec:
    """The metadata alone. Raises ConfigError."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"can't read the draft head {path}: {error}") from error
    try:
        spec = msgspec.json.decode(text or "", type=HeadSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no draft head of penstock train-drafter") from error
    if spec.format != _FORMAT:
        raise ConfigError(f"{path} is a draft head of the format {spec.format}; this version reads {_FORMAT}")
    return spec


def read_head(path: Path) -> DraftHead:
    """Raises ConfigError for a file that is no head, or not a whole one."""
    spec = read_spec(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError as error:
        raise ConfigError(f"can't read the draft head {path}: {error}") from error
    try:
        matrices = {name: _matrix(tensors, name) for name in MATRICES}
        head = DraftHead(
            spec, matrices, {name: tensors[name].float() for name in VECTORS}, tensors["vocabulary"].long()
        )
    except KeyError as error:
        raise ConfigError(f"the draft head {path} has no tensor {error}") from error
    _check(head, path)
    return head


def dense_weights(head: DraftHead) -> dict[str, Tensor]:
    """What `quantize_head` takes, from a head."""
    return {name: matrix.dequantize() for name, matrix in head.matrices.items()} | head.vectors


def _matrix(tensors: dict[str, Tensor], name: str) -> QuantizedTensor:
    q, scale = tensors[f"{name}.q"], tensors[f"{name}.scale"].float()
    if q.dtype == torch.int8:
        return QuantizedTensor(q, scale, None, GROUP_SIZE)
    unpacked = torch.stack((q & 15, q >> 4), dim=2).flatten(1)
    return QuantizedTensor(unpacked, scale, -tensors[f"{name}.zero"].float() * scale, GROUP_SIZE)


def _check(head: DraftHead, path: Path) -> None:
    spec = head.spec
    hidden, query, shared = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "first": (hidden, (1 + len(spec.taps)) * hidden),
        "chained": (hidden, 2 * hidden),
        "qkv": (query + 2 * shared, hidden),
        "o": (hidden, query),
        "gate_up": (2 * spec.intermediate_size, hidden),
        "down": (hidden, spec.intermediate_size),
        "lm_head": (len(head.vocabulary), hidden),
    }
    for name, shape in shapes.items():
        found = tuple(head.matrices[name].q.shape)
        if found != shape:
            raise ConfigError(f"the draft head {path} has a matrix {name} of {found}, where {shape} was expected")
    if any(tuple(vector.shape) != (hidden,) for vector in head.vectors.values()):
        raise ConfigError(f"the draft head {path} has a norm that is not of {hidden} weights")
    ids = head.vocabulary
    if len(ids) == 0 or int(ids[0]) < 0 or int(ids[-1]) >= spec.target_vocab_size or bool((ids.diff() <= 0).any()):
        raise ConfigError(f"the draft head {path} has a vocabulary that is not ascending ids of its target's")
    for name, matrix in head.matrices.items():
        if tuple(matrix.scale.shape) != (shapes[name][0], -(-shapes[name][1] // GROUP_SIZE)):
            raise ConfigError(f"the draft head {path} has scales of {name} that are not of its groups")
    layers = spec.taps
    if (
        len(layers) < MIN_TAPS
        or layers != sorted(set(layers))
        or not all(0 <= layer < spec.target_layers - 1 for layer in layers)
    ):
        raise ConfigError(f"the draft head {path} takes features behind layers {layers} of {spec.target_layers}")
