"""Answers through gateway and replicas in one process, over the real stream: the same greedy ones alone and in a crowd,
with an adapter, with drafts, and when a replica is lost in the middle.

On a GPU, in bfloat16, near-ties between tokens of random weights are frequent and batches of different sizes round
differently: there the share of equal tokens is told. In a check, in float32, they must be equal.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.gpu.rows import Rows
from bench.gpu.steps.cluster import Answer, Cluster, open_cluster
from bench.gpu.steps.engines import make_random_weights, percentile, prompt_of
from bench.gpu.steps.shapes import VARIANTS, Bench, bench_for
from bench.gpu.steps.sizes import Scale, fitted_or_said
from penstock.adapters.store import digest_of
from penstock.wire.frames import SamplingParams

FULL = Scale(64, 2048, 1024, 4096, 300, 96, 64)
TINY = Scale(4, 32, 128, 32, 20, 6, 4)
RANK = 8
NUM_REPLICAS = 2


def write_adapter(bench: Bench, folder: Path) -> str:
    """A random adapter of the attention's q and v, as peft saves it, in a folder named by its digest, which is
    returned."""
    config, draft = bench.config, folder / "draft"
    draft.mkdir()
    generator = torch.Generator().manual_seed(3)
    heads = {"q_proj": config.num_heads, "v_proj": config.num_kv_heads}
    tensors = {}
    for layer in range(config.num_layers):
        for module, count in heads.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            spread = 0.5 * config.hidden_size**-0.5
            tensors[f"{name}.lora_A.weight"] = spread * torch.randn(RANK, config.hidden_size, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(count * config.head_dim, RANK, generator=generator)
    save_file(tensors, draft / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none",
                "target_modules": list(heads)}  # fmt: skip
    (draft / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    digest = digest_of(draft)
    draft.rename(folder / digest)
    return digest


class Session:
    """The questions, and what is found of them."""

    def __init__(self, rows: Rows, name: str, cluster: Cluster, bench: Bench, scale: Scale, *, is_exact: bool) -> None:
        self._rows, self._name, self._cluster, self._is_exact = rows, name, cluster, is_exact
        self.is_good = True
        draw = random.Random(11)
        self._prompts = [
            prompt_of(draw, bench.config.vocab_size, scale.prompt_tokens + number)
            for number in range(scale.num_requests)
        ]
        self._greedy = SamplingParams(max_tokens=scale.output_tokens, temperature=0.0, ignore_eos=True)

    async def run(self, adapter: str) -> None:
        """Everything, one after the other; the loss of a replica last."""
        alone = [await self._cluster.ask(prompt, self._greedy) for prompt in self._prompts[:2]]
        self._add_times("one at a time", alone)
        crowd = await asyncio.gather(*(self._cluster.ask(prompt, self._greedy) for prompt in self._prompts))
        self._add_times(f"{len(self._prompts)} at once", crowd)
        self._compare("in a crowd as alone", alone, crowd[: len(alone)])
        await self._ask_adapter(adapter, alone[0])
        drafted = [
            await self._cluster.ask(prompt, self._greedy, prediction=answer.token_ids)
            for prompt, answer in zip(self._prompts, alone, strict=False)
        ]
        self._compare("with drafts as without", alone, drafted)
        self._rows.add(f"{self._name}: draft tokens accepted", self._cluster.num_accepted_drafts, None, "tokens")
        await self._lose_a_replica(crowd)

    async def _ask_adapter(self, adapter: str, plain: Answer) -> None:
        answers = [await self._cluster.ask(self._prompts[0], self._greedy, adapter=adapter) for _ in range(2)]
        self._compare("with an adapter twice", answers[:1], answers[1:])
        differs = answers[0].token_ids != plain.token_ids
        self.is_good &= differs
        self._rows.add(
            f"{self._name}: an adapter changes the answer", note="yes" if differs else "no: it is not applied"
        )

    async def _lose_a_replica(self, expected: Sequence[Answer]) -> None:
        num_begun = 0

        def count() -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == len(self._prompts) // 2:
                busiest = max(self._cluster.replicas, key=lambda replica: replica.server.num_inflight)
                busiest.kill()

        answers = await asyncio.gather(
            *(self._cluster.ask(prompt, self._greedy, begun=count) for prompt in self._prompts)
        )
        num_moved = sum(answer.attempts > 1 for answer in answers)
        is_whole = all(len(answer.token_ids) == self._greedy.max_tokens for answer in answers)
        self.is_good &= is_whole and num_moved > 0
        note = "all answers are whole" if is_whole else "some answers are not whole"
        self._rows.add(
            f"{self._name}: answers that went on elsewhere when a replica was lost", num_moved, None, "", note
        )
        self._compare("when a replica was lost as before", expected, answers)

    def _add_times(self, label: str, answers: Sequence[Answer]) -> None:
        for what, values in (("TTFT", [a.ttft_s for a in answers]), ("TPOT", [a.tpot_s for a in answers])):
            self._rows.add(f"{self._name}, {label}: {what} p50", 1e3 * percentile(values, 0.5), None, "ms")

    def _compare(self, label: str, expected: Sequence[Answer], answers: Sequence[Answer]) -> None:
        pairs = [
            (mine, yours)
            for answer, other in zip(expected, answers, strict=True)
            for mine, yours in zip(answer.token_ids, other.token_ids, strict=True)
        ]
        share = sum(mine == yours for mine, yours in pairs) / len(pairs)
        self.is_good &= share == 1 or not self._is_exact
        self._rows.add(f"{self._name}, {label}: equal tokens", 100 * share, None, "%")


def run(rows: Rows, name: str, *, is_check: bool) -> bool:
    """name: the variant's. Returns False where an answer is not whole, or in a check not the same."""
    variant = next(variant for variant in VARIANTS if variant.name == name)
    bench = bench_for(is_check=is_check)
    planned = TINY if is_check else FULL
    scale = fitted_or_said(rows, f"gateway, {name}", planned, bench, variant, NUM_REPLICAS)
    if scale is None:
        return True
    weights = make_random_weights(bench, variant)

    async def play() -> bool:
        with tempfile.TemporaryDirectory(prefix="penstock-gpu-adapters-") as text:
            folder = Path(text)
            adapter = write_adapter(bench, folder)
            async with open_cluster(bench, variant, weights, scale, NUM_REPLICAS, folder) as cluster:
                session = Session(rows, f"gateway, {name}", cluster, bench, scale, is_exact=is_check)
                await session.run(adapter)
        return session.is_good

    return asyncio.run(play())
