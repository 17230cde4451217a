from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.engine.sequence import SeqOutput, Sequence, Status, Times
from penstock.workers.engine.watch import Watch


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def sequence(times: Times | None) -> Sequence:
    return Sequence("r", [1, 2], SamplingParams(8), 2, [], b"", arrival_s=10.0, times=times)


def test_admission_and_first_and_last_token_are_noted() -> None:
    clock, unix = Clock(10.5), Clock(1000.0)
    watch, times = Watch(clock, unix), Times()
    seq = sequence(times)
    watch.add(seq)

    watch.scheduled()  # still waiting
    assert times.admitted_s is None
    seq.status, clock.now, unix.now = Status.RUNNING, 11.0, 1001.0
    watch.scheduled()
    unix.now = 1002.0
    watch.committed([])  # a chunk of the prompt
    for now in (1003.0, 1004.0):
        clock.now += 1
        watch.scheduled()
        unix.now = now
        watch.committed([SeqOutput(seq, [7])])

    assert times == Times(wait_s=1.0, admitted_s=1001.0, first_token_s=1003.0, last_token_s=1004.0)


def test_an_end_without_a_token_is_no_last_token() -> None:
    watch, times = Watch(Clock(10.0), Clock(1000.0)), Times()
    seq = sequence(times)
    watch.add(seq)

    watch.committed([SeqOutput(seq, [], finish=Finish.ERROR)])

    assert times == Times()


def test_sequences_that_are_not_traced_are_left_alone() -> None:
    watch, plain, traced = Watch(Clock(10.0), Clock(1000.0)), sequence(None), sequence(Times())
    watch.add(traced)

    watch.committed([SeqOutput(plain, [1]), SeqOutput(traced, [1])])

    assert plain.times is None
    assert traced.times is not None
    assert traced.times.first_token_s == 1000.0


def test_an_ended_sequence_is_watched_no_more() -> None:
    watch, times = Watch(Clock(10.0), Clock(1000.0)), Times()
    seq = sequence(times)
    watch.add(seq)
    seq.finish, seq.status = Finish.ABORT, Status.FINISHED

    watch.scheduled()
    watch.committed([SeqOutput(seq, [1])])

    assert times == Times()
