"""The bridge with a fake vLLM: a program for a child process. A prompt's first token chooses what goes wrong.

A sequence gains one token a step, one more than its last; prompts are computed in the step in which they come. Steps
take STEP_S. A full block's hash is the tokens up to its end, after the salt and the adapter's name; the cache holds
CACHED_BLOCKS of those that were filled last. An adapter whose folder has a file `refused` is
not loaded.
"""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from penstock.workers.vllm.bridge import (
    Add,
    CacheEvent,
    Cleared,
    LoadAdapter,
    Logprob,
    Output,
    Ready,
    Removed,
    Stored,
    run,
)

STEP_S = 0.002
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 32, 256
ADAPTER_SLOTS = 2
CACHED_BLOCKS = 6
RAISE, DIE, BABBLE, HANG, CLEAR = 60001, 60002, 60003, 60004, 60005
"""First tokens of prompts. The step raises; the process ends; bytes that are no frame go out; the step never ends; the
cache is cleared before the step."""


class PlayedVllm:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._live: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._stops: dict[int, list[int]] = {}
        self._logprobs: dict[int, int | None] = {}
        self._salts: dict[int, str] = {}
        self._adapters: dict[int, str] = {}
        self._cached: dict[bytes, None] = {}
        self._events: list[CacheEvent] = []

    def describe(self) -> Ready:
        return Ready("0.0", NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)

    def add(self, op: Add) -> None:
        if "logit_bias" in op.sampling:
            raise ValueError("no biases today")
        self._salts[op.rid] = op.cache_salt if op.adapter is None else f"{op.cache_salt} {self._adapters[op.adapter]}"
        self._live[op.rid] = memoryview(op.packed_token_ids).cast("I").tolist()
        self._left[op.rid] = op.sampling["max_tokens"]
        self._stops[op.rid] = op.sampling.get("stop_token_ids", [])
        self._logprobs[op.rid] = op.sampling.get("logprobs")
        self._fresh.add(op.rid)

    def abort(self, rids: list[int]) -> None:
        for rid in rids:
            self._live.pop(rid, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[Output]:
        time.sleep(STEP_S)
        for token_ids in self._live.values():
            self._misbehave(token_ids[0])
        for rid in self._live:
            self._fill(rid)
        return [self._gain(rid) for rid in list(self._live)]

    def take_events(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def load_adapter(self, op: LoadAdapter) -> None:
        if (Path(op.folder) / "refused").exists():
            raise ValueError("not an adapter")
        assert len(self._adapters) < ADAPTER_SLOTS, "nothing was unloaded"
        self._adapters[op.number] = op.name

    def unload_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def _fill(self, rid: int) -> None:
        """Cache the blocks of the tokens so far."""
        tokens = self._live[rid]
        if len(tokens) % BLOCK_SIZE and rid not in self._fresh:
            return
        salt = self._salts[rid].encode()
        hashes = [salt + repr(tokens[:end]).encode() for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]
        num_known = next((place for place, name in enumerate(hashes) if name not in self._cached), len(hashes))
        if hashes[num_known:]:
            self._events.append(Stored(rid, hashes[num_known - 1] if num_known else None, hashes[num_known:]))
        for name in hashes:
            self._cached.pop(name, None)
            self._cached[name] = None
        while len(self._cached) > CACHED_BLOCKS:
            oldest = next(iter(self._cached))
            del self._cached[oldest]
            self._events.append(Removed([oldest]))

    def kv_usage(self) -> float:
        """Share of the blocks in use: each sequence holds one."""
        return len(self._live) / NUM_BLOCKS

    def _gain(self, rid: int) -> Output:
        token_ids = self._live[rid]
        token_ids.append(token_ids[-1] + 1)
        self._left[rid] -= 1
        finish: Any = "stop" if token_ids[-1] in self._stops[rid] else "length" if self._left[rid] == 0 else None
        if finish is not None:
            del self._live[rid]
        num_cached = 7 if rid in self._fresh else 0
        self._fresh.discard(rid)
        wanted = self._logprobs[rid]
        logprobs = None if wanted is None else [Logprob(-0.5, [(token_ids[-1], -0.5), (9, -1.5)])]
        return Output(rid, token_ids[-1:], finish, num_cached, logprobs)

    def _misbehave(self, token_id: int) -> None:
        if token_id == RAISE:
            raise RuntimeError("out of everything")
        if token_id == DIE:
            os._exit(3)
        if token_id == BABBLE:
            self._socket.sendall(b"\xff" * 64)
            time.sleep(60)
        if token_id == HANG:
            time.sleep(60)
        if token_id == CLEAR and self._cached:
            self._cached.clear()
            self._events.append(Cleared())


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[-1]))

    def load(args: dict[str, Any]) -> PlayedVllm:
        if "fails" in args:
            raise RuntimeError(args["fails"])
        time.sleep(args.get("sleeps", 0.0))
        return PlayedVllm(sock)

    run(sock, load)


if __name__ == "__main__":
    main()
