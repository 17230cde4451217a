"""Greedy parity with transformers in float32: the demo model, the same prompts, token for token and logit for logit.

    python -m bench.parity [--prompts 40] [--new-tokens 64] [--logits-of 5] [--threads N] [--data DIR]

Our side is the real engine: all prompts at once, batched, in chunks, over paged KV with prefix reuse. transformers
reads the same GGUF file by its own code and generates prompt by prompt. The end of sequence is ignored on both sides.
Where outputs part, it must be at a near-tie: transformers' own two best logits within NEAR_TIE. Fails (status 1) when
they part otherwise, part too often, or logits stray.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from bench.support.report import Row, write_report
from penstock.text.source import ModelSource, resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.weights import layout, load_weights
from penstock.workers.config import EngineConfig
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.sequence import Sampled, Sequence, Step

NEAR_TIE = 1e-4
MAX_NEAR_TIES = 2
MAX_LOGIT_DIFFERENCE = 2e-3
MAX_PROMPT_CHARS = 1200
RUN_TIMEOUT_S = 600.0

SOURCES = {
    "mt_bench.jsonl": "turns",
    "vicuna_bench.jsonl": "turns",
    "spec_bench.jsonl": "turns",
    "eagle_alpaca.jsonl": "turns",
    "eagle_sum.jsonl": "turns",
    "gsm8k_test.jsonl": "question",
    "humaneval.jsonl": "prompt",
    "aibrix_sharegpt_8min.jsonl": "prompt",
}
"""File under text/, and the field that holds the user's words."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What one side produced for a prompt. `logits` [new tokens, vocab_size]; None where they were not kept."""

    token_ids: list[int]
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two outputs part: at new token `position`, transformers' two best logits `gap` apart."""

    prompt: int
    position: int
    gap: float


class RecordingRunner:
    """A TorchRunner that keeps the logits of some requests."""

    is_asynchronous = False
    stairs = None

    def __init__(self, runner: TorchRunner, recorded: set[str]) -> None:
        self.num_blocks, self.max_model_len, self.eos_token_ids = (
            runner.num_blocks,
            runner.max_model_len,
            runner.eos_token_ids,
        )
        self.logits: dict[str, list[Tensor]] = {request_id: [] for request_id in recorded}
        self._runner = runner

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        batch, logits = self._runner.forward(step)
        for row, index in zip(logits, batch.sampled, strict=True):
            kept = self.logits.get(step.chunks[index].seq.request_id)
            if kept is not None:
                kept.append(row.clone())
        return partial(self._runner.choose, step, batch, logits)

    def can_run_ahead(self, step: Step) -> bool:  # noqa: ARG002 (as of Runner)
        return False

    def forget(self, seq: Sequence) -> None:
        self._runner.forget(seq)


def ours(
    source: ModelSource, config: EngineConfig, prompts: list[list[int]], new_tokens: int, num_recorded: int
) -> list[Generated]:
    """All prompts through one engine at once; logits of the first `num_recorded` are kept."""
    runner = RecordingRunner(load_runner(source, config), {str(number) for number in range(num_recorded)})
    # the engine is asked for neither adapters nor constraints
    with OfflineEngine(runner, config) as engine:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        sequences = [engine.submit(str(number), prompt, params) for number, prompt in enumerate(prompts)]
        until = time.monotonic() + RUN_TIMEOUT_S
        for _ in sequences:
            done = engine.wait(until - time.monotonic())
            assert done.finish is Finish.LENGTH, f"sequence {done.request_id} ended as {done.finish}: {done.error}"
    outputs = [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences]
    return [
        Generated(ids, torch.stack(runner.logits[str(n)]) if n < num_recorded else None)
        for n, ids in enumerate(outputs)
    ]


def theirs(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> Generated:
    """transformers' own greedy generation."""
    ids = torch.tensor([prompt])
    options = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    generate: Any = model.generate  # mypy takes it for an attribute of nn.Module's
    found = generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return Generated(found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).float())


def first_difference(prompt: int, mine: Generated, other: Generated) -> Difference | None:
    assert other.logits is not None
    for position, (a, b) in enumerate(zip(mine.token_ids, other.token_ids, strict=True)):
        if a != b:
            best, second = other.logits[position].topk(2).values.tolist()
            return Difference(prompt, position, best - second)
    return None


def logit_difference(mine: Generated, other: Generated, difference: Difference | None) -> float:
    """Largest difference of logits over all steps with the same tokens before them."""
    assert mine.logits is not None
    assert other.logits is not None
    steps = len(mine.token_ids) if difference is None else difference.position + 1
    return float((mine.logits[:steps] - other.logits[:steps]).abs().max())


def load_oracle(source: ModelSource) -> PreTrainedModel:
    """The checkpoint as transformers reads and dequantizes it."""
    transformers.utils.logging.disable_progress_bar()
    dequantized = GgufConfig(dequantize=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32, quantization_config=dequantized
    )
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None  # generate to the end, whatever comes
    model.eval()
    return model


def unequal_tensors(source: ModelSource, model: PreTrainedModel) -> list[str]:
    """Names of the tensors that our dequantization and transformers' disagree on, in any bit."""
    config = read_config(source)
    loaded, reference = load_weights(source, config, torch.float32), model.state_dict()
    weights = {target: weight for target, weight in loaded.items() if isinstance(weight, Tensor)}
    plan = layout(config)
    return [
        name
        for name, at in plan.items()
        if not torch.equal(weights[at.target][at.start : at.start + at.shape[0]], reference[name])
    ]


def chat_prompts(source: ModelSource, texts: list[str]) -> list[list[int]]:
    tokenizer = load_tokenizer(source)
    return [tokenizer.encode_chat([{"role": "user", "content": text[:MAX_PROMPT_CHARS]}]) for text in texts]


def sample_texts(data: Path, count: int) -> list[str]:
    """Users' words, as many of each kind of source, spread over each file."""
    texts: list[str] = []
    for number, (name, field) in enumerate(SOURCES.items()):
        share = count // len(SOURCES) + (number < count % len(SOURCES))
        lines = (data / "text" / name).read_text(encoding="utf-8").splitlines()
        for i in range(share):
            value = json.loads(lines[i * len(lines) // share])[field]
            texts.append(value[0] if isinstance(value, list) else value)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--logits-of", type=int, default=5, metavar="N", help="compare the logits of so many prompts at every step"
    )
    parser.add_argument("--threads", type=int, help="of torch, on both sides (default: one for each core)")
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("PENSTOCK_TEST_DATA") or None,
        help="folder with text/*.jsonl (default: $PENSTOCK_TEST_DATA)",
    )
    args = parser.parse_args()
    if args.data is None:
        parser.error("name the folder of prompts: --data, or PENSTOCK_TEST_DATA")
    source = resolve("demo")
    model = load_oracle(source)
    unequal, num_tensors = unequal_tensors(source, model), len(layout(read_config(source)))
    prompts = chat_prompts(source, sample_texts(args.data, args.prompts))
    config = EngineConfig(dtype="float32", max_num_seqs=16, max_batched_tokens=128, threads=args.threads)
    mine = ours(source, config, prompts, args.new_tokens, args.logits_of)
    differences: list[Difference] = []
    largest = 0.0
    for number, (prompt, generated) in enumerate(zip(prompts, mine, strict=True)):
        other = theirs(model, prompt, args.new_tokens)
        difference = first_difference(number, generated, other)
        if difference:
            differences.append(difference)
        if number < args.logits_of:
            largest = max(largest, logit_difference(generated, other, difference))
        print(
            f"{number + 1} of {len(prompts)}: {len(prompt)} prompt tokens, {difference or 'identical'}",
            file=sys.stderr,
            flush=True,
        )
    ties = [difference for difference in differences if difference.gap <= NEAR_TIE]
    rows = [
        Row("tensors equal to transformers' in every bit", num_tensors - len(unequal), num_tensors, "tensors"),
        Row(
            f"greedy outputs of {args.new_tokens} tokens identical",
            len(prompts) - len(differences),
            len(prompts),
            "prompts",
        ),
        Row(f"outputs that part at a near-tie (at most {MAX_NEAR_TIES})", len(ties), None, "prompts"),
        Row("outputs that part elsewhere (none allowed)", len(differences) - len(ties), None, "prompts"),
        Row(
            f"max |logit difference| over {args.logits_of} prompts (below {MAX_LOGIT_DIFFERENCE:g})",
            largest,
            None,
            "logit",
        ),
    ]
    write_report(
        "parity",
        rows,
        notes=[
            f"prompt {d.prompt} parts at token {d.position}; transformers' two best are {d.gap:.2e} apart"
            for d in differences
        ],
    )
    is_met = not unequal and len(ties) == len(differences) <= MAX_NEAR_TIES and largest < MAX_LOGIT_DIFFERENCE
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
