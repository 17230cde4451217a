"""Writes a small LoRA adapter for the demo model in PEFT's format: `python examples/tour/adapter.py FOLDER`.

Untrained: its numbers are drawn at random, so that a model with it says something else than without. `peft`'s own
`save_pretrained` writes the same two files.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, OUT = 30, 576, {"q_proj": 576, "v_proj": 192}
"""Shape of SmolLM2-135M: layers, inputs, and outputs of the two matrices in each layer that are adapted."""
RANK = 8
SIZE = 0.05
"""Spread of the numbers: enough to change the answers."""


def tensors(seed: int = 1) -> dict[str, np.ndarray]:
    """Two thin matrices A and B for each adapted one W: the adapted model computes with W + 2 B A."""
    rng = np.random.default_rng(seed)
    found = {}
    for layer in range(LAYERS):
        for module, out in OUT.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            found[f"{name}.lora_A.weight"] = rng.normal(0, SIZE, (RANK, HIDDEN)).astype(np.float32)
            found[f"{name}.lora_B.weight"] = rng.normal(0, SIZE, (out, RANK)).astype(np.float32)
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(OUT),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors(), folder / "adapter_model.safetensors")
    for path in sorted(folder.iterdir()):
        print(f"{path} ({path.stat().st_size} bytes)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
