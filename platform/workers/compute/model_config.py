"""The shape of a Llama-family checkpoint, as it declares it, read from a Hugging Face config.json or from GGUF
metadata.

Not a reader of weights. Invariant: a `ModelConfig` describes a model that `llama.py` computes exactly; everything else
(another architecture, RoPE type, activation, quantization) has been refused with a ConfigError that names what is
supported.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from penstock.base.errors import ConfigError
from penstock.text.gguf_header import GgufHeader
from penstock.text.source import ModelSource
from penstock.workers.compute.config_fields import Fields
from penstock.workers.compute.quantization_config import Awq, FloatQuantized, PackQuantized, read_quantization

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

HF_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_MISTRAL_WINDOW = 4096  # transformers' default where a Mistral's config.json has no sliding_window
_QWEN3_HEAD_DIM = 128  # likewise
_RMS_NORM_EPS = 1e-6  # likewise, all families
_ROPE_THETA = 10000.0  # likewise


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later; `llama.py` has the formula."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    has_rope_factors: bool
    """The checkpoint brings a divisor for each RoPE frequency (GGUF's form of Llama 3 scaling)."""
    max_position_embeddings: int
    sliding_window: int | None
    """Tokens to which a layer attends; attention is full only in contexts up to that long."""
    is_tied: bool
    """The output head is the embedding table."""
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_token_ids: frozenset[int]
    quantization: Awq | PackQuantized | FloatQuantized | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"the checkpoint's {name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the checkpoint's {self.num_heads} attention heads can't share "
                f"{self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ConfigError(f"the checkpoint's head_dim must be even for RoPE, not {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"the checkpoint's sliding_window must be at least 1, not {self.sliding_window}")

    @property
    def max_full_context(self) -> int:
        """Longest context, in tokens, that full attention computes as the model was trained."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of every linear layer that a decoder layer has, by its name in a checkpoint."""
        hidden, inner, query, shared = (
            self.hidden_size,
            self.intermediate_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        inputs = {
            "q_proj": (query, hidden),
            "k_proj": (shared, hidden),
            "v_proj": (shared, hidden),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
        }
        return inputs | {"o_proj": (hidden, query), "down_proj": (hidden, inner)}


def read_config(source: ModelSource) -> ModelConfig:
    if source.format == "gguf":
        return from_gguf(source.gguf)
    return from_hf(source.config, source.read_json("generation_config.json") or {})


def read_eos_token_ids(source: ModelSource) -> frozenset[int]:
    """Ids that end a sequence, of a checkpoint of any architecture, also one that a `ModelConfig` can't describe."""
    if source.format == "gguf":
        return _gguf_eos(source.gguf)
    generation = source.read_json("generation_config.json") or {}
    return _hf_eos(Fields(generation, "generation_config.json")) or _hf_eos(Fields(source.config, "config.json"))


def from_hf(config: Mapping[str, object], generation: Mapping[str, object]) -> ModelConfig:
    """config: config.json; generation: generation_config.json, or empty."""
    fields = Fields(config, "config.json")
    family = _hf_family(fields)
    _refuse_hf_variants(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings")
    theta, scaling = _hf_rope(fields, max_positions)
    has_bias = fields.flag("attention_bias", False) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if family == "llama" else None),
        head_dim=fields.integer("head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // max(num_heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", _RMS_NORM_EPS),
        rope_theta=theta,
        rope_scaling=scaling,
        has_rope_factors=False,
        max_position_embeddings=max_positions,
        sliding_window=_hf_window(fields, family),
        is_tied=fields.flag("tie_word_embeddings", False),
        has_qkv_bias=has_bias or family == "qwen2",
        has_o_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias", False) and family == "llama",
        has_qk_norm=family == "qwen3",
        eos_token_ids=_hf_eos(Fields(generation, "generation_config.json")) or _hf_eos(fields),
        quantization=read_quantization(fields.nested("quantization_config")),
    )


def from_gguf(header: GgufHeader) -> ModelConfig:
    name = header.text("general.architecture") or "(none)"
    if name not in GGUF_ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {name!r} is not supported; these are: {', '.join(GGUF_ARCHITECTURES)}")
    fields = Fields(
        {key.removeprefix(f"{name}."): value for key, value in header.metadata.items()}, f"the GGUF metadata of {name}"
    )
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // max(num_heads, 1))
    _refuse_gguf_variants(fields, head_dim)
    return ModelConfig(
        family=GGUF_ARCHITECTURES[name],
        vocab_size=_gguf_vocab_size(tensors),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", _ROPE_THETA),
        rope_scaling=None,
        has_rope_factors="rope_freqs.weight" in tensors,
        max_position_embeddings=fields.integer("context_length"),
        sliding_window=fields.integer("attention.sliding_window", 0) or None,
        is_tied="output.weight" not in tensors,
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_o_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in tensors,
        has_qk_norm="blk.0.attn_q_norm.weight" in tensors,
        eos_token_ids=_gguf_eos(header),
    )


def to_hf(config: ModelConfig) -> dict[str, object]:
    """The config.json that `from_hf` reads back as the same. Not for one with RoPE factors of its own, which
    config.json has no place for."""
    assert not config.has_rope_factors
    architecture = next(name for name, family in HF_ARCHITECTURES.items() if family == config.family)
    scaling = config.rope_scaling
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **asdict(scaling)},
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_o_bias,
        "mlp_bias": config.has_mlp_bias,
        "eos_token_id": sorted(config.eos_token_ids),
    }


def _hf_family(fields: Fields) -> Family:
    names = fields.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in HF_ARCHITECTURES:
        return HF_ARCHITECTURES[name]
    raise ConfigError(f"architecture {name!r} is not supported; these are: {', '.join(HF_ARCHITECTURES)}")


def _refuse_hf_variants(fields: Fields) -> None:
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; only silu is")
    layer_types = fields.values.get("layer_types")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"} if isinstance(layer_types, list) else set()
    if unknown:
        raise ConfigError(
            f"layer type {min(map(str, unknown))!r} is not supported; full_attention and sliding_attention are"
        )


def _hf_rope(fields: Fields, max_positions: int) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling: transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling."""
    rope = fields.nested("rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise ConfigError(f"{rope.where} differs by layer, which is not supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", _ROPE_THETA))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1:
        raise ConfigError(f"partial_rotary_factor {partial} is not supported: RoPE must turn whole heads")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"RoPE type {kind!r} is not supported; default and llama3 are")
    return theta, Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_positions),
    )


def _hf_window(fields: Fields, family: Family) -> int | None:
    if family == "llama":
        return None
    if family == "mistral":
        is_absent = "sliding_window" not in fields.values
        return _MISTRAL_WINDOW if is_absent else fields.integer("sliding_window", 0) or None
    return fields.integer("sliding_window", 0) or None if fields.flag("use_sliding_window", False) else None


def _hf_eos(fields: Fields) -> frozenset[int]:
    value = fields.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"eos_token_id in {fields.where} must be an integer or a list of them, not {value!r}")
    return frozenset(ids)


def _refuse_gguf_variants(fields: Fields, head_dim: int) -> None:
    scaling = fields.values.get("rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(
            f"RoPE scaling {scaling!r} is not supported in a GGUF file; none and Llama 3's rope_freqs are"
        )
    num_experts = fields.integer("expert_count", 0)
    if num_experts:
        raise ConfigError(
            f"the checkpoint is a mixture of {num_experts} experts, which is not supported; dense models are"
        )
    turned = fields.integer("rope.dimension_count", head_dim)
    if turned != head_dim or fields.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"heads whose RoPE covers {turned} of {head_dim} dimensions, or whose values have another size, "
            "are not supported"
        )


def _gguf_vocab_size(tensors: Mapping[str, tuple[int, ...]]) -> int:
    shape = tensors.get("token_embd.weight", ())
    if len(shape) != 2:
        raise ConfigError("the GGUF file has no matrix token_embd.weight")
    return shape[1]


def _gguf_eos(header: GgufHeader) -> frozenset[int]:
    """Ids for the end of a sequence, a turn and a message, as far as the file names them."""
    found = (header.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return frozenset(token_id for token_id in found if token_id is not None)
