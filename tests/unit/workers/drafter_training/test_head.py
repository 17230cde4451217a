"""The loss that a head is trained with: in bfloat16 beside float32, of several answers at once, rounded."""

import torch
from torch import Tensor

from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.compute.speculation.head_file import dense_weights, quantize_head
from penstock.workers.drafter_training.examples import Batch, Example, unit
from penstock.workers.drafter_training.head import TrainedHead
from tests.unit.workers.compute.speculation.tiny_heads import CONFIG, VOCAB, random_head

DEPTH, TOKENS, NUM_PROMPT = 3, 40, 6


def rope() -> tuple[Tensor, Tensor]:
    return rope_tables(inverse_frequencies(CONFIG, None), TOKENS)


def make_rig() -> tuple[TrainedHead, Tensor, Tensor, Tensor]:
    """A head, and what its loss takes of the target."""
    head = random_head(CONFIG, 8)
    generator = torch.Generator().manual_seed(7)
    embed = unit(torch.randn(VOCAB, CONFIG.hidden_size, generator=generator))
    target = torch.randn(len(head.vocabulary), CONFIG.hidden_size, generator=generator)
    places = torch.full((VOCAB,), -1)
    places[head.vocabulary] = torch.arange(len(head.vocabulary))
    return TrainedHead(CONFIG, dense_weights(head), rope()), embed, target, places


def gradients(batch: Batch, *, in_bf16: bool) -> tuple[float, dict[str, Tensor]]:
    trained, embed, target, places = make_rig()
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        found = trained.loss(batch, embed, target, places, DEPTH)
    found.total.backward()  # type: ignore[no-untyped-call]
    return float(found.total.detach()), {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}


def test_products_in_bfloat16_move_loss_and_gradients_little() -> None:
    generator = torch.Generator().manual_seed(3)
    batch = Batch.of([make_example(generator, TOKENS, NUM_PROMPT)])
    wanted, exact = gradients(batch, in_bf16=False)
    found, rounded = gradients(batch, in_bf16=True)
    assert 0 < abs(found / wanted - 1) < 0.01
    assert exact.keys() == rounded.keys()
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32, name
        assert torch.cosine_similarity(gradient.flatten(), rounded[name].flatten(), dim=0) > 0.995, name


def make_example(generator: torch.Generator, tokens: int, num_prompt: int) -> Example:
    return Example(
        torch.randint(0, VOCAB, (tokens,), generator=generator),
        num_prompt,
        unit(torch.randn(tokens, 3, CONFIG.hidden_size, generator=generator)),
        unit(torch.randn(tokens - num_prompt, CONFIG.hidden_size, generator=generator)),
    )


def test_answers_side_by_side_learn_what_each_learns_alone() -> None:
    """Answers and prompts are of several lengths; each answer counts the same."""
    generator = torch.Generator().manual_seed(4)
    examples = [make_example(generator, *sizes) for sizes in ((40, 6), (23, 11), (9, 3), (12, 9))]
    alone = [gradients(Batch.of([example]), in_bf16=False) for example in examples]
    loss, found = gradients(Batch.of(examples), in_bf16=False)
    assert abs(loss - sum(own for own, _ in alone) / len(alone)) < 1e-4 * loss
    for name, gradient in found.items():
        wanted = sum(own[name] for _, own in alone) / len(alone)
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5)


def test_what_is_kept_of_answers_side_by_side_is_that_of_each() -> None:
    generator = torch.Generator().manual_seed(5)
    trained, embed, target, places = make_rig()
    examples = [make_example(generator, *sizes) for sizes in ((40, 6), (23, 11))]
    with torch.no_grad():
        for example in examples:  # its first tokens are what the head says
            logits = next(trained.passes(Batch.of([example]), embed, 1))[0]
            said = random_head(CONFIG, 8).vocabulary[logits[0].argmax()]
            example.token_ids[example.num_prompt + 1] = said
        own = [trained.loss(Batch.of([example]), embed, target, places, DEPTH) for example in examples]
        both = trained.loss(Batch.of(examples), embed, target, places, DEPTH)
    assert both.num_bases == sum(found.num_bases for found in own)
    assert [int(count) for count in both.num_kept] == [
        sum(int(found.num_kept[ahead]) for found in own) for ahead in range(DEPTH)
    ]
    assert int(both.num_kept[0]) >= 2


def test_a_rounded_head_computes_what_will_be_written_and_learns_for_what_it_has() -> None:
    generator = torch.Generator().manual_seed(6)
    batch = Batch.of([make_example(generator, 30, 4)])
    trained, embed, target, places = make_rig()
    with torch.no_grad():
        trained.gate_up += 0.003 * torch.randn(trained.gate_up.shape, generator=generator)
    plain = trained.loss(batch, embed, target, places, DEPTH).total
    trained.round(4)
    rounded = trained.loss(batch, embed, target, places, DEPTH).total
    weights = {name: value.detach() for name, value in trained.named_parameters()}
    head = random_head(CONFIG, 8)
    written = TrainedHead(CONFIG, dense_weights(quantize_head(head.spec, weights, head.vocabulary, 4)), rope())
    wanted = written.loss(batch, embed, target, places, DEPTH).total
    torch.testing.assert_close(rounded, wanted, rtol=1e-5, atol=1e-5)
    assert abs(float(rounded.detach() - plain.detach())) > 1e-4
    rounded.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    assert trained.gate_up.grad is not None
    assert written.gate_up.grad is not None
    torch.testing.assert_close(trained.gate_up.grad, written.gate_up.grad, rtol=1e-4, atol=1e-6)
    trained.round(None)
    torch.testing.assert_close(trained.loss(batch, embed, target, places, DEPTH).total, plain)
