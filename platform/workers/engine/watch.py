"""Notes when traced sequences are computed, for the engine's thread. Mostly there are none, and then it costs a test
for emptiness a step."""

from collections.abc import Callable, Iterable

from penstock.workers.engine.sequence import SeqOutput, Sequence, Status


class Watch:
    """clock: of `Sequence.arrival_s`. unix_clock: of what is noted."""

    def __init__(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unix_clock = unix_clock
        self._seqs: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """One that has `times`, until it ends."""
        self._seqs.append(seq)

    def scheduled(self) -> None:
        """A step is about to run."""
        if not self._seqs:
            return
        self._seqs = [seq for seq in self._seqs if seq.finish is None]
        for seq in self._seqs:
            times = seq.times
            if times is not None and times.admitted_s is None and seq.status is Status.RUNNING:
                times.admitted_s = self._unix_clock()
                times.wait_s = self._clock() - seq.arrival_s

    def committed(self, outputs: Iterable[SeqOutput]) -> None:
        """A step has run."""
        if not self._seqs:
            return
        now = self._unix_clock()
        for output in outputs:
            times = output.seq.times
            if times is not None and output.token_ids:
                times.last_token_s = now
                if times.first_token_s is None:
                    times.first_token_s = now
