"""config.json and GGUF metadata: what they declare, and the sentence for what is not supported."""

import dataclasses
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.text.gguf_header import GgufHeader, TensorInfo, Value
from penstock.workers.compute.model_config import Llama3Scaling, ModelConfig, from_gguf, from_hf
from penstock.workers.compute.quantization_config import FloatQuantized, PackQuantized

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
}


def hf(
    architecture: str = "LlamaForCausalLM", generation: dict[str, Any] | None = None, without: str = "", **changes: Any
) -> ModelConfig:
    config = LLAMA | {"architectures": [architecture]} | changes
    config.pop(without, None)
    return from_hf(config, generation or {})


def test_a_llama_3_config_is_read_in_full() -> None:
    assert hf() == ModelConfig(
        family="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
        num_kv_heads=8, head_dim=64, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0,
        8192), has_rope_factors=False, max_position_embeddings=131072, sliding_window=None, is_tied=True,
        has_qkv_bias=False, has_o_bias=False, has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({128001,
        128008, 128009}),
    )  # fmt: skip


def test_the_form_that_transformers_5_writes_means_the_same() -> None:
    rope = {"rope_theta": 500000.0} | LLAMA["rope_scaling"]

    assert hf(rope_scaling=None, rope_theta=None, rope_parameters=rope) == hf()


def test_an_old_llama_has_as_many_key_heads_as_heads_and_divides_the_hidden_size() -> None:
    config = hf(num_key_value_heads=None, head_dim=None, rope_scaling=None, rope_theta=None)

    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rope_scaling) == (32, 64, 10000.0, None)


def test_qwen2_has_biases_on_queries_keys_and_values_only() -> None:
    config = hf("Qwen2ForCausalLM", rope_scaling=None)

    assert (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias, config.has_qk_norm) == (
        True,
        False,
        False,
        False,
    )


def test_qwen3_has_norms_and_a_head_size_of_its_own() -> None:
    config = hf("Qwen3ForCausalLM", head_dim=None, rope_scaling=None)

    assert (config.head_dim, config.has_qk_norm, config.has_qkv_bias) == (128, True, False)


def test_generation_config_decides_where_a_sequence_ends() -> None:
    assert hf(generation={"eos_token_id": [151645, 151643]}).eos_token_ids == {151645, 151643}
    assert hf(generation={}, eos_token_id=7).eos_token_ids == {7}
    assert hf(eos_token_id=None).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"architecture": "MistralForCausalLM", "sliding_window": None}, 131072),
        ({"architecture": "MistralForCausalLM", "sliding_window": 1000}, 1000),
        ({"architecture": "MistralForCausalLM"}, 4096),
        ({"architecture": "Qwen2ForCausalLM", "sliding_window": 1000, "use_sliding_window": False}, 131072),
        ({"architecture": "Qwen2ForCausalLM", "sliding_window": 1000, "use_sliding_window": True}, 1000),
        ({"sliding_window": 1000}, 131072),
    ],
)
def test_a_sliding_window_bounds_the_context_where_the_family_uses_it(changes: dict[str, Any], context: int) -> None:
    assert hf(**changes).max_full_context == context


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architecture": "GemmaForCausalLM"},
            "GemmaForCausalLM.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": None}, "architecture None is not supported"),
        ({"architectures": []}, "architecture None is not supported"),
        ({"architectures": [{"nested": 1}]}, "is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only silu"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "RoPE type 'linear' is not supported; default and llama3 are",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "RoPE type 'dynamic'"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "RoPE type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling of config.json has no low_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized .'gptq'.*AWQ.*compressed-tensors.*GGUF"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantized .'bitsandbytes'.*which is not supported",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantized .'fp8'.*which is not supported",
        ),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "AWQ with 4 bits, version 'gemv'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 8}}, "AWQ with 8 bits"),
        ({"quantization_config": {"quant_method": "awq", "group_size": -1}}, "group_size -1"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer type 'linear_attention'"),
        ({"without": "hidden_size"}, "config.json has no hidden_size"),
        ({"hidden_size": "big"}, "hidden_size in config.json must be an integer, not 'big'"),
        ({"hidden_size": True}, "hidden_size in config.json must be an integer"),
        ({"rope_scaling": "linear"}, "rope_scaling in config.json must be an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings in config.json must be true or false"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps in config.json must be a number"),
        ({"eos_token_id": "</s>"}, "eos_token_id in config.json must be an integer or a list"),
        ({"num_attention_heads": 0}, "num_heads must be at least 1"),
        ({"num_key_value_heads": 5}, "32 attention heads can't share 5"),
        ({"head_dim": 63}, "head_dim must be even"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hf(**changes)


def compressed(scheme: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """quantization_config of a checkpoint by llm-compressor; `changes` of its weights."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, **(scheme or {})}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, PackQuantized(4, 128, True)),
        ({"symmetric": False, "group_size": 32}, PackQuantized(4, 32, False)),
        ({"strategy": None, "actorder": "weight"}, PackQuantized(4, 128, True)),
        ({"num_bits": 8, "strategy": "channel", "group_size": None}, PackQuantized(8, None, True)),
        ({"strategy": None, "group_size": -1}, PackQuantized(4, None, True)),
        ({"scheme": {"format": "pack-quantized"}}, PackQuantized(4, 128, True)),
    ],
)
def test_what_compressed_tensors_says_is_understood(changes: dict[str, Any], wanted: PackQuantized) -> None:
    assert hf(quantization_config=compressed(**changes)).quantization == wanted


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        (
            compressed() | {"format": "int-quantized"},
            "in the format 'int-quantized' is not supported; 'pack-quantized' is",
        ),
        (compressed({"format": "nvfp4-pack-quantized"}), "in the format 'nvfp4-pack-quantized'"),
        (compressed({"input_activations": {"num_bits": 8}}), "with quantized activations"),
        (compressed(num_bits=8, symmetric=False), "with asymmetric weights of 8 bits"),
        (compressed(num_bits=3), "with symmetric weights of 3 bits, type 'int', is not supported; 4 bits"),
        (compressed(type="float"), "type 'float'"),
        (compressed(actorder="group"), "actorder 'group'"),
        (compressed(strategy="tensor", group_size=None), "strategy 'tensor' and group_size 0"),
        (compressed(strategy=None, group_size=None), "strategy 'tensor'"),
        (compressed(strategy="channel"), "strategy 'channel' and group_size 128"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (compressed() | {"config_groups": {}}, "with 0 kinds of quantized weights"),
        (
            compressed()
            | {
                "config_groups": {
                    "a": compressed()["config_groups"]["group_0"],
                    "b": compressed(group_size=32)["config_groups"]["group_0"],
                }
            },
            "with 2 kinds",
        ),
    ],
)
def test_what_compressed_tensors_can_do_beyond_is_refused_with_a_sentence(
    quantization: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hf(quantization_config=quantization)


def float8(weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None, **scheme: Any) -> Any:
    """quantization_config of an FP8_DYNAMIC checkpoint, changed."""
    group = {
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"} | (weights or {}),
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        | (activations or {}),
    } | scheme
    return compressed() | {"format": "float-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantization", "rounds_activations"),
    [(float8(), True), (float8({"strategy": "tensor"}), True), (float8(input_activations=None), False)],
)
def test_8_bit_floats_of_compressed_tensors_are_understood(quantization: Any, rounds_activations: bool) -> None:
    assert hf(quantization_config=quantization).quantization == FloatQuantized(rounds_activations)


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        (float8({"strategy": "block"}), "strategy 'block' is not supported; symmetric ones of 8 bits"),
        (float8({"num_bits": 4}), "float-quantized weights of 4 bits"),
        (float8({"type": "int"}), "type 'int'"),
        (float8({"symmetric": False}), "is not supported; symmetric ones"),
        (float8(activations={"dynamic": False, "strategy": "tensor"}), "strategy 'tensor', static, is not supported"),
        (float8(activations={"num_bits": 4}), "activations of 4 bits"),
        (float8(output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_8_bit_floats_beyond_that_are_refused_with_a_sentence(quantization: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hf(quantization_config=quantization)


@pytest.mark.parametrize(
    "key", [key for key in LLAMA if isinstance(LLAMA[key], int) and not isinstance(LLAMA[key], bool)]
)
def test_a_missing_key_has_a_default_or_a_sentence(key: str) -> None:
    try:
        hf(without=key)
    except ConfigError as error:
        assert f"has no {key}" in error.message  # noqa: PT017 (either outcome is right, never a KeyError)


GGUF: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 160,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.eos_token_id": 2,
}


def gguf(tensors: tuple[str, ...] = (), without: str = "", **changes: Value) -> ModelConfig:
    metadata = GGUF | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata.pop(without, None)
    names = {"token_embd.weight": (64, 96)} | dict.fromkeys(tensors, (64,))
    return from_gguf(GgufHeader(metadata, tuple(TensorInfo(name, shape, 0, 0) for name, shape in names.items()), 0))


def test_gguf_metadata_are_read_in_full() -> None:
    assert gguf() == ModelConfig(
        family="llama", vocab_size=96, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
        max_position_embeddings=512, sliding_window=None, is_tied=True, has_qkv_bias=False, has_o_bias=False,
        has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({2}),
    )  # fmt: skip


def test_the_tensors_of_a_gguf_file_tell_what_metadata_leave_out() -> None:
    names = (
        "output.weight",
        "rope_freqs.weight",
        "blk.0.attn_q.bias",
        "blk.0.attn_output.bias",
        "blk.0.ffn_gate.bias",
        "blk.0.attn_q_norm.weight",
    )

    found = gguf(names)

    assert found == dataclasses.replace(
        gguf(),
        is_tied=False,
        has_rope_factors=True,
        has_qkv_bias=True,
        has_o_bias=True,
        has_mlp_bias=True,
        has_qk_norm=True,
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope__scaling__type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"expert_count": 8}, "mixture of 8 experts"),
        ({"rope__dimension_count": 8}, "covers 8 of 16 dimensions"),
        ({"attention__value_length": 8}, "values have another size"),
        ({"without": "llama.block_count"}, "the GGUF metadata of llama has no block_count"),
        ({"block_count": "two"}, "block_count in the GGUF metadata of llama must be an integer"),
        ({"without": "general.architecture"}, "GGUF architecture .* is not supported; these are: llama, qwen2, qwen3"),
    ],
)
def test_a_gguf_file_that_is_not_supported_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        gguf(**changes)


def test_a_gguf_file_without_an_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no matrix token_embd.weight"):
        from_gguf(GgufHeader(GGUF, (), 0))
