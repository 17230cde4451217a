"""What the target computes for a training when it is wanted, beside what the kernels write to disk."""

from pathlib import Path

import pytest
import torch

from bench.support.tiny_checkpoint import write_checkpoint
from penstock.text.source import resolve
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.llama import Llama
from penstock.workers.compute.weights import load_weights
from penstock.workers.drafter_training.answers import Answer
from penstock.workers.drafter_training.features import FeatureStore, compute_features
from penstock.workers.drafter_training.target import Target
from tests.unit.workers.built_kernels import built_kernels

TAPS = [0, 1, 2]


def test_both_compute_the_same_of_several_answers_at_once(tmp_path: Path) -> None:
    built_kernels()
    write_checkpoint(tmp_path / "model", num_layers=4)
    source = resolve(str(tmp_path / "model"))
    config = read_config(source)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, config.vocab_size, (3, 60), generator=generator).tolist()
    answers = [
        Answer(row[:prompt], row[prompt:end]) for row, prompt, end in zip(ids, (5, 20, 9), (33, 57, 12), strict=True)
    ]
    (tmp_path / "out").mkdir()
    store = FeatureStore(tmp_path / "out", answers, len(TAPS), config.hidden_size)
    compute_features(source, answers, TAPS, store, 1, lambda *_: None)
    model = Llama(config, load_weights(source, config, torch.float32), 60, 1, exact=False)
    target = Target(model, answers, TAPS, 200)
    for _ in range(2):  # the second time the cache is full of the first
        found, wanted = target.batch([2, 0, 1]), store.batch([2, 0, 1])
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(found.is_base, wanted.is_base)
        assert (found.first, found.num_bases) == (wanted.first, wanted.num_bases)
        for name in ("features", "states"):
            ours, theirs = getattr(found, name).float(), getattr(wanted, name)
            assert ours.shape == theirs.shape
            assert not ours.requires_grad
            assert not ours.is_inference()
            difference = (ours - theirs).norm() / theirs.norm()
            assert difference < 0.02, name


@pytest.mark.parametrize("index", [0, 1])
def test_an_answer_is_the_same_whatever_is_beside_it(tmp_path: Path, index: int) -> None:
    write_checkpoint(tmp_path / "model", num_layers=4)
    source = resolve(str(tmp_path / "model"))
    config = read_config(source)
    answers = [Answer([1, 2, 3], [4, 5, 6, 7]), Answer([9, 8], [7, 3, 5])]
    model = Llama(config, load_weights(source, config, torch.float32), 60, 1, exact=False)
    target = Target(model, answers, TAPS, 200)
    alone, beside = target.batch([index]), target.batch([0, 1])
    length = alone.token_ids.shape[1]
    torch.testing.assert_close(alone.features[0], beside.features[index, :length], rtol=1e-4, atol=1e-4)
    begin = alone.first - beside.first
    torch.testing.assert_close(
        alone.states[0], beside.states[index, begin : begin + alone.states.shape[1]], rtol=1e-4, atol=1e-4
    )
