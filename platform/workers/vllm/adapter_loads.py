"""Adapters on their way into vLLM and out of it: numbers, orders to its process, and the threads that wait for answers.

Not which adapters there are, which `workers.serving` decides, nor their matrices, which vLLM keeps. Invariant: a load
ends by vLLM's answer, by its loss, or after ADAPTER_S.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, check_config, read_header
from penstock.adapters.store import digest_of
from penstock.wire.errors import EngineFault, InvalidRequest
from penstock.workers.engine.sequence import Resident
from penstock.workers.vllm.bridge import AdapterLoaded, LoadAdapter, Op, UnloadAdapter
from penstock.workers.vllm.request import VllmAdapter

NAMES = "base_model.model.model."
"""Beginning of the names of tensors that vLLM finds in a decoder; it would pass over others in silence."""
ADAPTER_S = 60.0
"""Longest wait for vLLM to load an adapter, seconds; it does so between two steps."""


class AdapterLoads:
    """The adapters that vLLM is told to load. `load` and `unload` are called from any thread, the others on the
    engine's."""

    def __init__(self, call: Callable[[Callable[[], None]], None], send: Callable[[Op], None]) -> None:
        """call: has the engine's thread call something, in order. send: sends an operation to vLLM, on that
        thread; raises EngineFault where vLLM is lost."""
        self._call = call
        self._send = send
        self._numbers = count(1)
        self._waiting: dict[int, Future[str | None]] = {}
        """What becomes of adapters, by number: the reason why vLLM does not take one, or None."""

    def load(self, digest: str, folder: Path, max_rank: int) -> VllmAdapter:
        """Let vLLM read an adapter, and wait for it. Raises InvalidRequest for one that vLLM does not take, or that is
        not of that digest, OSError, and EngineFault when vLLM does not answer."""
        settings = check_config((folder / CONFIG_FILE).read_bytes(), max_rank)
        if settings.has_magnitudes or settings.ranks or settings.alphas:
            raise InvalidRequest(
                "vLLM serves neither DoRA (use_dora) nor ranks or alphas of its own per module (rank_pattern,"
                " alpha_pattern); train it as plain LoRA."
            )
        if digest_of(folder) != digest:
            raise InvalidRequest("its files are not those of its digest.")
        for name in read_header(folder / WEIGHTS_FILE):
            if not name.startswith(NAMES):
                raise InvalidRequest(
                    f"its tensor {name} is not found by vLLM, which reads names that begin with {NAMES}"
                )
        adapter = VllmAdapter(digest, next(self._numbers))
        answer: Future[str | None] = Future()
        self._call(partial(self._begin, LoadAdapter(adapter.number, digest, str(folder)), answer))
        try:
            reason = answer.result(ADAPTER_S)
        except TimeoutError:
            self.unload(adapter)
            raise EngineFault(f"vLLM did not load the adapter in {ADAPTER_S:.0f} s.") from None
        if reason is not None:
            raise InvalidRequest(reason)
        return adapter

    def unload(self, adapter: Resident) -> None:
        """Let vLLM forget an adapter, which no sequence has any more."""
        assert isinstance(adapter, VllmAdapter)
        self._call(partial(self._send_unload, adapter.number))

    def take(self, message: AdapterLoaded) -> None:
        """Hand vLLM's answer to the thread that waits for it."""
        self._waiting.pop(message.number).set_result(message.error)

    def fail(self, reason: str) -> None:
        """End every wait: vLLM is gone."""
        while self._waiting:
            self._waiting.popitem()[1].set_exception(EngineFault(reason))

    def _begin(self, op: LoadAdapter, answer: "Future[str | None]") -> None:
        try:
            self._send(op)
        except EngineFault as error:
            answer.set_exception(error)
        else:
            self._waiting[op.number] = answer

    def _send_unload(self, number: int) -> None:
        try:
            self._send(UnloadAdapter(number))
        except EngineFault:
            return  # it is gone with all adapters
