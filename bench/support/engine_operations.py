"""What bench.engine asks our engine for: built as a replica builds it, without stream, router or Redis.

`generate` goes through the whole engine (scheduler, prefix cache, runner, sampler, commit). `decode` and `losses` call
the runner step by step, as llama.cpp's benchmarks call theirs; greedy sampling is included in ours and not in theirs.
They write to KV blocks that the engine's prefix cache may know, which is harmless as long as no prompt is ever asked
twice.
"""

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count

import torch

from penstock.prefix.hashing import ChainHasher
from penstock.text.source import resolve
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Chunk, Sequence, Step

MODEL = "demo"


def operations(config: EngineConfig) -> Mapping[str, Callable[..., object]]:
    runner = load_runner(resolve(MODEL), config)
    whole, steps = WholeEngine(runner, config), Steps(runner, config)
    return {"generate": whole.generate, "decode": steps.decode, "losses": steps.losses}


class WholeEngine:
    """The engine end to end, from token ids to token ids."""

    def __init__(self, runner: TorchRunner, config: EngineConfig) -> None:
        self._hasher = ChainHasher(bytes(32), config.block_size)
        self._root = self._hasher.root("bench")
        self._ended: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._engine = Engine(runner, config, self._hasher, self._on_step)
        self._engine.start()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Generate greedily; returns the number of tokens of each answer, and seconds for all."""
        begin = time.perf_counter()
        for number, ids in enumerate(prompts):
            self._engine.submit(self._sequence(str(number), ids, max_tokens))
        ended = [self._ended.get(timeout=600) for _ in prompts]
        seconds = time.perf_counter() - begin
        wrong = [seq.finish for seq in ended if seq.finish is not Finish.LENGTH]
        if wrong:
            raise RuntimeError(f"sequences ended with {wrong}")
        return {
            "seconds": seconds,
            "tokens": [seq.num_output_tokens for seq in ended],
            "cached": sum(seq.num_cached_tokens or 0 for seq in ended),
        }

    def _sequence(self, request_id: str, ids: list[int], max_tokens: int) -> Sequence:
        keys = self._hasher.extend(self._root, ids)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Sequence(
            request_id,
            list(ids),
            sampling,
            len(ids),
            keys,
            keys[-1] if keys else self._root,
            arrival_s=time.monotonic(),
        )

    def _on_step(self, report: StepReport) -> None:
        for output in report.outputs:
            if output.finish is not None:
                self._ended.put(output.seq)


class Steps:
    """The runner alone, on made-up sequences in blocks from the first on."""

    def __init__(self, runner: TorchRunner, config: EngineConfig) -> None:
        self._runner = runner
        self._config = config

    def decode(self, batch: int, prompt_tokens: int, tokens: int) -> dict[str, float]:
        """Seconds to read `batch` prompts, and then for `tokens` steps of all. prompt_tokens: 0 begins with a single
        token from an empty context."""
        prompts = [
            [1000 + (7919 * row + 104729 * place) % 40_000 for place in range(max(prompt_tokens, 1))]
            for row in range(batch)
        ]
        seqs = self._placed(prompts, tokens)
        begin = time.perf_counter()
        if prompt_tokens:
            self._read(seqs)
        middle = time.perf_counter()
        for _ in range(tokens):
            self._extend([Chunk(seq, len(seq.token_ids) - 1, 1) for seq in seqs])
        end = time.perf_counter()
        for seq in seqs:
            self._runner.forget(seq)
        return {"prefill_s": middle - begin, "decode_s": end - middle}

    def losses(self, windows: list[list[int]], first: int, batch: int) -> list[float]:
        """Negative log likelihood of each window's tokens behind the first + 1 that are only read, summed.

        batch: so many windows at once, one token of each a step, as in decoding; 0: each window in a single step, as in
        prefill.
        """
        if not batch:
            return [self._loss_of_prefill(ids, first) for ids in windows]
        return [
            loss
            for start in range(0, len(windows), batch)
            for loss in self._losses_of_decode(windows[start : start + batch], first)
        ]

    def _loss_of_prefill(self, ids: list[int], first: int) -> float:
        """All but the window's first token are given as a draft, because the runner returns logits only of those."""
        (seq,) = self._placed([ids[:1]], len(ids))
        _, logits = self._runner.forward(Step([Chunk(seq, 0, 1, len(ids) - 2, ids[1:-1])], []))
        return -logits[first:].log_softmax(-1).gather(1, torch.tensor(ids[first + 1 :])[:, None]).double().sum().item()

    def _losses_of_decode(self, windows: list[list[int]], first: int) -> list[float]:
        seqs = self._placed([ids[:first] for ids in windows], len(windows[0]) - first)
        self._read(seqs)
        total = torch.zeros(len(windows), dtype=torch.float64)
        for place in range(first, len(windows[0]) - 1):
            for seq, ids in zip(seqs, windows, strict=True):
                seq.token_ids[place:] = [ids[place]]
            _, logits = self._runner.forward(Step([Chunk(seq, place, 1) for seq in seqs], []))
            targets = torch.tensor([ids[place + 1] for ids in windows])
            total -= logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return [float(loss) for loss in total]

    def _read(self, seqs: list[Sequence]) -> None:
        """Read whole prompts, as many to a step as the engine's budget allows, at least one."""
        size = max(1, self._config.token_budget // len(seqs[0].token_ids))
        for start in range(0, len(seqs), size):
            self._extend([Chunk(seq, 0, len(seq.token_ids)) for seq in seqs[start : start + size]])

    def _extend(self, chunks: list[Chunk]) -> None:
        for chunk, (choice,) in zip(chunks, self._runner.launch(Step(chunks, []))(), strict=True):
            chunk.seq.num_computed_tokens = chunk.end
            chunk.seq.token_ids.append(choice.token_id)

    def _placed(self, prompts: list[list[int]], more_tokens: int) -> list[Sequence]:
        blocks = count()
        seqs = [self._sequence(ids, more_tokens, blocks) for ids in prompts]
        if next(blocks) > self._runner.num_blocks:
            raise RuntimeError(
                f"{len(prompts)} sequences of {len(prompts[0]) + more_tokens} tokens do not fit "
                f"{self._runner.num_blocks} KV blocks"
            )
        return seqs

    def _sequence(self, ids: list[int], more_tokens: int, blocks: Iterator[int]) -> Sequence:
        table = [next(blocks) for _ in range(-(-(len(ids) + more_tokens) // self._config.block_size))]
        sampling = SamplingParams(max_tokens=more_tokens, temperature=0.0, ignore_eos=True)
        return Sequence("bench", list(ids), sampling, len(ids), [], b"", 0.0, block_table=table)
