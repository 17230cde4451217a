"""What computes the engine's steps, as the engine sees it: the model on its device, or the timed one."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock.wire.frames import Constraint, Stairs
from penstock.workers.engine.sequence import Grammar, Resident, Sampled, Sequence, Step


class Runner(Protocol):
    """Computes steps, one after the other."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step goes on by itself, on a device, when `launch` has returned: the host has time meanwhile."""

    @property
    def stairs(self) -> Stairs | None:
        """The recorded steps, with the places of their cliffs, whose seconds the probe finds; None: there are none."""

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        """Begin to compute the chunks' KV into their block tables, perhaps with drafts of the runner's own behind them.
        What is returned waits for the end, and gives for each chunk what `Scheduler.commit` wants; it is called once,
        before the next launch or, if `can_run_ahead`, behind it. Either may raise. A runner that is not asynchronous
        computes at once, here.

        The sequences in `step.preempted` have lost their blocks and will start over.
        """

    def can_run_ahead(self, step: Step) -> bool:
        """Whether another step can be launched behind this one, the last that was launched, before what waits for it is
        called. A token id of -1 - row is then that of a row of this one."""

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> Resident:
        """Read an adapter, in any thread. Raises PenstockError where it does not fit, OSError."""

    def unload_adapter(self, adapter: Resident) -> None:
        """Take back an adapter that has left its slot, in any thread; it may be loaded again soon."""

    def forget_adapter(self, digest: str) -> None:
        """Keep nothing of a deleted adapter but what sequences still use; in any thread."""

    @property
    def has_constraints(self) -> bool:
        """Whether answers can be made to keep to a constraint."""

    def compile_grammar(self, constraint: Constraint, tenant: str, output: list[int]) -> Grammar:
        """Compile a constraint, in any thread. output: token ids that the answer has already. Raises InvalidRequest
        where the constraint can't be enforced, exceeds a limit, or does not fit the output."""

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept of a sequence; called once when it ends, also if it never ran."""
