from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.engine.sequence import SeqOutput, Sequence, Status, Times
from penstock.workers.engine.timing import TimingRecorder


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def sequence(times: Times | None) -> Sequence:
    return Sequence("r", [1, 2], SamplingParams(8), 2, [], b"", arrival_s=10.0, times=times)


def test_admission_and_first_and_last_token_are_noted() -> None:
    clock, unix = Clock(10.5), Clock(1000.0)
    recorder, times = TimingRecorder(clock, unix), Times()
    seq = sequence(times)
    recorder.add(seq)

    recorder.record_admissions()  # still waiting
    assert times.admitted_s is None
    seq.status, clock.now, unix.now = Status.RUNNING, 11.0, 1001.0
    recorder.record_admissions()
    unix.now = 1002.0
    recorder.record_tokens([])  # a chunk of the prompt
    for now in (1003.0, 1004.0):
        clock.now += 1
        recorder.record_admissions()
        unix.now = now
        recorder.record_tokens([SeqOutput(seq, [7])])

    assert times == Times(wait_s=1.0, admitted_s=1001.0, first_token_s=1003.0, last_token_s=1004.0)


def test_an_end_without_a_token_is_no_last_token() -> None:
    recorder, times = TimingRecorder(Clock(10.0), Clock(1000.0)), Times()
    seq = sequence(times)
    recorder.add(seq)

    recorder.record_tokens([SeqOutput(seq, [], finish=Finish.ERROR)])

    assert times == Times()


def test_sequences_that_are_not_traced_are_left_alone() -> None:
    recorder, plain, traced = TimingRecorder(Clock(10.0), Clock(1000.0)), sequence(None), sequence(Times())
    recorder.add(traced)

    recorder.record_tokens([SeqOutput(plain, [1]), SeqOutput(traced, [1])])

    assert plain.times is None
    assert traced.times is not None
    assert traced.times.first_token_s == 1000.0


def test_an_ended_sequence_is_recorded_no_more() -> None:
    recorder, times = TimingRecorder(Clock(10.0), Clock(1000.0)), Times()
    seq = sequence(times)
    recorder.add(seq)
    seq.finish, seq.status = Finish.ABORT, Status.FINISHED

    recorder.record_admissions()
    recorder.record_tokens([SeqOutput(seq, [1])])

    assert times == Times()
