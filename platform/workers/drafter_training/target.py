"""What the target computes over its own answers, when they are wanted, on the device that trains: a GPU has it sooner
than a disk."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from penstock.text.source import ModelSource
from penstock.workers.compute.batch import Span, lay_out
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.fused import load_for, make_cache, make_model
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.config import EngineConfig
from penstock.workers.drafter_training.answers import Answer
from penstock.workers.drafter_training.examples import Batch, Example, unit

BLOCK = 16


class Target:
    """Computes the features of a list of answers. Satisfies `examples.Examples`."""

    def __init__(self, model: Llama, answers: Sequence[Answer], taps: Sequence[int], most_tokens: int) -> None:
        """most_tokens: of a batch, its answers' together."""
        self._model, self._answers, self._taps = model, answers, set(taps)
        self._most_tokens = most_tokens
        longest = max(len(answer.prompt) + len(answer.output) for answer in answers)
        self._cache: KvCache = make_cache(model, 2 * -(-max(most_tokens, longest) // BLOCK), BLOCK, model.dtype)

    def batch(self, indices: Sequence[int]) -> Batch:
        answers = [self._answers[index] for index in indices]
        lengths = [len(answer.prompt) + len(answer.output) for answer in answers]
        tapped, last = self._compute(answers, lengths)
        tokens = torch.tensor([token for answer in answers for token in answer.prompt + answer.output])
        parts = (part.split_with_sizes(lengths) for part in (tokens.to(tapped.device), tapped, last))
        return Batch.of(
            [
                Example(ids, len(answer.prompt), features, states[len(answer.prompt) - 1 : -1])
                for answer, ids, features, states in zip(answers, *parts, strict=True)
            ]
        )

    def _compute(self, answers: Sequence[Answer], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features [T, taps, hidden] of the answers' tokens, and what is behind the last layer [T, hidden]."""
        model, cache = self._model, self._cache
        counts = [-(-length // BLOCK) for length in lengths]
        starts = accumulate(counts, initial=0)
        spans = [
            Span(answer.prompt + answer.output, 0, list(range(start, start + count)))
            for answer, start, count in zip(answers, starts, counts, strict=False)
        ]
        with torch.inference_mode():
            token_ids, positions, attention = lay_out(spans, BLOCK)
            step = ModelStep(token_ids, positions, attention, torch.empty(0, dtype=torch.int64))
            step = self._place(step)
            way = model.make_way(step.positions, step.attention, cache)
            x, behind = model.begin(step.token_ids, way)
            tapped = []
            for index in range(len(model.layers)):
                behind = model.go_on(index, x, model.attend(index, behind, step.attention, cache), way)
                if index in self._taps:
                    tapped.append(unit(x.float()))
            features, states = torch.stack(tapped, dim=1), unit(x.float())
        return features.clone(), states.clone()  # outside, gradients may be taken of what they are multiplied with

    def _place(self, step: ModelStep) -> ModelStep:
        return step if self._model.device.type == "cpu" else self._model.place(step, self._cache)


def load_target(
    source: ModelSource, answers: Sequence[Answer], taps: Sequence[int], device: torch.device, most_tokens: int
) -> Target:
    """The target as an engine has it on the GPU. Raises ConfigError."""
    config = read_config(source)
    engine = EngineConfig(device="cuda")
    longest = max(len(answer.prompt) + len(answer.output) for answer in answers)
    model = make_model(config, load_for(source, config, engine, torch.bfloat16, device), longest, 1, engine)
    assert isinstance(model, Llama)
    return Target(model, answers, taps, most_tokens)
