"""The other ranks, as rank 0 sees them: their processes, orders to all of them, and whether they are still together.

Ranks compute alike, so what fails on one fails on all, at the same operation of their `Group`, and all go on. If one
has ended, or fails otherwise than the others do, the model is no longer whole: `on_loss` is called once, with a
sentence. In a replica that ends the process (`end_process`), since nothing else gets its thread out of an operation
that waits for a rank; to gateways it is a replica that is lost. The same where a rank is lost while all meet, if rank 0
does not notice within GRACE_S. A rank that hangs makes the step fail or stall, after `engine.stall_s`; so nothing here
waits without an end.
"""

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait

from penstock.base.errors import ConfigError
from penstock.wire.errors import EngineFault, InvalidRequest
from penstock.workers.compute.parallel.messages import (
    Answer,
    Beginning,
    Built,
    Failed,
    LoadAdapter,
    Loaded,
    Meet,
    Order,
    receive,
    send,
)
from penstock.workers.compute.parallel.part import PartPlan

GRACE_S = 5.0
"""Time in which all ranks must have failed where one has, seconds."""
START_S = 1800.0
"""Time to read the weights in, seconds."""
LOAD_S = 120.0
"""Time to read an adapter in, seconds."""
END_S = 5.0
"""Time that ranks get to end by themselves, seconds."""

_log = logging.getLogger("penstock.ranks")


def end_process(sentence: str) -> None:
    """End this process at once, as when a rank is lost."""
    _log.critical("%s", sentence)
    logging.shutdown()
    os._exit(1)


class Ranks:
    """Ranks 1 to size - 1. Started when built."""

    def __init__(self, plan: PartPlan, on_loss: Callable[[str], None] = end_process) -> None:
        """`on_loss`: called in another thread, once the ranks serve."""
        self.size = plan.size
        self._on_loss = on_loss
        self._steps: list[Connection] = []
        self._sides: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._changed = threading.Condition()
        self._loss: str | None = None
        self._is_serving = False
        self._is_meeting = False
        """Whether ranks have been told to meet: from then on rank 0 may wait for one that is lost."""
        self._lost_s: float | None = None
        """Time at which a rank was lost, of the monotonic clock, while rank 0 does not know."""
        self._is_closing = False
        self._num_built = 0
        self._failures: dict[int, dict[int, int]] = {}
        """Operations until each rank's failure, by step and rank."""
        self._deadlines: dict[int, float] = {}
        """Time by which a step must have failed on all ranks, by step."""
        self._loads: dict[int, queue.SimpleQueue[str | None]] = {}
        for rank in range(1, plan.size):
            self._start(rank)
            send([self._steps[-1]], Beginning(plan, rank))
        self._watcher = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._watcher.start()

    def _start(self, rank: int) -> None:
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        numbers = [end.fileno() for end in theirs]
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "penstock.workers.compute.parallel.rank", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=numbers,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,  # a terminal's Ctrl-C is for the platform, which ends its replicas in order
            )
        )
        for end in theirs:
            end.close()
        for connections, end in zip((self._steps, self._sides), ours, strict=True):
            connections.append(Connection(end.detach()))
        _log.info("rank started", extra={"rank": rank, "pid": self._processes[-1].pid})

    @property
    def pids(self) -> list[int]:
        """The processes' ids, of rank 1 first."""
        return [process.pid for process in self._processes]

    def wait_built(self, times: int) -> None:
        """Wait until all ranks have answered so often that they are built; the second time they serve. Raises
        ConfigError with a rank's own sentence, EngineFault."""
        with self._changed:
            wanted = times * (self.size - 1)
            in_time = self._changed.wait_for(lambda: self._num_built >= wanted or self._loss is not None, START_S)
            self.check()
            if not in_time:
                raise EngineFault(f"Not all of {self.size} ranks had read their weights after {START_S:.0f} s.")
            self._is_serving = times > 1

    def meet(self) -> None:
        """Have the ranks meet, which have all been built; rank 0 then comes too. Raises EngineFault."""
        self.send(Meet())
        with self._changed:
            self._is_meeting = True

    def check(self) -> None:
        """Raises ConfigError where a rank is lost."""
        if self._loss is not None:
            raise ConfigError(self._loss)

    def send(self, order: Order | Meet) -> None:
        """Give an order to all ranks. Raises EngineFault where one is gone."""
        try:
            send(self._steps, order)
        except OSError as error:
            raise EngineFault("A rank of the model has ended.") from error

    @contextmanager
    def step(self, number: int, count: Callable[[], int]) -> Iterator[None]:
        """A step that rank 0 computes. If that fails, ranks that have not failed alike are lost. count: this
        rank's operations."""
        try:
            yield
        except BaseException:
            self._settle(number, count())
            raise

    def load_adapter(self, wanted: LoadAdapter) -> Callable[[], None]:
        """Have all ranks read an adapter. What is returned waits until they have; it raises InvalidRequest with the
        sentence of one that has not."""
        answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self._changed:
            self._loads[wanted.key] = answers
            send(self._sides, wanted)

        def wait_loaded() -> None:
            try:
                errors = [answers.get(timeout=LOAD_S) for _ in self._sides]
            except queue.Empty:
                errors = [f"it could not be read in {LOAD_S:.0f} s."]
            with self._changed:
                del self._loads[wanted.key]
            error = next(filter(None, errors), None)
            if error is not None:
                raise InvalidRequest(error)

        return wait_loaded

    def close(self) -> None:
        """End the ranks. Safe to call again; only here connections are closed."""
        self._is_closing = True
        until_s = time.monotonic() + END_S
        connections = [connection for connection in (*self._steps, *self._sides) if not connection.closed]
        for connection in connections:
            # wakes the thread that reads, which closing alone does not
            with socket.socket(fileno=os.dup(connection.fileno())) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for process in self._processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(END_S)
        for connection in connections:
            connection.close()

    def _settle(self, number: int, count: int) -> None:
        """Wait until all ranks have failed in a step in which rank 0 has."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss is not None or len(self._failures.get(number, ())) == self.size - 1, GRACE_S
            )
            found = self._failures.pop(number, {})
            self._deadlines.pop(number, None)
            if self._loss is None and found != dict.fromkeys(range(1, self.size), count):
                self._lose(f"Step {number} failed on rank 0 and not alike on {self.size - 1} other ranks.")

    def _watch(self) -> None:
        """Read the ranks' answers, until there is nobody to read from."""
        open_sides = {side: rank for rank, side in enumerate(self._sides, start=1)}
        while open_sides or (self._lost_s is not None and not self._is_closing):
            for side in wait(list(open_sides), timeout=1.0):
                assert isinstance(side, Connection)
                try:
                    answer = receive(side)
                except (EOFError, OSError):
                    self._note_end(open_sides.pop(side))
                    continue
                assert isinstance(answer, Answer)
                self._note(open_sides[side], answer)
            self._check_deadlines()

    def _note(self, rank: int, answer: Answer) -> None:
        with self._changed:
            match answer:
                case Built():
                    self._num_built += 1
                case Loaded(key, error):
                    if key in self._loads:
                        self._loads[key].put(error)
                case Failed(None, _, error):
                    self._lose(error if not self._is_serving else f"Rank {rank} of {self.size} failed: {error}")
                case Failed(int(number), count, error):
                    _log.warning("rank failed", extra={"rank": rank, "step": number, "error": error})
                    self._failures.setdefault(number, {})[rank] = count
                    self._deadlines.setdefault(number, time.monotonic() + GRACE_S)
            self._changed.notify_all()

    def _note_end(self, rank: int) -> None:
        try:
            status = f"exit status {self._processes[rank - 1].wait(END_S)}"
        except subprocess.TimeoutExpired:
            status = "its connection is lost"
        with self._changed:
            self._lose(f"Rank {rank} of {self.size} has ended ({status}), and with it the model is no longer whole.")
            for answers in self._loads.values():
                answers.put("a rank of the model has ended.")
            self._changed.notify_all()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [number for number, until_s in self._deadlines.items() if until_s < now]
            if late:
                ranks = ", ".join(map(str, self._failures[late[0]]))
                self._lose(f"Step {late[0]} failed on rank {ranks} of {self.size} alone.")
            if self._lost_s is not None and self._lost_s + GRACE_S < now and not self._is_closing:
                # between GPUs nothing tells rank 0, which waits in an operation
                self._lost_s = None
                self._on_loss(self._loss or "")

    def _lose(self, sentence: str) -> None:
        if self._loss is None and not self._is_closing:
            self._loss = sentence
            self._changed.notify_all()
            if self._is_serving:
                self._on_loss(sentence)
            elif self._is_meeting:
                self._lost_s = time.monotonic()
