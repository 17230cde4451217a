"""Time to ready: a checkpoint of Llama-3.1-8B's shape in AutoAWQ's layout, random, is written, then loaded as a replica
loads one, its file in the page cache."""

import json
import math
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.gpu.rows import Rows
from bench.gpu.steps.shapes import Bench, bench_for
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport

PER_INT = 8


def write_checkpoint(bench: Bench, folder: Path) -> int:
    """The checkpoint in a Hugging Face directory; returns its bytes."""
    config, group = bench.config, bench.group_size
    torch.manual_seed(5)
    tensors: dict[str, Tensor] = {}
    dtype = torch.bfloat16
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(config.vocab_size, config.hidden_size, device=bench.device).to(dtype).cpu()
    tensors["model.norm.weight"] = torch.ones(config.hidden_size, dtype=dtype)
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    matrices = {
        "self_attn.q_proj": (hidden, heads), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=dtype)
        for name, (inputs, outputs) in matrices.items():
            tensors |= {
                f"{prefix}.{name}.{part}": tensor for part, tensor in _packed(inputs, outputs, group, bench).items()
            }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_settings(bench)), encoding="utf-8")
    return sum(tensor.nbytes for tensor in tensors.values())


def _packed(inputs: int, outputs: int, group: int, bench: Bench) -> dict[str, Tensor]:
    """A linear layer in AutoAWQ's GEMM layout (`penstock.workers.compute.quant.awq`)."""

    def words(rows: int) -> Tensor:
        drawn = torch.randint(-(2**31), 2**31 - 1, (rows, outputs // PER_INT), device=bench.device)
        return drawn.to(torch.int32).cpu()

    scales = torch.full((inputs // group, outputs), math.pow(inputs, -0.5) / 8, dtype=torch.float16)
    return {"qweight": words(inputs), "qzeros": words(inputs // group), "scales": scales}


def _settings(bench: Bench) -> dict[str, object]:
    config = bench.config
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta, "eos_token_id": 2,
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": bench.group_size, "zero_point": True, "version": "gemm",
        },
    }  # fmt: skip


def run(rows: Rows, *, is_check: bool) -> bool:
    """Seconds from the call of the loader until the engine serves."""
    bench = bench_for(is_check=is_check)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-model-") as text:
        folder = Path(text)
        num_bytes = write_checkpoint(bench, folder)
        rows.add("a random checkpoint in AutoAWQ's layout", num_bytes / 2**30, None, "GiB")
        settings = EngineConfig(
            device="cpu" if is_check else "cuda",
            kv_memory_bytes=2**20 if is_check else "auto",
            max_num_seqs=8 if is_check else 256,
            max_batched_tokens=64 if is_check else 2048,
        )
        begun_s = time.perf_counter()
        runner = load_runner(ModelSource("safetensors", folder, "random"), settings)
        loaded_s = time.perf_counter() - begun_s
        rows.add(
            "loading it: weights on the device, memory measured, graphs captured, steps warmed", loaded_s, None, "s"
        )
        rows.add("tokens of its KV cache", runner.num_blocks * settings.block_size, None, "tokens")
        engine = Engine(runner, settings, ChainHasher(bytes(32), settings.block_size), _drop)
        engine.start()
        rows.add("time to ready, the file in the page cache", time.perf_counter() - begun_s, None, "s")
        engine.stop()
    return True


def _drop(_report: StepReport) -> None:
    """Nobody asks anything."""
