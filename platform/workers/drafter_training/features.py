"""What the target computes over its own answers, on disk: normed features of every token, and behind the last layer
those of the tokens that say the next one. In float16, memory-mapped: a token takes some kilobytes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.workers.compute.batch import Span, lay_out
from penstock.workers.compute.device import CPU
from penstock.workers.compute.kernels.decoder import States
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.fused import FusedLlama, load_for, make_cache, make_model
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.config import EngineConfig
from penstock.workers.drafter_training.answers import Answer
from penstock.workers.drafter_training.examples import Batch, Example, unit

STEP_TOKENS = 1024
"""Tokens of answers computed at once."""
_BLOCK = 16


class FeatureStore:
    """Features of a list of answers in two files. Satisfies `examples.Examples`."""

    def __init__(self, folder: Path, answers: Sequence[Answer], num_taps: int, hidden: int) -> None:
        self._answers = answers
        self._num_taps, self._hidden = num_taps, hidden
        self._token_starts = np.cumsum([0, *(len(a.prompt) + len(a.output) for a in answers)])
        self._state_starts = np.cumsum([0, *(len(a.output) for a in answers)])
        self._done = folder / "features.done"
        sizes = {
            "features.bin": int(self._token_starts[-1]) * num_taps * hidden,
            "states.bin": int(self._state_starts[-1]) * hidden,
        }
        paths = [folder / name for name in sizes]
        if not all(p.exists() and p.stat().st_size == 2 * s for p, s in zip(paths, sizes.values(), strict=True)):
            self._done.unlink(missing_ok=True)
            for path, size in zip(paths, sizes.values(), strict=True):
                with path.open("wb") as file:
                    file.truncate(2 * size)
        features, states = (np.memmap(path, dtype=np.float16, mode="r+") for path in paths)
        self._features = torch.from_numpy(features).view(-1, num_taps, hidden)
        self._states = torch.from_numpy(states).view(-1, hidden)

    @property
    def num_done(self) -> int:
        """Leading answers whose features are there."""
        return int(self._done.read_text()) if self._done.exists() else 0

    def put(self, index: int, features: Tensor, states: Tensor) -> None:
        self._features[self._token_starts[index] : self._token_starts[index + 1]] = features
        self._states[self._state_starts[index] : self._state_starts[index + 1]] = states

    def set_done(self, count: int) -> None:
        self._done.write_text(str(count))

    def __getitem__(self, index: int) -> Example:
        answer = self._answers[index]
        return Example(
            torch.tensor(answer.prompt + answer.output),
            len(answer.prompt),
            self._features[self._token_starts[index] : self._token_starts[index + 1]].float(),
            self._states[self._state_starts[index] : self._state_starts[index + 1]].float(),
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        return Batch.of([self[index] for index in indices])

    def __len__(self) -> int:
        return len(self._answers)


def compute_features(
    source: ModelSource,
    answers: Sequence[Answer],
    taps: Sequence[int],
    store: FeatureStore,
    threads: int,
    on_answer: Callable[[int, int], None],
) -> None:
    """Fill the store. Raises ConfigError where the kernels can't serve the model."""
    first = store.num_done
    if first == len(answers):
        return
    config, engine = read_config(source), EngineConfig()
    model = make_model(
        config, load_for(source, config, engine, torch.bfloat16, CPU), _longest(answers), threads, engine
    )
    if not isinstance(model, FusedLlama):
        raise ConfigError("a drafter is trained with the CPU kernels, which don't serve this model here")
    num_blocks = -(-max(STEP_TOKENS, _longest(answers)) // _BLOCK) + STEP_TOKENS
    cache = make_cache(model, num_blocks, _BLOCK, torch.bfloat16)
    while first < len(answers):
        last = first + 1
        while last < len(answers) and sum(map(_length, answers[first : last + 1])) <= STEP_TOKENS:
            last += 1
        spans: list[Span] = []
        rows: list[int] = []
        block = begin = 0
        for answer in answers[first:last]:
            needed = -(-_length(answer) // _BLOCK)
            spans.append(Span(answer.prompt + answer.output, 0, list(range(block, block + needed))))
            rows += range(begin + len(answer.prompt) - 1, begin + _length(answer) - 1)
            block += needed
            begin += _length(answer)
        token_ids, positions, attention = lay_out(spans, _BLOCK)
        states = States(
            taps=torch.tensor(taps, dtype=torch.int32),
            tapped=torch.empty(begin, len(taps), config.hidden_size),
            behind=torch.empty(len(rows), config.hidden_size),
        )
        model.with_states(ModelStep(token_ids, positions, attention, torch.tensor(rows)), cache, states)
        assert states.tapped is not None
        assert states.behind is not None
        features, behind = unit(states.tapped), unit(states.behind)
        for index, answer in enumerate(answers[first:last], first):
            store.put(index, features[: _length(answer)], behind[: len(answer.output)])
            features, behind = features[_length(answer) :], behind[len(answer.output) :]
        first = last
        store.set_done(first)
        on_answer(first, len(answers))


def _length(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.output)


def _longest(answers: Sequence[Answer]) -> int:
    return max(map(_length, answers))
