import numpy as np
import pytest
import torch

from penstock.workers.compute.triton.staging import ALIGNMENT, FIRST_BYTES, Array, Staging, lay_out

CPU = torch.device("cpu")
ARRAYS: list[Array] = [
    np.arange(5, dtype=np.int32),
    np.arange(12, dtype=np.int64).reshape(2, 6),
    np.empty((0, 3), dtype=np.float32),
    np.array([[1.5, -2.0]]),
    np.arange(256, dtype=np.uint8),
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
]


class LoggedEvent:
    """An event of a copy, which notes who records it and who waits for it."""

    log: list[tuple[str, int]]

    def __init__(self, log: list[tuple[str, int]], number: int) -> None:
        self.log = log
        self.number = number

    def record(self, stream: object) -> None:
        self.log.append(("record", self.number))

    def synchronize(self) -> None:
        self.log.append(("wait", self.number))


@pytest.mark.parametrize(
    ("sizes", "starts", "total"),
    [((), [], 0), ((1, ALIGNMENT, 0, 5), [0, ALIGNMENT, 2 * ALIGNMENT, 2 * ALIGNMENT], 3 * ALIGNMENT), ((0,), [0], 0)],
)
def test_arrays_lie_side_by_side_at_aligned_places(sizes: tuple[int, ...], starts: list[int], total: int) -> None:
    assert lay_out(sizes) == (starts, total)


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_is_sent_arrives_as_it_was_in_one_piece_of_memory(is_beside: bool) -> None:
    sent = Staging(CPU, is_beside=is_beside).send(ARRAYS)

    for ours, theirs in zip(sent, ARRAYS, strict=True):
        assert torch.equal(ours, torch.from_numpy(np.ascontiguousarray(theirs)))
        assert ours.dtype == torch.from_numpy(theirs[:0]).dtype
        assert not ours.storage_offset() * ours.element_size() % ALIGNMENT
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1


def test_what_was_sent_stays_when_more_is_sent() -> None:
    staging = Staging(CPU)
    sent = [staging.send([np.full(9, number)])[0] for number in range(4)]

    assert [tensor.tolist() for tensor in sent] == [[number] * 9 for number in range(4)]


def test_arrays_go_to_the_memory_that_is_given() -> None:
    memory = torch.zeros(4 * ALIGNMENT, dtype=torch.uint8)

    first, second = Staging(CPU).send([np.arange(3), np.arange(4, dtype=np.int32)], memory)

    assert first.data_ptr() == memory.data_ptr()
    assert second.data_ptr() == memory.data_ptr() + ALIGNMENT
    assert memory[: 8 * 3].view(torch.int64).tolist() == [0, 1, 2]


def test_a_buffer_is_filled_again_only_behind_the_copy_that_read_it() -> None:
    log: list[tuple[str, int]] = []
    staging = Staging(CPU, make_done=lambda: LoggedEvent(log, len(log)))
    for number in range(4):
        staging.send([np.full(9, number)])

    assert log == [("record", 0), ("record", 1), ("wait", 0), ("record", 0), ("wait", 1), ("record", 1)]


def test_a_buffer_grows_when_the_copy_that_read_it_is_done() -> None:
    log: list[tuple[str, int]] = []
    staging = Staging(CPU, make_done=lambda: LoggedEvent(log, len(log)))
    large = np.arange(FIRST_BYTES, dtype=np.int64)

    assert staging.send([np.zeros(1)])[0].tolist() == [0]
    for _ in range(2):
        assert staging.send([large])[0].tolist() == large.tolist()
    assert log == [("record", 0), ("record", 1), ("wait", 0), ("record", 3)]
