"""The reference for bench.engine's perplexities: transformers in bfloat16 over a checkpoint in Hugging Face's form
(`python -m bench.support.bf16_worker FOLDER`)."""

import sys
from collections.abc import Callable, Mapping

import torch
from transformers import AutoModelForCausalLM

from bench.support.worker import answer


def main() -> None:
    answer(start)


def start() -> Mapping[str, Callable[..., object]]:
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[-1], dtype=torch.bfloat16)  # in inference mode as it comes

    def losses(windows: list[list[int]], first: int) -> list[float]:
        """Negative log likelihood of each window's tokens behind the first + 1 that are only read, summed."""
        with torch.inference_mode():
            return [_loss(model(torch.tensor([ids])).logits[0, first:-1].float(), ids[first + 1 :]) for ids in windows]

    return {"losses": losses}


def _loss(logits: torch.Tensor, targets: list[int]) -> float:
    return -logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None]).double().sum().item()


if __name__ == "__main__":
    main()
