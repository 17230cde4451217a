"""The baseline of what the platform adds: the same engine and load, called in-process, without HTTP, router, stream or
Redis."""

import itertools
import queue
import random
import threading
import time

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.config import EngineConfig, TimedConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Sequence
from penstock.workers.engine.timed import TimedRunner

REPLICAS = 2


class _Load:
    """One closed loop over REPLICAS engines: a finished sequence starts its stream's next one."""

    def __init__(self, requests: int, prompt_tokens: int, max_tokens: int, step_s: float, seed: int) -> None:
        self.left = iter(range(requests))
        self.rng = random.Random(seed)
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        self.arrivals: dict[str, list[float]] = {}
        self.done: queue.SimpleQueue[str] = queue.SimpleQueue()
        timed = TimedConfig(base_s=step_s, num_blocks=40_000, max_model_len=8192)
        config = EngineConfig(runner="timed", max_num_seqs=64, max_batched_tokens=8192, timed=timed)
        self.hasher = ChainHasher(bytes(32), config.block_size)
        self.engines = [Engine(TimedRunner(config), config, self.hasher, self.on_step) for _ in range(REPLICAS)]
        self.lock = threading.Lock()

    def on_step(self, report: StepReport) -> None:
        now = time.perf_counter()
        for output in report.outputs:
            self.arrivals[output.seq.request_id] += [now] * len(output.token_ids)
            if output.finish is not None:
                assert output.finish is Finish.LENGTH, output.finish
                self.done.put(output.seq.request_id)

    def start(self, engine: Engine) -> bool:
        number = next(self.left, None)
        if number is None:
            return False
        ids = [self.rng.randrange(1000, 40_000) for _ in range(self.prompt_tokens)]
        root = self.hasher.root("in-process")
        keys = self.hasher.extend(root, ids)
        now = time.perf_counter()
        self.arrivals[str(number)] = [now]
        sampling = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        engine.submit(
            Sequence(str(number), ids, sampling, len(ids), keys, keys[-1] if keys else root, arrival_s=time.monotonic())
        )
        return True


def in_process_load(
    streams: int, requests: int, prompt_tokens: int, max_tokens: int, step_s: float, seed: int
) -> tuple[list[float], list[float]]:
    """Run the load in this process; returns TTFTs and inter-token gaps in seconds."""
    load = _Load(requests, prompt_tokens, max_tokens, step_s, seed)
    for engine in load.engines:
        engine.start()
    home: dict[str, Engine] = {}
    try:
        for number in range(min(streams, requests)):
            engine = load.engines[number % REPLICAS]
            home[str(number)] = engine
            load.start(engine)
            time.sleep(0.01)
        running, following = len(home), len(home)
        while running:
            engine = home.pop(load.done.get(timeout=60))
            if load.start(engine):
                home[str(following)] = engine
                following += 1
            else:
                running -= 1
    finally:
        for engine in load.engines:
            engine.stop()
    times = list(load.arrivals.values())
    return [t[1] - t[0] for t in times], [b - a for t in times for a, b in itertools.pairwise(t[1:])]
