"""The demo model with dense bfloat16 weights, in Hugging Face's form: what its file of 4 bits says, dequantized."""

from pathlib import Path

from penstock.text.export import save_tokenizer
from penstock.text.source import DEMO, resolve


def write_bf16_checkpoint(folder: Path) -> None:
    """Write it; needs transformers and gguf, and seconds."""
    import torch  # noqa: PLC0415 (seconds that only this needs)
    import transformers  # noqa: PLC0415

    source = resolve(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.bfloat16
    )
    # transformers counts it as quantized still, and would not save it
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(source, folder)
