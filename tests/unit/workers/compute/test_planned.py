from pathlib import Path

import msgspec
import pytest
from gguf import GGMLQuantizationType

from penstock.base.errors import ConfigError
from penstock.perf.planning.formats import (
    BF16,
    FP8,
    INT4,
    INT8,
    Head,
    held_on_cpu,
    matrix_bytes,
    scale_bytes,
    table_bytes,
    weight_bytes,
)
from penstock.perf.planning.known import known_shape
from penstock.text.source import ModelSource, resolve
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.model_config import from_hf, read_config
from penstock.workers.compute.models.fused import load_for
from penstock.workers.compute.planned import check_fits, format_of, least_of, plan_checkpoint
from penstock.workers.config import EngineConfig
from tests.unit.workers.tiny_models import tiny_model, written_as_gguf

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture
def oversized(tmp_path: Path) -> ModelSource:
    """A checkpoint of 70 billion parameters whose file of weights has none: whoever reads one fails otherwise."""
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(LLAMA_70B))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return resolve(str(tmp_path))


def test_a_checkpoint_of_70b_is_planned_from_its_configuration_alone(oversized: ModelSource) -> None:
    planned = plan_checkpoint(oversized)

    known = known_shape("llama-3-70b")
    assert known is not None
    assert planned.shape.num_params == known.num_params
    assert planned.form is BF16


def test_an_oversized_model_is_refused_before_a_tensor_is_read(oversized: ModelSource) -> None:
    with pytest.raises(ConfigError, match="can't fit, so no weight is read") as caught:
        load_runner(oversized, EngineConfig())

    told = str(caught.value)
    assert "takes 141.6 GB" in told
    assert "136.9 GB for the layers' weights in bf16" in told
    assert "0.54 GB for keys and values" in told


def test_the_refusal_says_what_would_fit(oversized: ModelSource) -> None:
    engine = EngineConfig(device="cuda")
    least = least_of(oversized, read_config(oversized), engine)

    with pytest.raises(ConfigError) as caught:
        check_fits(least, 80 * 10**9, engine, "the GPU")

    assert str(caught.value).endswith(
        "the GPU with engine.memory_share: 0.9 has 72.0 GB. What would fit: the model in 4 bits, 38.6 GB "
        "(penstock quantize); engine.tensor_parallel_size: 2, on as many GPUs."
    )


def test_a_kv_cache_that_is_too_large_is_told_its_size(oversized: ModelSource) -> None:
    engine = EngineConfig(device="cuda", kv_memory_bytes=10**12)
    least = least_of(oversized, read_config(oversized), engine)

    with pytest.raises(ConfigError, match=r"a KV cache of 8.89 GB at most"):
        check_fits(least, 150 * 10**9, engine, "the GPU")


def test_what_fits_is_not_refused(oversized: ModelSource) -> None:
    engine = EngineConfig(device="cuda", tensor_parallel_size=2)
    least = least_of(oversized, read_config(oversized), engine)

    check_fits(least, 80 * 10**9, engine, "the GPU")

    assert 70e9 < least.num_bytes < 72e9


@pytest.mark.slow
def test_the_demo_model_is_planned_as_the_kernels_hold_it() -> None:
    source = resolve("demo")
    config = read_config(source)
    planned = plan_checkpoint(source, config)
    import torch  # noqa: PLC0415 (the comparison alone needs it)

    held = load_for(source, config, EngineConfig(), torch.bfloat16, torch.device("cpu"))
    num_bytes = sum(weight.nbytes for weight in held.values())

    assert planned.form == INT4._replace(group=32)
    found = weight_bytes(planned.shape, held_on_cpu(planned.form), planned.head)
    assert found == pytest.approx(num_bytes, rel=0.001)
    assert found <= num_bytes


FALLEN_BACK = {
    f"blk.{layer}.{name}.weight": GGMLQuantizationType.Q8_0 for layer in (0, 1) for name in ("attn_v", "ffn_down")
}
"""Where matrices are in Q5_0 because their rows are no multiple of 256, these are in Q8_0."""


@pytest.mark.parametrize(("head", "dtype"), [("auto", "bfloat16"), ("keep", "bfloat16"), ("auto", "float32")])
@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("Q5_0", FALLEN_BACK),
        ("Q5_0", {"blk.1.ffn_down.weight": GGMLQuantizationType.Q4_0}),
        ("Q5_0", {"blk.0.attn_v.weight": GGMLQuantizationType.Q8_0}),
        ("Q5_0", {"token_embd.weight": GGMLQuantizationType.Q8_0}),
        ("Q5_0", {"output.weight": GGMLQuantizationType.Q4_0}),
        ("Q8_0", {"output.weight": GGMLQuantizationType.Q4_1, "blk.0.ffn_down.weight": GGMLQuantizationType.Q4_0}),
        ("Q4_0", {"output.weight": GGMLQuantizationType.Q5_0, "blk.0.attn_v.weight": GGMLQuantizationType.Q5_0}),
        ("Q5_0", {}),
        ("Q4_1", {}),
        ("F16", {}),
    ],
)
def test_a_gguf_file_of_several_types_is_never_planned_as_more_than_is_held(
    kind: str, kinds: dict[str, GGMLQuantizationType], head: Head, dtype: str, tmp_path: Path
) -> None:
    import torch  # noqa: PLC0415 (the comparison alone needs it)

    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType[kind], kinds=kinds)
    config, engine = read_config(source), EngineConfig(lm_head=head)
    least = least_of(source, config, engine, is_float32=dtype == "float32")

    held = load_for(source, config, engine, getattr(torch, dtype), torch.device("cpu"))

    tables = sum(weight.nbytes for name, weight in held.items() if name in ("embed", "lm_head"))
    layers = sum(weight.nbytes for name, weight in held.items() if name.startswith("layers.") and "norm" not in name)
    planned = matrix_bytes(least.shape, least.form) + scale_bytes(least.shape, least.form)
    assert planned <= layers * (1 + 1e-9)
    assert planned >= 0.99 * layers or dtype == "float32"  # without bfloat16 some files are held dequantized
    assert table_bytes(least.shape, least.form, least.head) <= tables


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        (None, BF16),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, INT4._replace(group=64)),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
            },
            INT8._replace(group=None),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "a": {
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                    }
                },
            },
            FP8,
        ),
    ],
)
def test_the_format_is_that_of_the_configuration(quantization: object, form: object) -> None:
    assert format_of(from_hf({**LLAMA_70B, "quantization_config": quantization}, {})) == form


def test_a_gguf_file_of_several_types_is_named_by_its_formats_and_its_tables_are_rounded(tmp_path: Path) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q5_0, kinds=FALLEN_BACK)

    planned = plan_checkpoint(source)

    assert planned.form.name == "bf16 and int8"
    assert 8 < planned.form.bits < 16
    assert planned.head == "int8"
    assert plan_checkpoint(source, head="keep").head == "keep"
