"""What a replica computes before it is ready, so that no request waits for what happens once: kernels that are
compiled, torch's own that are loaded, memory that is taken.

Steps of made-up sequences go through the runner as the engine's do, so whatever will serve is what is warmed. Kernels
differ by little that changes from step to step: by the tokens of a step and the rows of logits, where products with
packed matrices change their tiles; by whether a sequence has one new token, a few or many; by whether adapters, and how
many rows of them, are in it. `plan_steps` has each of these that a configuration can meet. It is pure.

Invariant: nothing of it stays. Blocks are those that nobody holds and nobody publishes, sequences are forgotten, and
the adapter, of zeros, goes with the call.
"""

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors.torch import save_file

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.store import digest_of
from penstock.perf.model import MAX_SCORED_TOKENS
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.triton.attention.plan import FEW_TOKENS
from penstock.workers.compute.triton.products.tiling import BUCKETS
from penstock.workers.compute.triton.segments import FEW_ROWS
from penstock.workers.config import EngineConfig
from penstock.workers.engine.probe import make_chunk
from penstock.workers.engine.sequence import Resident, Sequence, Step

CONTEXT = 4096
"""Context tokens of decode rows, as far as a sequence may be that long: from here on attention on a GPU splits no
further, so its partial results take no more."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
"""Parameters of a prompt whose every token has a row of logits."""
SAMPLED = SamplingParams(
    max_tokens=2, temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1,
    presence_penalty=0.1, logit_bias=((0, 1.0),), min_tokens=2, logprobs=5,
)  # fmt: skip
"""Parameters that take all there is to choosing a token, but for a grammar's mask."""

_log = logging.getLogger("penstock.runner")


class Warmed(Protocol):
    """The part of a runner that is needed here."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    def launch(self, step: Step) -> Callable[[], object]: ...
    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> Resident: ...
    def forget(self, seq: Sequence) -> None: ...


class WarmChunk(NamedTuple):
    """Tokens of a made-up sequence in a step."""

    context: int
    """Tokens that count as computed."""
    num_tokens: int
    sampling: SamplingParams = GREEDY
    max_drafts: int = 0
    has_adapter: bool = False


def warm_up(runner: Warmed, config: EngineConfig, model: ModelConfig) -> None:
    """Run every step of the plan. Takes as long as compiling does: a minute or two where nothing is on the disk."""
    begun_s = time.perf_counter()
    steps = plan_steps(config, runner.max_model_len)
    adapter = load_zeros(runner, model) if config.adapters.slots else None
    for index, chunks in enumerate(steps):
        run_step(runner, chunks, config.block_size, adapter, has_copies=index == 0)
    _log.info("warmed up", extra={"num_steps": len(steps), "seconds": round(time.perf_counter() - begun_s, 3)})


def plan_steps(config: EngineConfig, max_model_len: int) -> list[list[WarmChunk]]:
    """Steps of all kinds that the engine may schedule, the largest first. max_model_len: tokens of a sequence."""
    longest = max(1, max_model_len - 1)
    rows, most = config.max_num_seqs, min(config.token_budget, config.max_num_seqs * longest)
    steps = largest_steps(config, max_model_len)
    for size in _sizes(most):
        sampling = SCORED if size <= MAX_SCORED_TOKENS else GREEDY
        steps.append([WarmChunk(0, length, sampling) for length in _spread(size, longest)])
    for size in _sizes(rows):
        context = min(CONTEXT, longest - 1)
        steps.append([WarmChunk(context, 1)] * size)
        steps.append([WarmChunk(context, 1, SAMPLED)] * size)
    if config.speculation.method != "none":
        steps += _draft_steps(config, longest)
    if config.adapters.slots:
        sizes = (1, min(BUCKETS[0], most), min(FEW_ROWS + 1, most))
        steps += [[WarmChunk(0, length, has_adapter=True) for length in _spread(size, longest)] for size in sizes]
    return steps


def largest_steps(config: EngineConfig, max_model_len: int) -> list[list[WarmChunk]]:
    """The steps that take most memory: as many tokens as fit, from prompts alone and beside rows that sample; as many
    rows of logits as fit, of drafts, which requests may bring themselves, and of scored prompts; and ends of prompts
    behind long contexts, of which attention on a GPU keeps a result for each part."""
    longest, rows, budget = max(1, max_model_len - 1), config.max_num_seqs, config.token_budget
    num_prompts = min(rows, -(-budget // longest))
    prompts = _spread(min(budget, rows * longest), longest)
    room = min(budget - (rows - num_prompts), num_prompts * longest)
    context, drafts = min(CONTEXT, longest - 1), _most_drafts(config, rows, longest)
    scored, few = min(room, MAX_SCORED_TOKENS), min(FEW_TOKENS, longest, budget)
    return [
        [WarmChunk(0, length) for length in prompts],
        [WarmChunk(context, 1, SAMPLED)] * (rows - num_prompts) + [WarmChunk(0, n) for n in _spread(room, longest)],
        [WarmChunk(context, 1, SAMPLED)] * (rows - num_prompts)
        + [WarmChunk(0, length, SCORED) for length in _spread(scored, longest)],
        [WarmChunk(context - drafts, 1, SAMPLED, drafts)] * rows,
        [WarmChunk(min(CONTEXT, longest - few), few)] * min(rows, budget // few),
    ]


def _draft_steps(config: EngineConfig, longest: int) -> Iterator[list[WarmChunk]]:
    """Steps whose drafter has as many rows, and as many tokens to catch up with, as each tile takes."""
    rows, budget = config.max_num_seqs, config.token_budget
    for size in _sizes(min(rows, budget // 2)):
        context = min(1, longest - 1)
        yield [WarmChunk(context, 1, SAMPLED if size == 1 else GREEDY, _most_drafts(config, size, longest))] * size
    for size in _sizes(min(budget, rows * longest)):
        lengths = _spread(size, max(1, longest - config.speculation.max_draft_tokens))
        drafts = _most_drafts(config, len(lengths), longest)
        if len(lengths) <= rows and drafts:
            yield [WarmChunk(length - 1, 1, GREEDY, drafts) for length in lengths]


def _most_drafts(config: EngineConfig, rows: int, longest: int) -> int:
    """Draft tokens that a step has places for behind each of so many rows."""
    return max(0, min(config.speculation.max_draft_tokens, config.token_budget // rows - 1, longest - 1))


def _sizes(most: int) -> list[int]:
    """Numbers of rows, ascending, up to `most`, that have every bucket of products between them: 1, each bucket full,
    and one more than the largest has."""
    return sorted({min(size, most) for size in (1, *BUCKETS, BUCKETS[-1] + 1)} - {0})


def _spread(total: int, longest: int) -> list[int]:
    """`total` tokens as sequences of at most `longest`."""
    return [min(longest, total - start) for start in range(0, total, longest)]


def run_step(
    runner: Warmed,
    chunks: list[WarmChunk],
    block_size: int,
    adapter: Resident | None = None,
    *,
    has_copies: bool = False,
) -> None:
    """Run one step and forget its sequences. has_copies: a block is copied before it, as for beams that go apart."""
    blocks = count()
    made = [
        make_chunk(
            chunk.context,
            chunk.num_tokens,
            blocks,
            runner.num_blocks,
            block_size,
            chunk.max_drafts,
            chunk.sampling,
            adapter if chunk.has_adapter else None,
        )
        for chunk in chunks
    ]
    try:
        runner.launch(Step(made, [], [(0, 1)] if has_copies and runner.num_blocks > 1 else []))()
    finally:
        for chunk in made:
            runner.forget(chunk.seq)


def load_zeros(runner: Warmed, model: ModelConfig) -> Resident:
    """An adapter of every linear layer that adds nothing, loaded as any other is."""
    with tempfile.TemporaryDirectory(prefix="penstock-warm-up-") as name:
        folder = Path(name)
        write_zeros(folder, model)
        return runner.load_adapter(digest_of(folder), folder, 1)


def write_zeros(folder: Path, model: ModelConfig) -> None:
    """An adapter of rank 1 in PEFT's format (`penstock.adapters.peft`), all zeros."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model.num_layers):
        for module, (outputs, inputs) in model.linear_shapes.items():
            part = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.zeros(1, inputs, dtype=torch.bfloat16)
            tensors[f"{name}.lora_B.weight"] = torch.zeros(outputs, 1, dtype=torch.bfloat16)
    save_file(tensors, folder / WEIGHTS_FILE)
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": list(model.linear_shapes)}
    (folder / CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")
