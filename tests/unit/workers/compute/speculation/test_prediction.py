import pytest

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.speculation.prediction import PredictionDrafter
from penstock.workers.engine.sequence import Chunk, Sequence


def make_seq(prediction: list[int], prompt: tuple[int, ...] = (1, 2)) -> Sequence:
    params = SamplingParams(max_tokens=100)
    return Sequence("r", [*prompt], params, len(prompt), [], b"", 0.0, prediction=prediction)


def propose(drafter: PredictionDrafter, seq: Sequence, count: int = 4) -> list[int]:
    [draft] = drafter.propose([Chunk(seq, seq.num_tokens - 1, 1, max_drafts=count)])
    return draft


class Constant:
    """A drafter that always proposes the same."""

    def __init__(self) -> None:
        self.asked: list[Sequence] = []
        self.forgotten: list[Sequence] = []

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        self.asked += [chunk.seq for chunk in chunks]
        return [[99] for _ in chunks]

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)


def test_what_comes_next_in_the_prediction_is_proposed() -> None:
    drafter, seq = PredictionDrafter(), make_seq([10, 11, 12, 13, 14, 15])

    assert propose(drafter, seq) == [10, 11, 12, 13]
    seq.token_ids += [10, 11, 12]
    assert propose(drafter, seq) == [13, 14, 15]
    seq.token_ids += [13, 14, 15]
    assert propose(drafter, seq) == []


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([10, 11, 99], []),  # lost
        ([10, 11, 99, 13], []),  # one token is found anywhere
        ([10, 11, 99, 13, 14], [15, 16, 17, 18]),  # changed
        ([10, 11, 99, 98, 12, 13], [14, 15, 16, 17]),  # put in
        ([10, 11, 14, 15], [16, 17, 18, 19]),  # left out
        ([10, 11, 12, 13, 14, 15, 10, 11], [12, 13, 14, 15]),  # from the beginning again
        ([99], []),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_that_differs_is_followed_again_behind_it(
    output: list[int], expected: list[int], at_once: bool
) -> None:
    drafter, seq = PredictionDrafter(), make_seq(list(range(10, 30)))
    for token_id in [] if at_once else output:
        seq.token_ids.append(token_id)
        draft = propose(drafter, seq)
    if at_once:
        seq.token_ids += output
        draft = propose(drafter, seq)

    assert draft == expected


def test_a_place_after_the_old_one_goes_before_an_earlier_one() -> None:
    drafter, seq = PredictionDrafter(), make_seq([5, 6, 7, 8, 9, 5, 6, 20, 21])
    seq.token_ids += [5, 6, 7, 99, 5, 6]

    assert propose(drafter, seq) == [20, 21]


def test_tokens_are_found_at_whole_tokens_only() -> None:
    drafter, seq = PredictionDrafter(), make_seq([0x01000000, 0x00000002, 0x02000001, 7, 1, 2, 8])
    seq.token_ids += [99, 1, 2]

    assert propose(drafter, seq) == [8]


def test_what_no_prediction_can_guess_is_left_to_the_pools_drafter() -> None:
    other = Constant()
    drafter, predicted, plain, lost = PredictionDrafter(other), make_seq([10, 11]), make_seq([]), make_seq([10, 11])
    lost.token_ids.append(50)
    chunks = [Chunk(seq, seq.num_tokens - 1, 1, max_drafts=2) for seq in (predicted, plain, lost)]

    assert drafter.propose(chunks) == [[10, 11], [99], [99]]
    assert other.asked == [plain, lost]
    drafter.forget(predicted)
    assert other.forgotten == [predicted]
