"""The bridge with a fake vLLM: a program for a child process. A prompt's first token chooses what goes wrong.

A sequence gains one token a step, one more than its last; prompts are computed in the step in which they come. Steps
take STEP_S.
"""

import os
import socket
import sys
import time
from typing import Any

from penstock.workers.vllm.bridge import Add, Logprob, Output, Ready, run

STEP_S = 0.002
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 32, 256
RAISE, DIE, BABBLE, HANG = 60001, 60002, 60003, 60004
"""First tokens of prompts. The step raises; the process ends; bytes that are no frame go out; the step never ends."""


class PlayedVllm:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._live: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._stops: dict[int, list[int]] = {}
        self._logprobs: dict[int, int | None] = {}

    def describe(self) -> Ready:
        return Ready("0.0", NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN)

    def add(self, op: Add) -> None:
        if "logit_bias" in op.sampling:
            raise ValueError("no biases today")
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
        return [self._gain(rid) for rid in list(self._live)]

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
