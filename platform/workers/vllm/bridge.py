"""The program of the child process that runs vLLM for a replica, and the messages the two exchange.

    python -I bridge.py DESCRIPTOR

It is started by path, with the Python of an environment that has vLLM, and imports nothing of penstock, not even from
files beside it: vLLM's pins do not fit ours. DESCRIPTOR is a connected socket. On it go frames: four bytes of length,
little-endian, then msgpack; up (to here) a list of one `Start`, then lists of other operations; down one `Ready`, then
a `Stepped` for each step and an `AdapterLoaded` for each `LoadAdapter`, or a `Failed` and the end. A message that came
in before a step begins takes effect in that step. Invariants: every sequence added gets one `Output` with a `finish`,
and nothing after it, unless it was aborted or this process ends; when the replica's end of the socket closes, this
process and all that it started end at once.
"""

import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import msgspec

MAX_FRAME_BYTES = 64 * 2**20
HEADER_BYTES = 4
SEQUENCE_NAME = "session_id"
"""Parameter of vLLM's `add_request` by which its KV events name a sequence."""
DEVICE = "GPU"
"""Medium of KV events about the memory that the model computes with, on CPUs too."""

EndReason = Literal["stop", "length", "error", "refused"]
"""Why a sequence ended. refused: vLLM does not take such a request; `error` has the reason."""
BlockHash = int | bytes
"""vLLM's name of a cached block, which stands for all that precedes it too."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first message: load the model."""

    args: dict[str, Any]
    """Arguments of vLLM's EngineArgs, by name."""


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Compute one more sequence, from the next step on."""

    rid: int
    """Number of the sequence in this process, chosen by the replica."""
    packed_token_ids: bytes
    """Token ids of the prompt, and of the output of a resumed sequence, as little-endian uint32."""
    sampling: dict[str, Any]
    """Arguments of vLLM's SamplingParams, by name."""
    cache_salt: str
    """Salt of the prefix cache; sequences share cached KV only under an equal one."""
    adapter: int | None = None
    """Number of a loaded adapter; None: the base model alone."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Read an adapter into a slot, before the next step; answered by an `AdapterLoaded`."""

    number: int
    """Number of the adapter in this process, 1 or more, chosen by the replica and never used again."""
    name: str
    """The adapter's digest: vLLM keeps cached KV apart by it."""
    folder: str
    """Folder with the adapter in PEFT's format."""


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload"):
    """Free an adapter's slot, before the next step. No sequence has it any more."""

    number: int
    """Number of the adapter; an unknown one is ignored."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End sequences and free their KV, before the next step."""

    rids: list[int]
    """Numbers of the sequences; unknown ones are ignored."""


Op = Start | Add | Abort | LoadAdapter | UnloadAdapter


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one place in a sequence; natural logarithms."""

    logprob: float
    """Log probability of the chosen token."""
    top: list[tuple[int, float]]
    """The likeliest (token id, logprob), best first."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one sequence gained in a step; with a `finish`, its last."""

    rid: int
    token_ids: list[int]
    finish: EndReason | None = None
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache."""
    logprobs: list[Logprob] | None = None
    error: str | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """vLLM has loaded the model and can take sequences."""

    version: str
    """Version of vLLM."""
    num_blocks: int
    """KV blocks in vLLM's cache."""
    block_size: int
    """Tokens in one of vLLM's KV blocks."""
    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The last message: vLLM could not start, or can't go on."""

    reason: str


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """What became of a `LoadAdapter`."""

    number: int
    error: str | None = None
    """Why vLLM does not take the adapter; None: it is loaded."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks of a sequence that vLLM's cache holds from now on. A hash may come twice, for two blocks of the same
    content; it is held until it was removed as often."""

    rid: int
    """Number of the sequence."""
    parent: BlockHash | None
    """The block before the first; None: they are the sequence's first blocks."""
    hashes: list[BlockHash]
    """The blocks, in the sequence's order."""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks that vLLM's cache has given up."""

    hashes: list[BlockHash]


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """vLLM's cache holds nothing any more."""


CacheEvent = Stored | Removed | Cleared


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """Report of one step."""

    seconds: float
    """Duration of the step; 0: there was no step, only sequences that were refused."""
    outputs: list[Output]
    kv_usage: float = 0.0
    """Share of the KV blocks that running sequences hold."""
    events: list[CacheEvent] = []
    """What the cache gained and lost, in order."""


Message = Ready | Failed | Stepped | AdapterLoaded


class Closed(Exception):
    """The other end is gone, or what it sent is no frame."""


class Wire:
    """One end of the socket. One thread may receive while another sends."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        """incoming: the type of the messages that are received."""
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: list[Op] | Message) -> None:
        """Waits while the other end does not read. Raises Closed."""
        data = self._encoder.encode(message)
        try:
            self._socket.sendall(len(data).to_bytes(HEADER_BYTES, "little") + data)
        except OSError as error:
            raise Closed(f"the socket is closed ({error})") from error

    def receive(self) -> Any:
        """The next message. Raises Closed."""
        length = int.from_bytes(self._read(HEADER_BYTES), "little")
        if length > MAX_FRAME_BYTES:
            raise Closed(f"a frame of {length} bytes was announced")
        try:
            return self._decoder.decode(self._read(length))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Closed(f"a frame could not be read ({error})") from error

    def _read(self, size: int) -> bytes:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise Closed(f"the socket is closed ({error})") from error
            if not count:
                raise Closed("the other end has closed the socket")
            view = view[count:]
        return bytes(buffer)


class Vllm(Protocol):
    """The part of vLLM that the bridge uses; a test puts a fake in its place."""

    def describe(self) -> Ready: ...
    def add(self, op: Add) -> None:
        """Queue a sequence. Raises ValueError or TypeError, with a sentence, for one that vLLM does not take."""

    def abort(self, rids: list[int]) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[Output]: ...
    def kv_usage(self) -> float: ...
    def take_events(self) -> list[CacheEvent]:
        """What the cache gained and lost since the last call."""

    def load_adapter(self, op: LoadAdapter) -> None:
        """Read an adapter. Raises whatever its files make vLLM raise."""

    def unload_adapter(self, number: int) -> None: ...


class Bridge:
    """The loop between the socket and vLLM; it never steps while a message waits."""

    def __init__(self, vllm: Vllm, inbox: "SimpleQueue[list[Op]]", wire: Wire) -> None:
        self._vllm = vllm
        self._inbox = inbox
        self._wire = wire

    def serve(self) -> None:
        """Take messages and step, until something raises. A step that raises leaves all its sequences to other
        replicas: nobody knows which of them it was."""
        while True:
            self._take_messages()
            if self._vllm.has_work():
                self._step()

    def _take_messages(self) -> None:
        """Carry out every message that has come; waits for one while there is nothing to compute."""
        refused: list[Output] = []
        while not self._inbox.empty() or not self._vllm.has_work():
            for op in self._inbox.get():
                if isinstance(op, Add):
                    refused += self._add(op)
                elif isinstance(op, Abort):
                    self._vllm.abort(op.rids)
                elif isinstance(op, LoadAdapter):
                    self._load_adapter(op)
                elif isinstance(op, UnloadAdapter):
                    self._vllm.unload_adapter(op.number)
            if refused:
                self._wire.send(Stepped(0.0, refused, self._vllm.kv_usage()))
                refused = []

    def _add(self, op: Add) -> list[Output]:
        """Queue a sequence; returns its refusal where vLLM does not take it."""
        try:
            self._vllm.add(op)
        except (ValueError, TypeError) as error:
            return [Output(op.rid, [], "refused", error=f"vLLM does not take this request: {error}")]
        return []

    def _load_adapter(self, op: LoadAdapter) -> None:
        error = None
        try:
            self._vllm.load_adapter(op)
        except Exception as raised:  # noqa: BLE001 (its files may hold anything, and others run beside it)
            error = f"{type(raised).__name__}: {raised}"
        self._wire.send(AdapterLoaded(op.number, error))

    def _step(self) -> None:
        begin_s = time.perf_counter()
        outputs = self._vllm.step()
        seconds = time.perf_counter() - begin_s
        self._wire.send(Stepped(seconds, outputs, self._vllm.kv_usage(), self._vllm.take_events()))


def main() -> None:
    run(socket.socket(fileno=int(sys.argv[1])), _load)


def run(sock: socket.socket, load: Callable[[dict[str, Any]], Vllm]) -> None:
    """Load vLLM and serve the socket. Never returns; raises what vLLM raises, after a `Failed`.

    load: makes vLLM from the arguments of its EngineArgs.
    """
    wire = Wire(sock, list[Op])
    (start,) = wire.receive()
    inbox: SimpleQueue[list[Op]] = SimpleQueue()
    threading.Thread(target=_read, args=(wire, inbox), name="bridge-reader", daemon=True).start()
    try:
        vllm = load(start.args)
        wire.send(vllm.describe())
        Bridge(vllm, inbox, wire).serve()
    except Exception as error:
        wire.send(Failed(f"{type(error).__name__}: {error}"))
        raise


def _read(wire: Wire, inbox: "SimpleQueue[list[Op]]") -> None:
    """Receive messages, in a thread of its own, so that the replica's end is noticed in the middle of a step, or of
    loading."""
    try:
        while True:
            inbox.put(wire.receive())
    except Closed:
        end_group()


def end_group() -> None:
    """Kill this process and all that it started, at once, whatever they are doing."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _load(args: dict[str, Any]) -> Vllm:
    """Load vLLM with its model; takes a minute."""
    import vllm  # noqa: PLC0415 (absent in the replica's environment)
    from vllm import exceptions  # noqa: PLC0415 (absent in the replica's environment)
    from vllm.config import KVEventsConfig  # noqa: PLC0415 (absent in the replica's environment)
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 (absent in the replica's environment)
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 (absent in the replica's environment)
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415 (absent there too)
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 (absent in the replica's environment)

    wanted = args.get("kv_events_config")
    if isinstance(wanted, dict):
        args = {**args, "kv_events_config": KVEventsConfig(**wanted)}
    engine = LLMEngine.from_engine_args(EngineArgs(**args))
    config = engine.vllm_config
    refusals = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
    scheduler = engine.engine_core.engine_core.scheduler
    cache = scheduler.kv_cache_manager
    names_sequences = SEQUENCE_NAME in inspect.signature(engine.add_request).parameters
    events = EventCollector(scheduler.kv_event_publisher, int(config.cache_config.block_size))
    scheduler.kv_event_publisher = events
    adapters: dict[int, Any] = {}

    class Loaded:
        def describe(self) -> Ready:
            return Ready(
                vllm.__version__,
                int(config.cache_config.num_gpu_blocks),
                int(config.cache_config.block_size),
                int(config.model_config.max_model_len),
            )

        def add(self, op: Add) -> None:
            sampling = SamplingParams(**op.sampling, output_kind=RequestOutputKind.DELTA, detokenize=False)
            prompt = {
                "prompt_token_ids": memoryview(op.packed_token_ids).cast("I").tolist(),
                "cache_salt": op.cache_salt,
            }
            more: dict[str, Any] = {SEQUENCE_NAME: str(op.rid)} if names_sequences else {}
            if op.adapter is not None:
                more["lora_request"] = adapters[op.adapter]
            try:
                engine.add_request(str(op.rid), prompt, sampling, **more)
            except refusals as error:
                raise ValueError(str(error)) from error

        def abort(self, rids: list[int]) -> None:
            engine.abort_request([str(rid) for rid in rids])

        def has_work(self) -> bool:
            return bool(engine.has_unfinished_requests())

        def step(self) -> list[Output]:
            return [make_output(item) for item in engine.step()]

        def kv_usage(self) -> float:
            return float(cache.usage)

        def take_events(self) -> list[CacheEvent]:
            return events.take()

        def load_adapter(self, op: LoadAdapter) -> None:
            request = LoRARequest(lora_name=op.name, lora_int_id=op.number, lora_path=op.folder)
            engine.add_lora(request)
            adapters[op.number] = request

        def unload_adapter(self, number: int) -> None:
            if adapters.pop(number, None) is not None:
                engine.remove_lora(number)

    return Loaded()


class EventCollector:
    """What vLLM's scheduler publishes its KV events to, in the place of the publisher that it had, which gets them
    too."""

    def __init__(self, publisher: Any, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._events: list[CacheEvent] = []

    def publish(self, batch: Any) -> None:
        """Keep a step's events until they are taken."""
        self._events += [event for item in batch.events if (event := make_event(item, self._block_size)) is not None]
        self._publisher.publish(batch)

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        self._publisher.shutdown()

    def get_publisher_config(self) -> Any:
        """What vLLM asks its publisher for at the start."""
        return self._publisher.get_publisher_config()


def make_event(item: Any, block_size: int) -> CacheEvent | None:
    """A KV event of vLLM's (vllm/distributed/kv_events.py) as we report it. Returns None for one that says nothing of
    what a sequence finds: of memory other than the device's, of another group of layers than the first (hybrid models
    have several), of a part of a block, and of a sequence that is not named."""
    kind = type(item).__name__
    if kind == "AllBlocksCleared":
        return Cleared()
    if getattr(item, "medium", None) not in (None, DEVICE) or getattr(item, "group_idx", None) not in (None, 0):
        return None
    if kind == "BlockRemoved":
        return Removed(list(item.block_hashes))
    name = getattr(item, SEQUENCE_NAME, None)
    if kind != "BlockStored" or name is None or item.block_size != block_size:
        return None
    return Stored(int(name), item.parent_block_hash, list(item.block_hashes))


def make_output(item: Any) -> Output:
    """The `Output` of a RequestOutput, as vLLM gives one for each sequence and step."""
    (completion,) = item.outputs
    reason = completion.finish_reason
    return Output(
        rid=int(item.request_id),
        token_ids=list(completion.token_ids),
        finish=None if reason is None else reason if reason in ("stop", "length") else "error",
        num_cached_tokens=item.num_cached_tokens or 0,
        logprobs=None
        if completion.logprobs is None
        else [make_logprob(*pair) for pair in zip(completion.token_ids, completion.logprobs, strict=True)],
        error=None if reason in (None, "stop", "length") else f"vLLM ended the sequence: {reason}.",
    )


def make_logprob(token_id: int, found: Any) -> Logprob:
    """The `Logprob` of one place. found: vLLM's dict of the likeliest tokens by id, and of the chosen one if it is none
    of them; ranks begin at 1."""
    ranked = sorted(
        ((entry.rank, other, entry.logprob) for other, entry in found.items() if entry.rank is not None),
        key=lambda item: item[0],
    )
    return Logprob(found[token_id].logprob, [(other, logprob) for _, other, logprob in ranked])


if __name__ == "__main__":
    main()
