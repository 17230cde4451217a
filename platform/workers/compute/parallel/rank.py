"""The process of a rank other than 0: `python -m penstock.workers.compute.parallel.rank STEPS SIDE`, the numbers of two
sockets that it inherits.

On the first come a plan, then orders, which it carries out one by one; on the second adapters to read. There it
answers. When the replica's end of the second closes, for whatever reason, the process ends, also from within an
operation that waits for other ranks. Invariant: it answers every failure, and goes on; whether the ranks still belong
together is for rank 0 to say (`ranks`).
"""

import logging
import os
import sys
import threading
from multiprocessing.connection import Connection

import torch

from penstock.base import log as logs
from penstock.base.errors import PenstockError
from penstock.workers.compute.lora import LoraAdapter
from penstock.workers.compute.parallel.messages import (
    Answer,
    Beginning,
    Built,
    Compute,
    Copy,
    Failed,
    LoadAdapter,
    Loaded,
    Meet,
    Order,
    Poison,
    receive,
    send,
    unpack_step,
)
from penstock.workers.compute.parallel.part import Part, load_part

_log = logging.getLogger("penstock.rank")


class Rank:
    """A rank while it serves."""

    def __init__(self, steps: Connection, side: Connection) -> None:
        self._steps = steps
        self._side = side
        self._sending = threading.Lock()
        self._adapters: dict[int, LoraAdapter] = {}
        self._part: Part | None = None

    def run(self) -> None:
        """Build the rank's part and carry out orders, until there is nobody to give more."""
        threading.Thread(target=self._run_side, name="side", daemon=True).start()
        beginning = receive(self._steps)
        assert isinstance(beginning, Beginning)
        try:
            weights = load_part(beginning.plan, beginning.rank)
            self._answer(Built())
            # until now others may be reading still, for longer than an operation waits
            assert isinstance(receive(self._steps), Meet)
            self._part = Part(beginning.plan, beginning.rank, weights)
        except EOFError:
            raise
        except Exception as error:
            self._answer(Failed(None, 0, _sentence(error)))
            raise
        del weights
        self._answer(Built())
        while True:
            order = receive(self._steps)
            assert isinstance(order, Order)
            self._obey(self._part, order)

    def _obey(self, part: Part, order: Order) -> None:
        try:
            with torch.inference_mode():
                self._carry_out(part, order)
        except Exception as error:  # noqa: BLE001 rank 0 decides what it means
            _log.exception("The rank failed.")
            number = order.number if isinstance(order, Compute) else None
            self._answer(Failed(number, part.group.num_operations, _sentence(error)))

    def _carry_out(self, part: Part, order: Order) -> None:
        match order:
            case Copy(blocks):
                part.cache.copy(blocks)
            case Poison(blocks):
                part.cache.poison(torch.from_numpy(blocks))
            case Compute():
                batch, adapter_rows = unpack_step(order, self._adapters, part.tables)
                part.compute(batch, adapter_rows, is_greedy=order.is_greedy, is_scored=order.is_scored)
                for key in order.dropped:
                    self._adapters.pop(key, None)

    def _run_side(self) -> None:
        while True:
            try:
                wanted = receive(self._side)
            except (EOFError, OSError):
                os._exit(0)  # nothing else gets the other thread out of an operation
            assert isinstance(wanted, LoadAdapter)
            self._load(wanted)

    def _load(self, wanted: LoadAdapter) -> None:
        assert self._part is not None
        error: str | None = None
        try:
            self._adapters[wanted.key] = self._part.load_adapter(wanted.digest, wanted.folder, wanted.max_rank)
        except Exception as failure:  # noqa: BLE001 the adapter is refused, the rank goes on
            error = _sentence(failure)
        self._answer(Loaded(wanted.key, error))

    def _answer(self, answer: Answer) -> None:
        with self._sending:
            send([self._side], answer)


def _sentence(error: Exception) -> str:
    return error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def main() -> None:
    logs.configure()
    steps, side = (Connection(int(number)) for number in sys.argv[1:3])
    try:
        Rank(steps, side).run()
    except (EOFError, OSError):
        _log.info("The replica has ended, and so does this rank.")


if __name__ == "__main__":
    main()
