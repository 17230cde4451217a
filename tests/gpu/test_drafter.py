"""What a draft head is trained on, on the GPU beside the CPU; and a step of its training."""

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.device import place_weights
from penstock.workers.compute.models.llama import Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.drafter_training.answers import Answer
from penstock.workers.drafter_training.examples import Batch, unit
from penstock.workers.drafter_training.head import TrainedHead, initial_weights
from penstock.workers.drafter_training.target import Target
from tests.gpu.cases import DEVICE
from tests.gpu.test_model import CONFIG, drawn

CPU = torch.device("cpu")
TAPS = [0, 1]
LONGEST = 60


def make_answers() -> list[Answer]:
    ids = torch.randint(0, CONFIG.vocab_size, (4, LONGEST), generator=torch.Generator().manual_seed(3)).tolist()
    return [Answer(row[:p], row[p:end]) for row, p, end in zip(ids, (5, 20, 9, 1), (33, 57, 12, 60), strict=True)]


def make_target(device: torch.device) -> Target:
    weights = drawn(torch.float32, CONFIG)
    on_device = place_weights(weights, torch.float32, device) if device == DEVICE else dict(weights)
    return Target(Llama(CONFIG, on_device, LONGEST, 1, exact=False), make_answers(), TAPS, 128)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """One whose steps are planned as a GPU's are, in the interpreter too."""
    made = make_target(DEVICE)

    def place(step: ModelStep) -> ModelStep:
        return made._model.place(step, made._cache)

    monkeypatch.setattr(made, "_place", place)
    return made


def test_features_are_those_of_the_cpu(target: Target) -> None:
    on_cpu = make_target(CPU)
    for indices in ([0, 1, 2, 3], [2], [3, 0]):
        found, wanted = target.batch(indices), on_cpu.batch(indices)
        assert torch.equal(found.token_ids.cpu(), wanted.token_ids)
        assert torch.equal(found.is_base.cpu(), wanted.is_base)
        torch.testing.assert_close(found.features.cpu(), wanted.features, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(found.states.cpu(), wanted.states, rtol=2e-3, atol=2e-3)
        assert not found.features.is_inference()


def gradients(batch: Batch, device: torch.device) -> tuple[float, dict[str, Tensor]]:
    weights = dict(drawn(torch.float32, CONFIG))
    layer = {name.rpartition(".")[2]: weight for name, weight in weights.items() if name.startswith("layers.1.")}
    vocabulary = torch.arange(0, CONFIG.vocab_size, 2)
    first = initial_weights(
        layer, weights["norm"], weights["lm_head"][vocabulary], len(TAPS), torch.Generator().manual_seed(1)
    )
    cos, sin = rope_tables(inverse_frequencies(CONFIG, None), LONGEST)
    head = TrainedHead(CONFIG, first, (cos.to(device), sin.to(device))).to(device)
    head.round(4)
    places = torch.full((CONFIG.vocab_size,), -1)
    places[vocabulary] = torch.arange(len(vocabulary))
    embed, said = unit(weights["embed"]), weights["lm_head"][vocabulary] * weights["norm"]
    with torch.autocast(device.type, torch.bfloat16):
        found = head.loss(batch, embed.to(device), said.to(device), places.to(device), 3)
    found.total.backward()  # type: ignore[no-untyped-call]
    return float(found.total.detach()), {n: p.grad.cpu() for n, p in head.named_parameters() if p.grad is not None}


def test_a_step_of_the_training_has_the_gradients_of_the_cpu(target: Target) -> None:
    loss, found = gradients(target.batch([0, 1, 2, 3]), DEVICE)
    wanted_loss, wanted = gradients(make_target(CPU).batch([0, 1, 2, 3]), CPU)
    assert abs(loss / wanted_loss - 1) < 0.01
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.cosine_similarity(gradient.flatten(), found[name].flatten(), dim=0) > 0.99, name
