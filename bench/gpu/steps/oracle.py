"""The engine beside transformers: random checkpoints of each family, saved by transformers, loaded as a replica loads
them, in float32. Greedy tokens are compared, and where they part, how near the tie was."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.rows import Rows
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import AdapterSlots, EngineConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 64}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
}
PROMPT_TOKENS, OUTPUT_TOKENS = 150, 24
CHUNK = 64
"""Prompt tokens of a step."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "kv_memory_bytes": 16 * 2**20, "max_num_seqs": 1, "max_batched_tokens": CHUNK,
    "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS, "adapters": AdapterSlots(slots=0),
}  # fmt: skip
"""Settings of an engine for one short sequence: what a replica records and warms for hundreds is not looked at here."""
NEAR_TIE = 1e-3
"""Difference of two logits up to which either token is right."""


def write(family: str, folder: Path) -> Any:
    """A random model of the family, saved; the model itself is returned."""
    import transformers  # noqa: PLC0415 (the step is left out where it is not installed)

    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES, **changes)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in parameter_name else 0.08
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in parameter_name))
    model.save_pretrained(folder)
    return model.eval()


def decode(runner: TorchRunner, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens: the prompt in pieces, then one token a step."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    blocks = list(range(-(-(len(prompt) + num_tokens) // 16), 0, -1))
    seq = Sequence("r", list(prompt), sampling, len(prompt), [], b"", 0.0, block_table=blocks)
    while seq.num_output_tokens < num_tokens:
        count = min(CHUNK, seq.num_tokens - seq.num_computed_tokens)
        (chosen,) = runner.launch(Step([Chunk(seq, seq.num_computed_tokens, count)], []))()
        seq.num_computed_tokens += count
        seq.token_ids += [choice.token_id for choice in chosen]
    return seq.token_ids[len(prompt) :]


def decode_as_transformers(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens of the oracle, whatever they end, and the logits that each was chosen from."""
    token_ids, found = list(prompt), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            found.append(model(torch.tensor([token_ids])).logits[0, -1])
            token_ids.append(int(found[-1].argmax()))
    return token_ids[len(prompt) :], found


def gap(logits: list[Tensor], expected: list[int], got: list[int]) -> float:
    """Difference by which the oracle prefers its token to ours where they first part; 0 where they do not."""
    for own, mine, yours in zip(logits, got, expected, strict=True):
        if mine != yours:
            return float(own[yours] - own[mine])
    return 0.0


def run(rows: Rows, *, is_check: bool) -> bool:
    """A row for each family. False where a token differs by more than a near-tie."""
    is_good = True
    settings = SETTINGS | {"device": "cpu" if is_check else "cuda"}
    for number, family in enumerate(list(FAMILIES)[: 1 if is_check else None]):
        with tempfile.TemporaryDirectory(prefix="penstock-gpu-model-") as text:
            model = write(family, Path(text))
            runner = load_runner(ModelSource("safetensors", Path(text), f"random-{number}"), EngineConfig(**settings))
            generator = torch.Generator().manual_seed(number)
            prompt = torch.randint(3, SIZES["vocab_size"], (PROMPT_TOKENS,), generator=generator).tolist()
            got = decode(runner, prompt, OUTPUT_TOKENS)
            expected, logits = decode_as_transformers(model, prompt, OUTPUT_TOKENS)
            difference = gap(logits, expected, got)
            is_good &= difference <= NEAR_TIE
            equal = sum(mine == yours for mine, yours in zip(got, expected, strict=True))
            note = f"they part where two logits differ by {difference:.2g}" if got != expected else ""
            rows.add(f"{family}: greedy tokens equal to transformers', of {OUTPUT_TOKENS}", equal, None, "tokens", note)
    return is_good
