from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.workers.compute.adjustments import Adjustments, TokenCounts
from penstock.workers.compute.triton.sampling.sampling_inputs import ANY, Changes
from penstock.workers.engine.sequence import Sequence

VOCAB = 600


def make_seq(token_ids: list[int], num_prompt_tokens: int, **sampling: object) -> Sequence:
    params = SamplingParams(**({"max_tokens": 100} | sampling))  # type: ignore[arg-type]
    return Sequence("r", token_ids, params, num_prompt_tokens, [], b"", 0.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=400),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=200), max_size=4),
    st.lists(st.integers(0, VOCAB - 1), max_size=5),
)
def test_counts_are_those_of_the_tokens(prompt: list[int], growth: list[list[int]], ahead: list[int]) -> None:
    seq, counts = make_seq(list(prompt), len(prompt)), TokenCounts()
    for tokens in growth:
        counts.update(seq)
        seq.token_ids += tokens
    counts.update(seq)
    output = [*chain.from_iterable(growth), *ahead]

    for _ in range(2):  # what is ahead leaves no trace
        ids, produced = counts.with_ahead(ahead)

        assert sorted(ids.tolist()) == sorted({*prompt, *output})
        assert dict(zip(ids.tolist(), produced.tolist(), strict=True)) == {
            token_id: output.count(token_id) for token_id in {*prompt, *output}
        }


def test_a_bias_of_every_token_and_of_some_beyond_is_added_once() -> None:
    bias = tuple((token_id, float(token_id % 7)) for token_id in range(VOCAB + 50))
    seq = make_seq([1], 1, logit_bias=bias)
    raw = np.linspace(-3, 3, VOCAB, dtype=np.float32)

    row = Adjustments(seq.sampling, VOCAB, ()).apply(raw, seq, ())

    np.testing.assert_array_equal(row, raw + np.arange(VOCAB, dtype=np.float32) % 7)


def test_a_bias_of_a_token_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="no token -1"):
        Adjustments(SamplingParams(max_tokens=1, logit_bias=((-1, 1.0),)), VOCAB, ())


def test_stop_tokens_beyond_the_vocabulary_mask_nothing() -> None:
    seq = make_seq([1], 1, min_tokens=3, stop_token_ids=(VOCAB, 5))
    row = Adjustments(seq.sampling, VOCAB, (2, VOCAB + 3)).apply(np.zeros(VOCAB, dtype=np.float32), seq, ())

    assert np.flatnonzero(np.isinf(row)).tolist() == [2, 5]


def masked(seq: Sequence, ahead: list[int] | None = None) -> list[int]:
    """The tokens that can't be chosen from a row of zeros."""
    row = Adjustments(seq.sampling, VOCAB, ()).apply(np.zeros(VOCAB, dtype=np.float32), seq, ahead or [])
    return np.flatnonzero(np.isinf(row)).tolist()


def test_only_allowed_tokens_are_left() -> None:
    seq = make_seq([1], 1, allowed_token_ids=pack_token_ids([5, 9, VOCAB, 2**31]), logit_bias=((7, 100.0),))

    assert masked(seq) == sorted({*range(VOCAB)} - {5, 9})
    assert masked(make_seq([1], 1)) == []


def test_a_word_of_one_token_never_comes() -> None:
    assert masked(make_seq([1], 1, bad_words=((5,), (9,), (VOCAB + 1,)))) == [5, 9]
    assert masked(make_seq([1], 1, bad_words=((5,),), allowed_token_ids=pack_token_ids([5, 6]))) == [
        token_id for token_id in range(VOCAB) if token_id != 6
    ]


@pytest.mark.parametrize(
    ("prompt", "output", "ahead", "expected"),
    [
        ([1], [], [], []),
        ([1, 5], [], [], []),  # the prompt is not the answer
        ([5], [6], [], []),
        ([1], [5], [], [6]),
        ([1], [4, 5], [], [6, 7]),
        ([1], [4], [5], [6, 7]),
        ([1], [], [4, 5], [6, 7]),
        ([1], [4, 5, 8], [], []),
    ],
)
def test_the_last_token_of_a_bad_word_does_not_come_behind_the_others(
    prompt: list[int], output: list[int], ahead: list[int], expected: list[int]
) -> None:
    seq = make_seq([*prompt, *output], len(prompt), bad_words=((5, 6), (4, 5, 7)))

    assert masked(seq, ahead) == expected


def applied(changes: Changes, raw: np.ndarray, last: int | None = None) -> np.ndarray:
    """What a device makes of a row, in float32. last: the sequence's last token, where the host does not know it."""
    assert (last is None) is (changes.last_row is None)
    row = raw.copy()
    row[changes.biased] += changes.bias
    struck: dict[int, float] = {}
    if changes.listed is not None:
        listed = changes.listed.since(0)
        assert listed.places.tolist() == list(range(changes.listed.size))
        struck = dict(zip(listed.ids.tolist(), listed.produced.tolist(), strict=True))
        struck |= {} if last is None else {last: struck.get(last, 0) + 1}
    struck |= dict(zip(changes.counted.tolist(), changes.produced.tolist(), strict=True))
    ids, produced = np.array(list(struck), dtype=np.int64), np.array(list(struck.values()), dtype=np.float32)
    values, penalty = row[ids], np.float32(changes.repetition)
    values = np.where(values > 0, values / penalty, values * penalty)
    presence = np.where(produced > 0, np.float32(changes.presence), np.float32(0))
    row[ids] = values - (np.float32(changes.frequency) * produced + presence)
    needed = changes.needed if len(changes.needed) else np.full(len(changes.banned), ANY)
    row[changes.banned[(needed == ANY) | (needed == last)]] = -np.inf
    if changes.allowed is not None:
        bits = np.unpackbits(changes.allowed.view(np.uint8), count=len(row), bitorder="little")
        row[bits == 0] = -np.inf
    return row


@pytest.mark.parametrize("seed", range(20))
def test_the_changes_told_to_a_device_are_those_of_the_row(seed: int) -> None:
    draw = np.random.default_rng(seed)
    token_ids = draw.integers(VOCAB, size=30).tolist()
    seq = make_seq(
        token_ids,
        12,
        logit_bias=((5, 2.5), (token_ids[3], -1.25), (VOCAB + 1, 1.0)),
        repetition_penalty=(1.0, 1.3)[seed % 2],
        frequency_penalty=(0.0, 0.7)[seed // 2 % 2],
        presence_penalty=(0.3, -0.4)[seed % 2],
        min_tokens=(0, 20)[seed % 2],
        stop_token_ids=(9,),
        allowed_token_ids=pack_token_ids(draw.integers(VOCAB, size=200).tolist()) if seed % 3 else b"",
        bad_words=((6,), (token_ids[-1], 7), (token_ids[-1], 11, 8)),
    )
    raw = draw.standard_normal(VOCAB, dtype=np.float32)
    own = Adjustments(seq.sampling, VOCAB, (2,))

    for ahead in ([], [11], [11, 11]):
        changes = own.changes(seq, ahead)

        np.testing.assert_array_equal(applied(changes, raw), own.apply(raw, seq, ahead))
        assert len(set(changes.counted.tolist())) == len(changes.counted)


@pytest.mark.parametrize("seed", range(40))
def test_a_last_token_that_only_the_device_knows_changes_the_row_as_if_it_were_known(seed: int) -> None:
    """Few different tokens, so the beginnings of bad words are there, some of them across the prompt's end."""
    draw = np.random.default_rng(seed)
    words = [tuple(draw.integers(5, size=draw.integers(1, 5)).tolist()) for _ in range(12)]
    seq = make_seq(
        draw.integers(5, size=9).tolist(),
        int(draw.integers(1, 9)),
        repetition_penalty=(1.0, 1.3)[seed % 2],
        frequency_penalty=(0.0, 0.7)[seed // 2 % 2],
        min_tokens=(0, 6)[seed % 2],
        stop_token_ids=(9,),
        bad_words=tuple(words),
    )
    raw, host, told = draw.standard_normal(VOCAB, dtype=np.float32), *(Adjustments(seq.sampling, VOCAB, ()),) * 2

    for last in (*range(5), 77):
        seq.token_ids.append(-1 - 3)
        changes = told.changes(seq, [])
        assert changes.last_row == 3
        got = applied(changes, raw, last)
        seq.token_ids[-1] = last

        np.testing.assert_array_equal(got, host.apply(raw, seq, ()))


def test_a_list_is_told_what_came_since() -> None:
    seq = make_seq([5, 6, 5, 7], 2, presence_penalty=1.0)
    own = Adjustments(seq.sampling, VOCAB, ())
    first = own.changes(seq, []).listed
    assert first is not None
    assert (first.owner, first.num_tokens, first.size) == (seq, 4, 3)

    seq.token_ids += [7, 8, -1]
    listed = own.changes(seq, []).listed
    assert listed is not None
    since = listed.since(first.num_tokens)

    assert (listed.num_tokens, listed.size) == (6, 4)
    assert sorted(zip(*(each.tolist() for each in since), strict=True)) == [(2, 7, 2), (3, 8, 1)]
    assert len(listed.since(6).ids) == 0


def test_a_token_beyond_the_vocabulary_is_not_told_to_a_device() -> None:
    seq = make_seq([VOCAB], 1, presence_penalty=1.0)

    with pytest.raises(IndexError, match=f"no token {VOCAB}"):
        Adjustments(seq.sampling, VOCAB, ()).changes(seq, [])
