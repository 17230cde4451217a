"""Engines over random weights on the GPU, as a replica makes them but for the checkpoint: scheduler, runner with CUDA
graphs, sampler, drafts. And what is asked of them."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
from torch import Tensor

from bench.gpu.steps.shapes import BLOCK_SIZE, Bench, Variant, make_weights, packed
from bench.gpu.steps.sizes import Scale
from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.replay import Replay, recorded_steps
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.speculation.prediction import PredictionDrafter
from penstock.workers.compute.step_model import GpuStepModel
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.warm_up import warm_up
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Sampled, Sequence, Step

Weights = Mapping[str, Tensor | GroupedMatrix]


def make_random_weights(bench: Bench, variant: Variant) -> Weights:
    """Weights of the variant by name, packed as the engine keeps them."""
    made = make_weights(bench, is_quantized=variant.is_quantized)
    return {name: packed(weight, bench) for name, weight in made.items()}


def engine_config(scale: Scale, *, has_drafts: bool = False) -> EngineConfig:
    """Settings that scheduler and stream go by; the device is the runner's affair."""
    speculation = {"speculation": {"method": "ngram"}} if has_drafts else {}
    return msgspec.convert(
        {
            "block_size": BLOCK_SIZE,
            "max_num_seqs": scale.max_num_seqs,
            "max_batched_tokens": scale.max_batched_tokens,
            "max_model_len": scale.max_model_len,
            **speculation,
        },
        EngineConfig,
    )


def make_runner(
    bench: Bench, variant: Variant, weights: Weights, scale: Scale, *, has_drafts: bool = False
) -> TorchRunner:
    """The runner of a replica with `device: cuda`, with a cache of its own. The weights may be shared."""
    dtype = variant.kv_dtype if bench.device.type == "cuda" else bench.dtype
    cache = KvCache(bench.config, scale.num_blocks, BLOCK_SIZE, dtype, bench.device)
    model = Llama(bench.config, weights, scale.max_model_len, threads=1, exact=False)
    recorded = recorded_steps(engine_config(scale, has_drafts=has_drafts))
    steps = GpuStepModel(Replay(model, cache, recorded, scale.max_model_len))
    drafter = PredictionDrafter(NgramDrafter()) if has_drafts else None
    kind = TorchRunner if bench.device.type == "cuda" else _TurnTakingRunner
    runner = kind(steps, Sampler(bench.config.vocab_size), scale.max_model_len, drafter)
    if bench.device.type == "cuda":
        warm_up(runner, engine_config(scale, has_drafts=has_drafts), bench.config)
    return runner


class _TurnTakingRunner(TorchRunner):
    """A runner in the interpreter, which does not bear that two engines of a process compute at once."""

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        with _TURN:
            found = super().launch(step)()
        return lambda: found


_TURN = threading.Lock()


class Request(NamedTuple):
    at_s: float
    """Time of arrival, seconds after the load begins."""
    prompt: list[int]
    sampling: SamplingParams


class Answers:
    """Times at which tokens came, by request, in seconds of `time.perf_counter`; the arrival first."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.token_ids: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}
        self._changed = threading.Condition()

    def on_step(self, report: StepReport) -> None:
        now = time.perf_counter()
        with self._changed:
            for output in report.outputs:
                name = output.seq.request_id
                self.times[name] += [now] * len(output.token_ids)
                self.token_ids[name] += output.token_ids
                if output.finish is not None:
                    self.finishes[name] = output.finish
            self._changed.notify_all()

    def begin(self, name: str) -> None:
        with self._changed:
            self.times[name], self.token_ids[name] = [time.perf_counter()], []

    def wait(self, count: int, timeout_s: float) -> None:
        """Wait until so many have ended. Raises TimeoutError, RuntimeError for one that did not end by its length."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.finishes) >= count, timeout_s):
                raise TimeoutError(f"{count - len(self.finishes)} of {count} sequences have not ended")
        bad = {finish for finish in self.finishes.values() if finish is not Finish.LENGTH}
        if bad:
            raise RuntimeError(f"sequences have ended as {', '.join(sorted(map(str, bad)))}")

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids.values()))

    @property
    def ttft_s(self) -> list[float]:
        return [times[1] - times[0] for times in self.times.values() if len(times) > 1]

    @property
    def tpot_s(self) -> list[float]:
        return [(times[-1] - times[1]) / (len(times) - 2) for times in self.times.values() if len(times) > 2]

    def rate_in_the_middle(self) -> float:
        """Tokens a second of the middle half of all tokens: neither the prompts at the beginning nor the last rows
        count."""
        moments = sorted(itertools.chain.from_iterable(times[1:] for times in self.times.values()))
        first, last = len(moments) // 4, 3 * len(moments) // 4
        seconds = moments[last] - moments[first] if last > first else 0.0
        return (last - first) / seconds if seconds else 0.0


def start_engine(
    runner: TorchRunner, config: EngineConfig, on_step: Callable[[StepReport], None], secret: bytes = bytes(32)
) -> Engine:
    """An engine that is ready: step costs are measured and all kernels are there that it knows of."""
    engine = Engine(runner, config, ChainHasher(secret, config.block_size), on_step)
    engine.start()
    return engine


def play(engine: Engine, answers: Answers, requests: Iterable[Request], timeout_s: float) -> None:
    """Submit requests when they arrive and wait until all have ended."""
    hasher = ChainHasher(bytes(32), BLOCK_SIZE)
    begun_s = time.perf_counter()
    for number, request in enumerate(requests):
        time.sleep(max(0.0, begun_s + request.at_s - time.perf_counter()))
        name = f"{len(answers.times)}-{number}"
        root = hasher.root("random weights")
        keys = hasher.extend(root, request.prompt)
        answers.begin(name)
        engine.submit(
            Sequence(
                name, list(request.prompt), request.sampling, len(request.prompt), keys, keys[-1] if keys else root,
                arrival_s=time.monotonic(),
            )
        )  # fmt: skip
    answers.wait(len(answers.times), timeout_s)


def prompt_of(draw: random.Random, vocab_size: int, length: int) -> list[int]:
    return [draw.randrange(3, vocab_size) for _ in range(length)]


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie; 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
