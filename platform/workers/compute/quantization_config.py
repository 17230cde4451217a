"""How a checkpoint's linear layers are quantized, as its Hugging Face config.json declares it.

Not how they are computed (`quant`). What is not supported is refused with a ConfigError that names what is.
"""

from dataclasses import dataclass

from penstock.base.errors import ConfigError
from penstock.workers.compute.config_fields import Fields


@dataclass(frozen=True, slots=True)
class Awq:
    """Linear layers are 4-bit integers in AutoAWQ's GEMM layout (`penstock.workers.compute.quant.awq`)."""

    group_size: int


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """Linear layers are integers as compressed-tensors packs them (`penstock.workers.compute.quant.compressed`)."""

    bits: int
    """4, or 8 where it is symmetric."""
    group_size: int | None
    """Columns of a group; None if a row is one group."""
    is_symmetric: bool


@dataclass(frozen=True, slots=True)
class FloatQuantized:
    """Linear layers are 8-bit floats, as compressed-tensors has them (`penstock.workers.compute.quant.float8`)."""

    rounds_activations: bool
    """Whether activations are rounded to 8 bits too, a token at a time (W8A8); else weights alone are (W8A16)."""


def read_quantization(fields: Fields) -> Awq | PackQuantized | FloatQuantized | None:
    """What quantization_config declares, as AutoAWQ, compressed-tensors and transformers write it."""
    if not fields.values:
        return None
    method = fields.values.get("quant_method")
    if method == "awq":
        return _awq(fields)
    if method == "compressed-tensors":
        return _compressed(fields)
    raise ConfigError(
        f"the checkpoint is quantized ({method!r}), which is not supported; these are: safetensors in float32, "
        "float16, bfloat16, AWQ (4 bits, GEMM layout) or compressed-tensors (pack-quantized, 4 or 8 bits; "
        "float-quantized), and GGUF"
    )


def _awq(fields: Fields) -> Awq:
    bits, version = (
        fields.integer("bits", fields.integer("w_bit", 4)),
        str(fields.values.get("version", "gemm")).lower(),
    )
    if bits != 4 or version != "gemm" or not fields.flag("zero_point", True):
        raise ConfigError(
            f"AWQ with {bits} bits, version {version!r} and zero_point {fields.flag('zero_point', True)} "
            "is not supported; 4 bits, 'gemm' and true are"
        )
    group_size = fields.integer("group_size", fields.integer("q_group_size", 128))
    if group_size < 1:
        raise ConfigError(f"AWQ with group_size {group_size} is not supported; groups of 1 and more columns are")
    return Awq(group_size)


def _compressed(fields: Fields) -> PackQuantized | FloatQuantized:
    """`QuantizationConfig` of compressed-tensors. Which layers are quantized follows from their tensors, so targets and
    exceptions are not read."""
    if fields.values.get("kv_cache_scheme"):
        raise ConfigError("compressed-tensors with a kv_cache_scheme is not supported; weights alone are")
    if (fields.nested("sparsity_config").values.get("format") or "dense") != "dense":
        raise ConfigError("compressed-tensors with a sparsity_config is not supported; dense weights are")
    schemes = fields.nested("config_groups")
    kinds = {_scheme(schemes.nested(name), fields.values.get("format")) for name in schemes.values}
    if len(kinds) != 1:
        raise ConfigError(
            f"compressed-tensors with {len(kinds)} kinds of quantized weights in one checkpoint is not supported; "
            "one is"
        )
    return kinds.pop()


def _scheme(fields: Fields, stored: object) -> PackQuantized | FloatQuantized:
    """Read one scheme of compressed-tensors. stored: the format of schemes that name none. Raises ConfigError if it is
    not supported."""
    stored = fields.values.get("format") or stored
    if stored == "float-quantized":
        return _float_scheme(fields)
    if stored != "pack-quantized":
        raise ConfigError(
            f"compressed-tensors in the format {stored!r} is not supported; "
            "'pack-quantized' is, integers of 4 or 8 bits, and 'float-quantized', 8-bit floats"
        )
    if fields.values.get("input_activations") or fields.values.get("output_activations"):
        raise ConfigError(
            "compressed-tensors with quantized activations is not supported; weights alone are (W4A16, W8A16)"
        )
    weights = fields.nested("weights")
    bits, kind, is_symmetric = (
        weights.integer("num_bits", 8),
        weights.values.get("type", "int"),
        weights.flag("symmetric", True),
    )
    if kind != "int" or not (bits == 4 or (bits == 8 and is_symmetric)):
        name = "symmetric" if is_symmetric else "asymmetric"
        raise ConfigError(
            f"compressed-tensors with {name} weights of {bits} bits, type {kind!r}, is not supported; "
            "4 bits and symmetric 8 bits, 'int', are"
        )
    if weights.values.get("actorder") in (True, "group", "dynamic"):
        raise ConfigError(
            "compressed-tensors with actorder 'group', whose columns are not in order, is not supported; "
            "'weight' and none are"
        )
    group_size = weights.integer("group_size", 0)
    strategy = weights.values.get("strategy") or {0: "tensor", -1: "channel"}.get(group_size, "group")
    if (strategy, group_size > 0) not in (("group", True), ("channel", False)):
        raise ConfigError(
            f"compressed-tensors with strategy {strategy!r} and group_size {group_size} is not supported; "
            "'group' and 'channel' are"
        )
    return PackQuantized(bits, group_size if group_size > 0 else None, is_symmetric)


def _float_scheme(fields: Fields) -> FloatQuantized:
    """Read a scheme of 8-bit floats (FP8 and FP8_DYNAMIC of llm-compressor). Raises ConfigError if it is not
    supported."""
    weights, activations = fields.nested("weights"), fields.nested("input_activations")
    strategy = weights.values.get("strategy")
    form = weights.integer("num_bits", 8), weights.values.get("type", "float"), weights.flag("symmetric", True)
    if form != (8, "float", True) or strategy not in ("tensor", "channel"):
        raise ConfigError(
            f"compressed-tensors with float-quantized weights of {form[0]} bits, type {form[1]!r}, strategy "
            f"{strategy!r} is not supported; symmetric ones of 8 bits, 'float', 'tensor' or 'channel' are"
        )
    if fields.values.get("output_activations"):
        raise ConfigError("compressed-tensors with quantized output_activations is not supported; inputs alone are")
    if not activations.values:
        return FloatQuantized(rounds_activations=False)
    found = (
        activations.integer("num_bits", 8),
        activations.values.get("type", "float"),
        activations.values.get("strategy"),
        bool(activations.values.get("dynamic")),
    )
    if found != (8, "float", "token", True):
        raise ConfigError(
            f"compressed-tensors with activations of {found[0]} bits, type {found[1]!r}, strategy {found[2]!r}, "
            f"{'dynamic' if found[3] else 'static'}, is not supported; 8 bits, 'float', 'token', dynamic, are"
        )
    return FloatQuantized(rounds_activations=True)
