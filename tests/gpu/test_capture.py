"""Recordings, and operations between ranks, in their smallest form: what the rest of the engine's recorded steps takes
for granted. Without a GPU the same calls without recording, over gloo."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.models.capture import Compute, GraphRecorder, NoRecorder, Recorder
from penstock.workers.compute.parallel.group import Group, connect
from penstock.workers.compute.parallel.shares import Share
from tests.gpu.cases import DEVICE

IS_GPU = DEVICE.type == "cuda"


def make_recorder() -> Recorder:
    return GraphRecorder(DEVICE) if IS_GPU else NoRecorder()


def doubled(source: Tensor, target: Tensor) -> Compute:
    """Writes twice the source, by way of a tensor of its own."""

    def compute() -> None:
        between = source + source
        target.copy_(between)

    return compute


def test_recordings_of_one_pool_compute_from_what_stands_in_their_memory_each_time() -> None:
    recorder = make_recorder()
    source = torch.zeros(1 << 16, device=DEVICE)
    middle, target = torch.zeros_like(source), torch.zeros_like(source)
    first, second = recorder.record(doubled(source, middle)), recorder.record(doubled(middle, target))

    for value in range(5):
        source.fill_(value)
        first()
        torch.full_like(source, -1.0)  # memory that nobody records comes and goes meanwhile
        second()
        assert target.eq(4 * value).all()


def test_a_recording_is_replayed_from_another_thread() -> None:
    source, target = torch.full((8,), 3.0, device=DEVICE), torch.zeros(8, device=DEVICE)
    run = make_recorder().record(doubled(source, target))
    target.zero_()

    def replay() -> None:
        with torch.inference_mode():
            run()

    thread = threading.Thread(target=replay)
    thread.start()
    thread.join()

    assert target.cpu().eq(6).all()


def test_what_fails_while_it_is_recorded_leaves_the_next_recording_whole() -> None:
    recorder = make_recorder()
    source, target = torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE)

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        recorder.record(fail)()
    run = recorder.record(doubled(source, target))
    run()

    assert target.cpu().eq(2).all()


def test_a_rank_alone_adds_and_joins_also_while_it_records(tmp_path: Path) -> None:
    share = Share(0, range(2), range(1), range(4), range(10))
    group = Group(connect(tmp_path / "meeting", 0, 1, DEVICE, 60.0), [share], 0)
    x, logits = torch.arange(6.0, device=DEVICE).view(2, 3), torch.rand(2, 10, device=DEVICE)
    total, joined = torch.zeros_like(x), torch.zeros_like(logits)
    assert torch.equal(group.add(x.clone()), x)

    def exchange() -> None:
        total.copy_(group.add(x.clone()))
        joined.copy_(group.join(logits))

    run = make_recorder().record(exchange)
    total.zero_()
    joined.zero_()
    run()

    assert torch.equal(total, x)
    assert torch.equal(joined, logits)
