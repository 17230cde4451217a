"""`penstock quantize`: from a checkpoint and some text to a 4-bit checkpoint, and what it cost in perplexity."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource, resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.llama import Llama
from penstock.workers.compute.quant import awq
from penstock.workers.compute.quant.quantized import Matrix, TorchQuantizedMatrix, quantize
from penstock.workers.compute.weights import load_weights
from penstock.workers.quantize.calibrate import LINEAR, QuantizedLayer, Weights, quantize_awq
from penstock.workers.quantize.checkpoint import write_checkpoint
from penstock.workers.quantize.partial_checkpoint import Recipe, refuse_taken
from penstock.workers.quantize.perplexity import perplexity

WINDOW = 512
"""Tokens of a calibration sequence, as far as the model's context goes."""
EVALUATION_WINDOW = 1024
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    out: Path
    calibration: str
    """Text whose tokens are the calibration sequences."""
    group_size: int = 128
    sequences: int = 32
    """Calibration sequences of WINDOW tokens, at most."""


def quantize_checkpoint(plan: Plan, on_layer: Callable[[int, int], None]) -> None:
    """Make the checkpoint. on_layer: called with the number of layers done and that of all; the first time with the
    layers that an earlier run with the same plan left.

    Raises ConfigError with a sentence; `out` is then as it was, and what was done is kept beside it for the next run.
    """
    refuse_taken(plan.out)
    source = resolve(plan.model)
    config = _quantizable(source, plan.group_size)
    texts = calibration_sequences(
        load_tokenizer(source), plan.calibration, plan.sequences, min(WINDOW, config.max_full_context)
    )
    recipe = Recipe(
        model=source.digest,
        calibration=hashlib.sha256(torch.stack(texts).numpy().tobytes()).hexdigest(),
        group_size=plan.group_size,
    )
    load = partial(dense_weights, source, config)

    def layers(first: int) -> Iterator[QuantizedLayer]:
        on_layer(first, config.num_layers)
        for layer in quantize_awq(load, config, texts, plan.group_size, first):
            yield layer
            on_layer(layer.index + 1, config.num_layers)

    with torch.inference_mode():
        write_checkpoint(plan.out, source, config, recipe, layers, load)


def plain_group_size(model: str, group_size: int) -> int | None:
    """The largest group size up to `group_size` that divides the columns of every matrix, so that all readers of
    AutoAWQ's format take the checkpoint. Returns None if there is no such size. Raises ConfigError."""
    columns = [columns for _, columns in read_config(resolve(model)).linear_shapes.values()]
    return next(
        (size for size in reversed(GROUP_SIZES) if size <= group_size and not any(count % size for count in columns)),
        None,
    )


def calibration_sequences(tokenizer: Tokenizer, text: str, count: int, length: int = WINDOW) -> list[Tensor]:
    """The first `count` whole sequences of `length` tokens. Raises ConfigError for a text that holds none."""
    if count < 1:
        raise ConfigError(f"at least 1 calibration sequence is needed, not {count}")
    ids = tokenizer.encode(text, False)[: count * length]
    if len(ids) < length:
        raise ConfigError(
            f"the calibration text has {len(ids)} tokens; at least {length} are needed, some ten thousand are better"
        )
    return list(torch.tensor(ids[: len(ids) // length * length]).view(-1, length))


def evaluation_tokens(model: str, text: str, max_tokens: int) -> Tensor:
    """int64 ids of the first `max_tokens` tokens of a text. Raises ConfigError."""
    ids = torch.tensor(load_tokenizer(resolve(model)).encode(text, False)[:max_tokens], dtype=torch.int64)
    if len(ids) < 2:
        raise ConfigError(f"the evaluation text has {len(ids)} tokens; at least 2 are needed")
    return ids


def model_perplexity(
    model: str, token_ids: Tensor, dtype: torch.dtype = torch.bfloat16, *, group_size: int | None = None
) -> float:
    """Perplexity of a checkpoint over tokens. group_size: the layers' matrices are rounded to nearest in 4 bits by
    groups of so many columns; None: they are as the checkpoint has them. Raises ConfigError."""
    source = resolve(model)
    config = read_config(source)
    weights = (
        load_weights(source, config, dtype)
        if group_size is None
        else _round(source, _quantizable(source, group_size), dtype, group_size)
    )
    window = min(EVALUATION_WINDOW, config.max_full_context)
    return perplexity(Llama(config, weights, window, torch.get_num_threads(), exact=False), dtype, token_ids, window)


def dense_weights(source: ModelSource, config: ModelConfig, prefix: str = "") -> Weights:
    """Float32 parameters of a checkpoint that is not quantized, whose names begin with `prefix`."""
    loaded: dict[str, Matrix] = load_weights(source, config, torch.float32, prefix)
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def _round(source: ModelSource, config: ModelConfig, dtype: torch.dtype, group_size: int) -> dict[str, Matrix]:
    found: dict[str, Matrix] = {}
    for prefix in ("embed", "norm", "lm_head", *(f"layers.{index}." for index in range(config.num_layers))):
        for name, value in dense_weights(source, config, prefix).items():
            is_matrix = name.rpartition(".")[2] in LINEAR
            found[name] = TorchQuantizedMatrix(quantize(value, group_size), dtype) if is_matrix else value.to(dtype)
    return found


def _quantizable(source: ModelSource, group_size: int) -> ModelConfig:
    config = read_config(source)
    if config.quantization is not None:
        raise ConfigError(f"{source.name} is quantized already")
    if config.has_rope_factors:
        raise ConfigError(
            f"{source.name} brings RoPE factors of its own (a GGUF form of Llama 3), which config.json has no place "
            "for; quantize its safetensors"
        )
    if group_size not in GROUP_SIZES:
        raise ConfigError(
            f"group size {group_size} is not supported; "
            f"{', '.join(map(str, GROUP_SIZES[:-1]))} and {GROUP_SIZES[-1]} are"
        )
    for name, (rows, _) in config.linear_shapes.items():
        if rows % awq.PER_INT:
            raise ConfigError(
                f"{source.name} can't be kept in AWQ's layout, which packs outputs by {awq.PER_INT}: "
                f"its {name} has {rows}"
            )
    return config
