"""A tiny model with random weights, with the demo model's tokenizer: it computes as a real one does, in a millisecond a
step. And adapters for it."""

import warnings
from pathlib import Path

from penstock.text.export import save_tokenizer
from penstock.text.source import DEMO, resolve
from penstock.text.tokenizer import load_tokenizer

MAX_LEN = 2048
"""Context, in tokens."""


def write_checkpoint(folder: Path, num_layers: int = 2) -> None:
    """A Llama of so many layers, as transformers saves it."""
    import torch  # noqa: PLC0415 (seconds that only this needs)
    import transformers  # noqa: PLC0415

    source = resolve(DEMO)
    config = transformers.LlamaConfig(
        vocab_size=load_tokenizer(source).vocab_size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + ("norm" in name))
    model.save_pretrained(folder)
    save_tokenizer(source, folder)


def write_adapter(checkpoint: Path, folder: Path) -> None:
    """A random adapter of rank 4 for the attention of the model in `checkpoint`, as peft saves it."""
    import peft  # noqa: PLC0415 (seconds that only this needs)
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's and transformers' own
        model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        adapted.save_pretrained(str(folder))
