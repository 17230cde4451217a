"""Adapters as peft writes them, with random weights in both matrices (peft itself starts with B at zero, where mistakes
would not show)."""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(
    model: PreTrainedModel,
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    size: float = 0.1,
    **options: Any,
) -> Any:
    """The model with an adapter, which is saved to `folder`. size: spread of its weights. The model is changed: give
    each adapter its own."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM", **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's and transformers' own
        found = peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if "magnitude" in name:  # of DoRA: at first the lengths of the base's rows
                    parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
                elif "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
        found.save_pretrained(folder)
    return found.eval()
