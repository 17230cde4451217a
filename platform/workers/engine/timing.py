"""Times of traced sequences: when each was admitted, got its first token and its last. Belongs to the engine's thread.

Most often no sequence is traced; a step then costs one test for emptiness.
"""

from collections.abc import Callable, Iterable

from penstock.workers.engine.sequence import SeqOutput, Sequence, Status


class TimingRecorder:
    """Fills in the `times` of the sequences that were added to it."""

    def __init__(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        """clock: the monotonic clock of `Sequence.arrival_s`. unix_clock: the clock of the recorded times."""
        self._clock = clock
        self._unix_clock = unix_clock
        self._seqs: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Record the times of a sequence, which has `times`, until it ends."""
        self._seqs.append(seq)

    def record_admissions(self) -> None:
        """Note which sequences run for the first time; call it after a step is scheduled and before it runs."""
        if not self._seqs:
            return
        self._seqs = [seq for seq in self._seqs if seq.finish is None]
        for seq in self._seqs:
            times = seq.times
            if times is not None and times.admitted_s is None and seq.status is Status.RUNNING:
                times.admitted_s = self._unix_clock()
                times.wait_s = self._clock() - seq.arrival_s

    def record_tokens(self, outputs: Iterable[SeqOutput]) -> None:
        """Note which sequences got tokens; call it when a step is committed."""
        if not self._seqs:
            return
        now = self._unix_clock()
        for output in outputs:
            times = output.seq.times
            if times is not None and output.token_ids:
                times.last_token_s = now
                if times.first_token_s is None:
                    times.first_token_s = now
