"""The loss that a head is trained with, in bfloat16 beside float32."""

import torch
from torch import Tensor

from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.compute.speculation.head_file import dense_weights
from penstock.workers.drafter_training.features import Example, unit
from penstock.workers.drafter_training.head import TrainedHead
from tests.unit.workers.compute.speculation.tiny_heads import CONFIG, VOCAB, random_head

DEPTH, TOKENS, NUM_PROMPT = 3, 40, 6


def gradients(example: Example, *, in_bf16: bool) -> tuple[float, dict[str, Tensor]]:
    head = random_head(CONFIG, 8)
    trained = TrainedHead(CONFIG, dense_weights(head), rope_tables(inverse_frequencies(CONFIG, None), TOKENS))
    generator = torch.Generator().manual_seed(7)
    embed = unit(torch.randn(VOCAB, CONFIG.hidden_size, generator=generator))
    target = torch.randn(len(head.vocabulary), CONFIG.hidden_size, generator=generator)
    places = torch.full((VOCAB,), -1)
    places[head.vocabulary] = torch.arange(len(head.vocabulary))
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        found = trained.loss(example, embed, target, places, DEPTH)
    found.total.backward()  # type: ignore[no-untyped-call]
    return float(found.total.detach()), {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}


def test_products_in_bfloat16_move_loss_and_gradients_little() -> None:
    generator = torch.Generator().manual_seed(3)
    example = Example(
        torch.randint(0, VOCAB, (TOKENS,), generator=generator),
        NUM_PROMPT,
        unit(torch.randn(TOKENS, 3, CONFIG.hidden_size, generator=generator)),
        unit(torch.randn(TOKENS - NUM_PROMPT, CONFIG.hidden_size, generator=generator)),
    )
    wanted, exact = gradients(example, in_bf16=False)
    found, rounded = gradients(example, in_bf16=True)
    assert 0 < abs(found / wanted - 1) < 0.01
    assert exact.keys() == rounded.keys()
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32, name
        assert torch.cosine_similarity(gradient.flatten(), rounded[name].flatten(), dim=0) > 0.995, name
