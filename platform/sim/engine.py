"""The clock of a modelled replica: steps that follow each other without a gap while there is work.

What a step holds and how long it takes is the batch's affair (`batching`, `real_batching`). Invariant: `advance(now)`
leaves the state as it is after the last step that ended until `now`.
"""

from typing import NamedTuple, Protocol

from penstock.sim.sequence import ModelledSequence
from penstock.workers.engine.key_changes import KeyChanges

NEVER_S = float("inf")


class EngineState(NamedTuple):
    """The numbers of a load report; fields as in `penstock.wire.frames.Load`."""

    num_running: int
    num_waiting: int
    prefill_tokens: int
    kv_tokens: int
    free_blocks: int
    unplaced_tokens: int
    last_sid: int
    num_steps: int
    """Steps that had ended."""
    num_places: int = 0
    """Sequences that may be there at once now."""


class Batch(Protocol):
    """The sequences of an engine, step by step."""

    finished: list[ModelledSequence]
    """Sequences that have ended since the owner last emptied the list, in order."""
    noted: EngineState | None
    """The state at the latest step that was due for a report; None: none since the owner took the last one."""
    num_output_tokens: int

    def begin(self, now: float, submitted: list[ModelledSequence], aborted: list[ModelledSequence]) -> float:
        """Take what has come, and begin a step. Returns its end, or NEVER_S if there is no work."""

    def decode(self, end_s: float, now: float) -> float:
        """Let steps come to their ends until `now` that nothing can interrupt, the first at `end_s`. Returns the end of
        the step that is then under way."""

    def commit(self, ended_s: float) -> None:
        """Take over what the step has computed."""

    def state(self) -> EngineState:
        """The numbers as they are after the last step."""

    def token_times(self, seq: ModelledSequence) -> list[float]:
        """Times of the tokens that a sequence has got."""

    def num_output(self, seq: ModelledSequence) -> int:
        """Tokens that a sequence has got."""

    def drain_changes(self) -> KeyChanges | None:
        """Changes of the cached keys that others may want, since the last call. Returns None if there are none."""


class Engine:
    """The engine of one replica."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.end_s = NEVER_S
        """End of the step that is under way; infinite while there is none."""
        self._submitted: list[ModelledSequence] = []
        self._aborted: list[ModelledSequence] = []

    def submit(self, seq: ModelledSequence, now: float) -> None:
        """Take a sequence; the step that is under way goes on without it."""
        self._submitted.append(seq)
        if self.end_s == NEVER_S:
            self._begin(now)

    def abort(self, seq: ModelledSequence, now: float) -> None:
        """Drop a sequence with the step that is under way. Those that have ended are ignored."""
        self._aborted.append(seq)
        if self.end_s == NEVER_S:
            self._begin(now)

    def advance(self, now: float) -> None:
        """Let all steps come to their ends that end until `now`."""
        while self.end_s <= now:
            if not self._submitted and not self._aborted:
                self.end_s = self.batch.decode(self.end_s, now)
                if self.end_s > now:
                    return
            ended_s = self.end_s
            self.batch.commit(ended_s)
            self._begin(ended_s)

    def _begin(self, now: float) -> None:
        self.end_s = self.batch.begin(now, self._submitted, self._aborted)
        self._submitted.clear()
        self._aborted.clear()
