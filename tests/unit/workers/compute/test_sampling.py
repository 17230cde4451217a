import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as oracle

from penstock.wire.frames import Delta, DownFrame, SamplingParams, decode_down, encode, pack_token_ids
from penstock.workers.compute.noise import gumbel
from penstock.workers.compute.sampling import SHARPNESS, Sampler
from penstock.workers.compute.truncation import find_cut, kept_ids, least_of_min_p
from penstock.workers.engine.sequence import Sampled, Sequence

VOCAB = 512
EOS = 2


def make_seq(token_ids: list[int] | None = None, num_prompt_tokens: int | None = None, **sampling: object) -> Sequence:
    token_ids = token_ids if token_ids is not None else [1, 5, 9]
    num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    params = SamplingParams(**({"max_tokens": 100} | sampling))  # type: ignore[arg-type]
    return Sequence("r", token_ids, params, num_prompt_tokens, [], b"", 0.0)


def make_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, *seqs: Sequence) -> list[int]:
    sampler = Sampler(logits.shape[1], frozenset({EOS}))
    return [sampled.token_id for sampled in sampler.sample(logits, list(seqs), [seq.num_tokens for seq in seqs])]


def adjusted(logits: torch.Tensor, seq: Sequence) -> np.ndarray:
    return Sampler(logits.shape[1], frozenset({EOS}))._adjust(logits[0].numpy(), seq)


# choosing


def test_greedy_takes_the_argmax_and_of_equals_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [400, 30, 31]] = 5.0

    assert sample(logits, make_seq(temperature=0.0)) == [30]
    assert sample(logits, make_seq(temperature=0.0, logprobs=0)) == [30]
    assert sample(logits, make_seq(temperature=0.0, repetition_penalty=1.1)) == [30]


def test_a_token_is_the_argmax_of_logits_over_temperature_plus_the_noise_of_its_position() -> None:
    logits = make_logits()
    for position in range(3, 40):
        seq = make_seq(list(range(position)), temperature=0.7, seed=99)
        expected = np.argmax(logits[0].double().numpy() / 0.7 + gumbel(99, position, np.arange(VOCAB)))

        assert sample(logits, seq) == [expected]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_drawn_tokens_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.2, 1.1, 0.9, 0.0, -2.0]])
    sampler, size = Sampler(12), 12_000
    drawn = np.zeros(12)
    for draw in range(size):
        seq = make_seq(temperature=temperature, seed=draw % 100)
        drawn[sampler.sample(logits, [seq], [draw // 100])[0].token_id] += 1
    expected = size * torch.softmax(logits[0].double() / temperature, 0).numpy()

    assert ((drawn - expected) ** 2 / expected).sum() < 31.26  # chi-square, 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}])
def test_a_head_s_scores_are_drawn_sharper_by_the_same_noise(cut: dict[str, int]) -> None:
    logits, vocabulary = make_logits(), np.arange(VOCAB)
    different = 0
    for seed in range(40):
        sharp, plain = (
            make_seq(seed=seed, temperature=0.9 / SHARPNESS, **cut),
            make_seq(seed=seed, temperature=0.9, **cut),
        )
        (proposed,) = Sampler(VOCAB, frozenset()).propose_among(logits, vocabulary, [plain], [[]])
        assert [proposed] == sample(logits, sharp)
        different += [proposed] != sample(logits, plain)
    assert different > 0, "drawn as they are, some are others"


def test_two_consecutive_tokens_are_independent_draws() -> None:
    logits = torch.tensor([[0.5, 0.0, 1.0]])
    sampler, size = Sampler(3), 9_000
    drawn = np.zeros((3, 3))
    for seed in range(size):
        first, second = (sampler.sample(logits, [make_seq(seed=seed)], [position])[0].token_id for position in (10, 11))
        drawn[first, second] += 1
    p = torch.softmax(logits[0].double(), 0).numpy()
    expected = size * np.outer(p, p)

    assert ((drawn - expected) ** 2 / expected).sum() < 26.12  # 8 degrees of freedom, p = 0.001


def test_a_row_s_choice_does_not_depend_on_the_other_rows() -> None:
    logits = make_logits(rows=6)
    seqs = [
        make_seq(temperature=0.0),
        make_seq(temperature=1.0, seed=1),
        make_seq(temperature=0.9, top_p=0.8, seed=2, logprobs=3),
        make_seq(temperature=1.2, top_k=20, seed=3, repetition_penalty=1.3),
        make_seq(temperature=0.0, frequency_penalty=1.0, logprobs=0),
        make_seq(temperature=1.0, min_p=0.05, seed=4, min_tokens=4),
    ]
    positions = [seq.num_tokens for seq in seqs]
    together = Sampler(VOCAB).sample(logits, seqs, positions)

    for row, seq in enumerate(seqs):
        assert Sampler(VOCAB).sample(logits[row : row + 1], [seq], positions[row : row + 1]) == [together[row]]


def test_the_seed_and_the_position_decide_not_the_history() -> None:
    logits = make_logits()
    outcomes = {tuple(sample(logits, make_seq([a, b, c], seed=5))) for a, b, c in ((1, 2, 3), (7, 8, 9))}
    by_seed = {sample(logits, make_seq(seed=seed))[0] for seed in range(40)}

    assert len(outcomes) == 1
    assert len(by_seed) > 3


def test_bfloat16_logits_are_taken_as_float32_and_left_as_they_are() -> None:
    logits = make_logits().bfloat16()
    before = logits.clone()
    seq = make_seq(temperature=0.8, seed=3, logit_bias=((7, 2.0),), logprobs=2)

    assert sample(logits, seq) == sample(logits.float(), seq)
    assert torch.equal(logits, before)


def test_float32_logits_are_left_as_they_are() -> None:
    logits = make_logits()
    before = logits.clone()
    sample(logits, make_seq(repetition_penalty=1.5, logit_bias=((3, 5.0),), min_tokens=2, top_p=0.5, temperature=0.3))

    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = 100 * make_logits()

    assert sample(logits, make_seq(temperature=temperature, top_p=0.9, min_p=0.1)) == [int(logits.argmax())]


# truncation, against transformers


def oracle_mask(scores: torch.Tensor, params: SamplingParams) -> list[int]:
    ids = torch.zeros(1, 1, dtype=torch.long)
    if params.top_k:
        scores = oracle.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = oracle.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = oracle.MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.isfinite(scores[0]).nonzero().flatten().tolist()


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from((0, 1, 2, 7, 40, 511, 512, 9999)),
    st.sampled_from((0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0)),
    st.sampled_from((0.0, 0.01, 0.1, 0.5, 1.0)),
    st.sampled_from((0.2, 1.0, 3.0)),
)
def test_top_k_top_p_and_min_p_leave_what_transformers_leaves(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
    scaled = make_logits(seed=seed) / temperature
    scaled -= scaled.max()

    row = scaled[0].numpy()
    cut = find_cut(row, top_k, top_p, least_of_min_p(min_p))

    assert kept_ids(row, cut).tolist() == oracle_mask(scaled, params)


def test_truncation_does_not_change_the_noise_of_the_tokens_it_leaves() -> None:
    logits = make_logits()
    kept = set(oracle_mask(logits, SamplingParams(max_tokens=1, top_k=200)))
    free = [sample(logits, make_seq(seed=seed))[0] for seed in range(60)]
    cut = [sample(logits, make_seq(seed=seed, top_k=200))[0] for seed in range(60)]

    assert all(a == b for a, b in zip(free, cut, strict=True) if a in kept)
    assert kept.issuperset(cut)


# penalties and masks


def test_the_repetition_penalty_is_transformers_over_prompt_and_output() -> None:
    logits, seq = make_logits(), make_seq([1, 5, 9, 9, 100, 5], 3, repetition_penalty=1.3)
    expected = oracle.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seq.token_ids]), logits.clone())

    np.testing.assert_allclose(adjusted(logits, seq), expected[0].numpy(), rtol=1e-6)


def test_frequency_and_presence_penalties_count_output_only() -> None:
    logits, seq = make_logits(), make_seq([1, 5, 9, 9, 9, 100, 1], 3, frequency_penalty=0.5, presence_penalty=0.25)
    expected = logits[0].clone()
    expected[9] -= 2 * 0.5 + 0.25
    expected[100] -= 0.5 + 0.25
    expected[1] -= 0.5 + 0.25

    np.testing.assert_allclose(adjusted(logits, seq), expected.numpy(), rtol=1e-6)


def test_logit_bias_is_added_before_the_penalties() -> None:
    logits, seq = (
        torch.zeros(1, VOCAB),
        make_seq([3], 0, logit_bias=((3, 4.0), (VOCAB + 7, 9.0)), repetition_penalty=2.0),
    )

    assert adjusted(logits, seq)[3] == 2.0
    assert np.count_nonzero(adjusted(logits, seq)) == 1


def test_min_tokens_masks_end_of_sequence_and_stop_tokens_until_they_are_out() -> None:
    logits = make_logits()
    logits[0, [EOS, 77]] = torch.tensor([50.0, 49.0])
    early, late = ([1, 5], [1, 5, 6, 7])

    assert sample(logits, make_seq(early, 1, temperature=0.0, min_tokens=3, stop_token_ids=(77,)))[0] not in (EOS, 77)
    assert sample(logits, make_seq(late, 1, temperature=0.0, min_tokens=3, stop_token_ids=(77,))) == [EOS]
    assert sample(logits, make_seq(early, 1, min_tokens=3, stop_token_ids=(77,)))[0] not in (EOS, 77)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=6))
def test_counts_kept_between_steps_equal_counts_made_anew(growth: list[list[int]]) -> None:
    logits = make_logits()
    seq = make_seq([4, 4, 8], 2, repetition_penalty=1.2, frequency_penalty=0.7, presence_penalty=-0.3)
    sampler = Sampler(VOCAB)
    for tokens in growth:
        seq.token_ids += tokens

        assert sampler._adjust(logits[0].numpy(), seq).tolist() == adjusted(logits, seq).tolist()


def test_forget_drops_what_is_kept_of_a_sequence() -> None:
    sampler, seq = Sampler(VOCAB), make_seq(frequency_penalty=1.0)
    sampler.sample(make_logits(), [seq], [3])
    assert sampler._adjustments
    sampler.forget(seq)
    sampler.forget(seq)

    assert not sampler._adjustments


# log probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits()
    seq = make_seq(temperature=0.5, seed=1, top_k=2, logprobs=5, logit_bias=((7, 100.0),))
    [sampled] = Sampler(VOCAB).sample(logits, [seq], [3])
    expected = torch.log_softmax(logits[0].double(), 0)
    values, ids = expected.topk(5)

    assert sampled.token_id == 7
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(expected[7].item(), abs=1e-9)
    assert [token_id for token_id, _ in sampled.logprobs.top] == ids.tolist()
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(values.tolist(), abs=1e-9)
    assert decode_down(encode(DownFrame([Delta(1, [sampled.token_id], logprobs=[sampled.logprobs])]))).deltas[
        0
    ].logprobs == [sampled.logprobs]


def test_logprobs_of_zero_are_the_chosen_token_s_alone_and_none_are_none() -> None:
    logits = make_logits()
    seqs = [make_seq(temperature=0.0, logprobs=0), make_seq(temperature=0.0)]
    with_logprobs, without = Sampler(VOCAB).sample(logits.expand(2, -1), seqs, [3, 3])

    assert with_logprobs.logprobs is not None
    assert with_logprobs.logprobs.top == ()
    assert math.exp(with_logprobs.logprobs.logprob) == pytest.approx(torch.softmax(logits[0], 0).max().item(), rel=1e-5)
    assert without.logprobs is None


def test_logprobs_of_the_first_tokens_end_with_them_and_the_row_is_greedy_then() -> None:
    logits = make_logits(4)
    seq = make_seq([1, 5, 9], 2, temperature=0.0, logprobs=0, logprobs_tokens=3)
    choices = sample_all(logits, seq)
    behind = make_seq([1, 5, 9, 9, 9], 2, temperature=0.0, logprobs=0, logprobs_tokens=3)

    assert [choice.logprobs is not None for choice in choices] == [True, True, False, False]
    assert [choice.token_id for choice in choices] == logits.argmax(-1).tolist()
    assert (Sampler(VOCAB).are_greedy([behind]), behind.needs_sampling) == (True, False)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.5, "logprobs": 2}]
)
def test_a_row_of_no_numbers_is_an_error_of_its_own_and_its_neighbour_is_sampled(params: dict[str, float]) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 3] = float("nan")
    logits[1, 7] = 100.0

    broken, good = Sampler(50).sample(logits, [make_seq(**params), make_seq(**params)], [2, 2])

    assert broken.error is not None
    assert (good.token_id, good.error) == (7, None)


def test_a_temperature_that_float32_takes_for_zero_breaks_nothing_but_its_own_row() -> None:
    chosen = Sampler(50).sample(torch.randn(2, 50), [make_seq(temperature=1e-46), make_seq(temperature=0.5)], [2, 2])

    assert chosen[1].error is None


def test_parameters_that_make_sampling_raise_end_their_own_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 7] = 100.0
    broken, good = Sampler(50).sample(logits, [make_seq(logit_bias=((-1000, 1.0),)), make_seq(temperature=0.0)], [3, 3])

    assert broken.error is not None
    assert (good.token_id, good.error) == (7, None)
    assert [record.message for record in caplog.records] == ["A row can't be sampled."]


def test_a_repetition_penalty_that_float32_takes_for_zero_ends_its_own_row_alone() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 5] = logits[1, 7] = 100.0
    with np.errstate(divide="ignore", invalid="ignore"):
        broken, good = Sampler(50).sample(
            logits, [make_seq(repetition_penalty=1e-46), make_seq(temperature=0.5)], [3, 3]
        )

    assert broken.error is not None
    assert (good.token_id, good.error) == (7, None)


# drafts

DRAFTED_PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.4},
    {"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": ((7, 3.0),)},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "min_tokens": 4, "stop_token_ids": (9,)},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0, "logprobs_tokens": 4},
]


def sample_all(logits: torch.Tensor, seq: Sequence) -> list[Sampled]:
    """One token after the other, from the rows in turn."""
    sampler = Sampler(VOCAB, {EOS})
    token_ids, choices = list(seq.token_ids), []
    for row in range(len(logits)):
        choices += sampler.sample(logits[row : row + 1], [seq], [seq.num_tokens])
        seq.token_ids.append(choices[-1].token_id)
    seq.token_ids[:] = token_ids
    return choices


@pytest.mark.parametrize("params", DRAFTED_PARAMS)
def test_every_place_behind_a_right_draft_is_chosen_as_if_alone(params: dict[str, object]) -> None:
    logits, seq = make_logits(5, seed=4), make_seq([1, 5, 9, 5, 30], 3, **params)
    expected = sample_all(logits, seq)
    draft = [choice.token_id for choice in expected[:4]]
    sampler = Sampler(VOCAB, {EOS})

    assert sampler.verify(logits, [seq], [draft]) == [expected]
    assert seq.num_tokens == 5
    assert [sampler.propose(logits[place : place + 1], [seq], [draft[:place]]) for place in range(5)] == [
        [choice.token_id] for choice in expected
    ]


@pytest.mark.parametrize("params", DRAFTED_PARAMS)
def test_nothing_is_chosen_behind_a_wrong_guess(params: dict[str, object]) -> None:
    logits, seq = make_logits(5, seed=4), make_seq([1, 5, 9, 5, 30], 3, **params)
    expected = sample_all(logits, seq)
    draft = [choice.token_id for choice in expected[:4]]
    draft[2] = (draft[2] + 1) % VOCAB

    assert Sampler(VOCAB, {EOS}).verify(logits, [seq], [draft]) == [expected[:3]]


def test_rows_of_several_sequences_are_told_apart() -> None:
    logits = make_logits(6, seed=4)
    seqs = [
        make_seq([1, 2, 3], temperature=0.8, seed=1),
        make_seq([4, 5], temperature=0.0),
        make_seq([6], temperature=0.8, seed=2),
    ]
    first, second, third = (
        sample_all(logits[:3], seqs[0]),
        sample_all(logits[3:4], seqs[1]),
        sample_all(logits[4:], seqs[2]),
    )
    drafts = [[first[0].token_id, first[1].token_id], [], [third[0].token_id]]

    assert Sampler(VOCAB, {EOS}).verify(logits, seqs, drafts) == [first, second, third]


def test_a_row_without_a_choice_ends_a_draft() -> None:
    logits, seq = make_logits(3, seed=4), make_seq(temperature=0.0)
    logits[1] = math.nan
    draft = [int(logits[0].argmax()), 5]
    sampler = Sampler(VOCAB)
    ((first, broken),) = sampler.verify(logits, [seq], [draft])

    assert (first.token_id, first.error) == (draft[0], None)
    assert broken.error
    assert sampler.propose(logits[1:2], [seq], [[]]) == [None]
    assert sampler.propose(logits[1:2], [make_seq(temperature=1.0)], [[]]) == [None]


# tokens and words that must not come


def masked_params(**sampling: object) -> dict[str, object]:
    return {
        "allowed_token_ids": pack_token_ids(range(10, 60)),
        "bad_words": ((12,), (20, 21), (30, 31, 32)),
        **sampling,
    }


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 7}, {"seed": 3, "logprobs": 2, "top_p": 0.9}])
def test_no_choice_breaks_the_masks(sampling: dict[str, object]) -> None:
    output: list[int] = []
    for place in range(60):
        seq = make_seq([1, 20, *output], 2, **masked_params(**sampling))
        output += sample(make_logits(seed=place), seq)

    assert set(output) <= {*range(10, 60)} - {12}
    assert (20, 21) not in list(pairwise(output))
    assert not any(output[place : place + 3] == [30, 31, 32] for place in range(len(output)))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 7}])
def test_a_masked_answer_is_the_same_with_drafts_and_when_it_is_resumed(sampling: dict[str, object]) -> None:
    logits = torch.cat([make_logits(seed=place) for place in range(12)])
    logits[::2, 20] = logits[1::2, 21] = 50.0  # a word that must not come is what the model wants
    plain: list[int] = []
    for place in range(12):
        plain += sample(logits[place : place + 1], make_seq([1, *plain], 1, **masked_params(**sampling)))
    sampler, seq = Sampler(VOCAB, frozenset({EOS})), make_seq([1], 1, **masked_params(**sampling))
    [verified] = sampler.verify(logits[:6], [seq], [plain[:5]])
    seq.token_ids += [choice.token_id for choice in verified]
    [further] = sampler.verify(logits[6:], [seq], [plain[6:11]])

    assert [choice.token_id for choice in (*verified, *further)] == plain
    assert sampler.propose(logits[3:4], [make_seq([1], 1, **masked_params(**sampling))], [plain[:3]]) == [plain[3]]


def test_masked_rows_are_not_greedy() -> None:
    for params in ({"allowed_token_ids": b"abcd"}, {"bad_words": ((5,),)}):
        assert not Sampler(VOCAB).are_greedy([make_seq(temperature=0.0, **params)])
        assert make_seq(temperature=0.0, **params).needs_sampling


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 7}, {"seed": 7, "logprobs": 1}])
def test_masks_that_leave_no_token_are_the_requests_fault_and_broken_scores_are_not(
    sampling: dict[str, object],
) -> None:
    masks = {"allowed_token_ids": pack_token_ids([21]), "bad_words": ((20, 21),)}
    seq, sampler = make_seq([1, 20], 1, **masks, **sampling), Sampler(VOCAB)
    rows = make_logits(), torch.full((1, VOCAB), math.nan)
    [masked], [broken] = (sampler.sample(logits, [seq], [2]) for logits in rows)

    assert masked.error
    assert masked.is_at_fault
    assert broken.error
    assert not broken.is_at_fault


def test_draws_of_a_sequence_are_known_until_it_is_forgotten() -> None:
    sampler, seq = Sampler(VOCAB), make_seq(temperature=0.5, seed=1)
    first = sampler.own_draws(seq, 2)
    seq.sampling = SamplingParams(max_tokens=9, temperature=0.9, seed=1)
    known = sampler.own_draws(seq, 2)
    sampler.forget(seq)

    assert first == known
    assert [draw.temperature for draw in sampler.own_draws(seq, 2) or ()] == [float(np.float32(0.9))] * 2
    assert not Sampler(VOCAB).own_draws(make_seq(logprobs=0), 1)
