"""`penstock quantize`: from a checkpoint and some text to a 4-bit checkpoint, with what it cost in perplexity."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from penstock.text.source import ModelSource, resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.wire.errors import ConfigError
from penstock.workers.models.config import ModelConfig, read_config
from penstock.workers.models.llama import Llama
from penstock.workers.quant.calibrate import QuantizedLayer, Weights, quantize_awq, quantize_rtn
from penstock.workers.quant.checkpoint import write_checkpoint
from penstock.workers.quant.int4 import Matrix
from penstock.workers.quant.perplexity import perplexity
from penstock.workers.weights import load_weights

WINDOW = 512
"""Tokens of a calibration sequence."""
EVALUATION_WINDOW = 1024

Method = Literal["awq", "rtn"]


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    out: Path
    calibration: str
    """Text."""
    group_size: int = 128
    sequences: int = 32
    """At most so many of WINDOW tokens are used."""
    method: Method = "awq"
    """rtn: round to nearest, without calibration."""


def quantize_checkpoint(plan: Plan, on_layer: Callable[[int, int], None]) -> None:
    """on_layer: told the number of layers done, and of all. Raises ConfigError with a sentence."""
    source = resolve(plan.model)
    config = _quantizable(source, plan.group_size)
    texts = calibration_sequences(load_tokenizer(source), plan.calibration, plan.sequences)
    weights = dense_weights(source, config)
    with torch.inference_mode():
        layers = quantize_awq(weights, config, texts, plan.group_size) if plan.method == "awq" else quantize_rtn(weights, config, plan.group_size)
        write_checkpoint(plan.out, source, config, weights, _told(layers, config.num_layers, on_layer), plan.group_size)


def model_perplexity(model: str, text: str, max_tokens: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Of a checkpoint over the first max_tokens of a text. Raises ConfigError."""
    source = resolve(model)
    config = read_config(source)
    ids = torch.tensor(load_tokenizer(source).encode(text, False)[:max_tokens])
    if len(ids) < 2:
        raise ConfigError("the evaluation text has less than two tokens")
    window = min(EVALUATION_WINDOW, config.max_full_context)
    llama = Llama(config, load_weights(source, config, dtype), window, torch.get_num_threads(), exact=False)
    return perplexity(llama, dtype, ids, window)


def calibration_sequences(tokenizer: Tokenizer, text: str, count: int) -> list[Tensor]:
    """The first `count` whole sequences of WINDOW tokens. Raises ConfigError for a text that holds none."""
    ids = tokenizer.encode(text, False)[: count * WINDOW]
    if len(ids) < WINDOW:
        raise ConfigError(f"the calibration text has {len(ids)} tokens; at least {WINDOW} are needed, some ten thousand are better")
    return list(torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW))


def dense_weights(source: ModelSource, config: ModelConfig) -> Weights:
    """Float32."""
    loaded: dict[str, Matrix] = load_weights(source, config, torch.float32)
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def _quantizable(source: ModelSource, group_size: int) -> ModelConfig:
    config = read_config(source)
    if config.quantization is not None:
        raise ConfigError(f"{source.name} is quantized already")
    if config.has_rope_factors:
        raise ConfigError(
            f"{source.name} brings RoPE factors of its own (a GGUF form of Llama 3), which config.json has no place for; quantize its safetensors"
        )
    if group_size not in (32, 64, 128):
        raise ConfigError(f"group size {group_size} is not supported; 32, 64 and 128 are")
    return config


def _told(layers: Iterator[QuantizedLayer], count: int, on_layer: Callable[[int, int], None]) -> Iterator[QuantizedLayer]:
    for layer in layers:
        yield layer
        on_layer(layer.index + 1, count)
