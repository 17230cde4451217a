import math

import numpy as np
import torch

from penstock.workers.compute.noise import stream_start
from penstock.workers.compute.triton.sampling.sampling_inputs import (
    ANY,
    EVERY_KEY,
    KNOWN,
    MOST_TOP,
    Changes,
    Counted,
    Listed,
    Located,
    RowInputs,
    can_choose,
    make_sampling_inputs,
    pack_words,
)
from penstock.workers.compute.truncation import MOST_TOKENS, least_of_min_p

VOCAB = 1000


def key(score: float) -> int:
    return int(np.float32(score).view(np.int32)) & EVERY_KEY


def ids(*token_ids: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(token_ids, dtype=np.int64)


def floats(*values: float) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.array(values, dtype=np.float32)


def test_all_but_many_log_probabilities_and_the_weights_of_a_huge_vocabulary_is_chosen_on_the_gpu() -> None:
    assert can_choose(RowInputs(1.0, top_k=VOCAB - 1, top_p=0.5, num_top=MOST_TOP), VOCAB)
    assert not can_choose(RowInputs(num_top=MOST_TOP + 1), VOCAB)
    assert can_choose(RowInputs(1.0, top_k=9), MOST_TOKENS)
    assert can_choose(RowInputs(0.0, top_p=0.5), MOST_TOKENS)
    assert not can_choose(RowInputs(1.0, top_p=0.5), MOST_TOKENS)
    assert not can_choose(RowInputs(num_top=0), MOST_TOKENS)


def test_each_row_has_its_noise_temperature_and_bounds() -> None:
    stream = stream_start(2**63 + 5, 3)
    inputs = make_sampling_inputs(
        [
            RowInputs(0.5, 7, 0.25, least_of_min_p(0.5), stream),
            RowInputs(1.0, top_k=VOCAB),
            RowInputs(0.0, 9, 0.5, least_of_min_p(0.5)),
        ],
        VOCAB,
    )
    tensors = inputs.tensors

    assert tensors.streams[0].item() % 2**64 == stream
    assert tensors.temperatures.tolist() == [0.5, 1.0, 0.0]
    assert tensors.least_keys.tolist() == [key(least_of_min_p(0.5)), key(math.inf), key(math.inf)]
    assert tensors.top_k.tolist() == [7, 0, 0]
    assert tensors.top_p.tolist() == [0.25, 1.0, 1.0]
    assert (inputs.has_top_k, inputs.has_top_p, inputs.num_top) == (True, True, 0)
    assert not make_sampling_inputs([RowInputs(0.0, 9, 0.5)], VOCAB).has_top_p


def test_a_key_grows_as_a_score_falls() -> None:
    scores = [0.0, -1e-40, -1e-3, -0.5, -1.0, -30.0, -math.inf]

    assert sorted(scores, key=key) == scores
    assert key(-0.0) == key(0.0)
    assert key(-math.inf) < EVERY_KEY


def test_changes_are_lists_of_places_in_the_rows_that_are_changed() -> None:
    allowed = pack_words(np.arange(VOCAB) % 3 == 0)
    rows = [
        RowInputs(),
        RowInputs(changes=Changes(ids(5, 9), floats(1.5, -2.0), banned=ids(3, 999))),
        RowInputs(num_top=4),
        RowInputs(
            num_top=2,
            changes=Changes(counted=ids(7, 8), produced=floats(0, 3), repetition=1.25, presence=0.5, allowed=allowed),
        ),
    ]

    inputs = make_sampling_inputs(rows, VOCAB)
    own = inputs.tensors

    assert own.sources.tolist() == [-1, 0, -1, 1]
    assert own.changed_rows.tolist() == [1, 3]
    assert (own.bias_places.tolist(), own.bias.tolist()) == ([5, 9], [1.5, -2.0])
    assert (own.penalized.tolist(), own.list_sizes.tolist(), own.own_starts.tolist()) == ([1], [0], [0, 2])
    assert (own.own_ids.tolist(), own.own_produced.tolist()) == ([7, 8], [0.0, 3.0])
    assert own.penalties.tolist() == [[1.25, 0.0, 0.5]]
    assert (own.banned_places.tolist(), own.needed.tolist()) == ([3, 999], [ANY, ANY])
    assert own.last_rows.tolist() == [KNOWN, KNOWN]
    assert own.mask_rows.tolist() == [1]
    assert own.mask_words.shape == (1, 32)
    words = own.mask_words[0].numpy()
    assert [bool(words[token_id // 32] >> token_id % 32 & 1) for token_id in range(VOCAB)] == [
        token_id % 3 == 0 for token_id in range(VOCAB)
    ]
    assert (own.logprob_rows.tolist(), inputs.num_top) == ([2, 3], 4)


def test_a_list_is_brought_where_it_is_and_a_row_of_the_step_before_is_named() -> None:
    known = Counted(ids(0), ids(9), floats(2))
    rows = [
        RowInputs(changes=Changes(listed=Listed("a", 4, 3, lambda _: known), last_row=6)),
        RowInputs(changes=Changes(banned=ids(5, 6), needed=ids(8, ANY), last_row=0)),
        RowInputs(changes=Changes(listed=Listed("b", 1, 1, lambda _: known), counted=ids(4), produced=floats(1))),
    ]
    where = {"a": Located(640, ids(648, 640), ids(1, 2)), "b": Located(320, ids(320), ids(3))}

    own = make_sampling_inputs(rows, VOCAB, lambda listed: where[listed.owner]).tensors  # type: ignore[index]

    assert own.last_rows.tolist() == [6, 0, KNOWN]
    assert (own.list_targets.tolist(), own.list_entries.tolist()) == ([648, 640, 320], [1, 2, 3])
    assert (own.penalized.tolist(), own.lists.tolist(), own.list_sizes.tolist()) == ([0, 2], [640, 320], [3, 1])
    assert (own.own_starts.tolist(), own.own_ids.tolist()) == ([0, 0, 1], [4])
    assert (own.banned_places.tolist(), own.needed.tolist()) == ([VOCAB + 5, VOCAB + 6], [8, ANY])


def test_what_is_moved_stays_the_same_and_is_aligned() -> None:
    allowed = pack_words(np.arange(VOCAB) % 7 > 0)
    for rows in (
        [RowInputs()],
        [RowInputs(1.0, changes=Changes(ids(2), floats(1), banned=ids(3), allowed=allowed)), RowInputs(num_top=1)] * 3,
    ):
        inputs = make_sampling_inputs(rows, VOCAB)
        moved = inputs.on(torch.device("cpu"))

        assert moved[1:] == inputs[1:]
        for ours, theirs in zip(inputs.tensors, moved.tensors, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype
            assert theirs.data_ptr() % 16 == 0
