"""Step costs of vLLM, measured at the start over a few made-up sequences. Pure but for the `compute` it is given.

The bridge reports how long a step took and which sequences gained a token, not what vLLM scheduled. A sequence's first
token means that its prompt was computed, all of it in that step where the prompts fit a step's budget, as those of the
probe do.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from penstock.perf.fit import StepSample, fit
from penstock.wire.frames import StepCosts, pack_token_ids
from penstock.workers.config import EngineConfig
from penstock.workers.vllm.bridge import Add, Stepped

BUDGET_S = 4.0
"""The probe stops after the point that exceeds this."""
NUM_DECODES = 4
"""Steps measured behind each point's prefill; the fastest counts."""
SHORT = 16
"""Tokens of a short prompt."""
GREEDY: dict[str, Any] = {"max_tokens": NUM_DECODES + 1, "temperature": 0.0, "ignore_eos": True}
EVERYTHING: dict[str, Any] = GREEDY | {
    "temperature": 0.8,
    "seed": 1,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logit_bias": {1: -1.0},
    "min_tokens": 2,
    "stop_token_ids": [2],
    "logprobs": 3,
}
"""Arguments of vLLM's SamplingParams, all that a request can set; compiling what log probabilities need has taken vLLM
40 s on a busy machine."""


class Point(NamedTuple):
    """A step to measure: `rows` sequences with prompts of `prompt` tokens each."""

    rows: int
    prompt: int


class Progress(NamedTuple):
    """Length of a sequence before a step, and whether its prompt is computed."""

    context: int
    """Tokens of the sequence, prompt and output."""
    is_prefilled: bool


def measure(
    compute: Callable[[list[Add]], Iterator[Stepped]],
    config: EngineConfig,
    max_model_len: int,
    clock: Callable[[], float],
) -> StepCosts:
    """Step costs of vLLM, in BUDGET_S and a point at most.

    compute: adds sequences, all before the next step, and yields the steps until they have finished.
    """
    rids = count(1)
    points = list(plan_points(config, max_model_len))
    _warm(compute, rids)
    samples: list[StepSample] = []
    until_s = clock() + BUDGET_S
    for point in points:
        samples += _run(compute, point, rids)
        if clock() > until_s:
            break
    return fit(samples)


def _warm(compute: Callable[[list[Add]], Iterator[Stepped]], rids: Iterator[int]) -> None:
    """Make vLLM build now what it builds when it is first used: the forward pass, and each kind of sampling, with one
    row and with several."""
    for rows in (1, 2):
        for sampling in (GREEDY, EVERYTHING):
            for _ in compute([_make_add(next(rids), SHORT, sampling) for _ in range(rows)]):
                pass


def plan_points(config: EngineConfig, max_model_len: int) -> Iterator[Point]:
    """Points that fit a step's budget, those that matter most first."""
    longest = max(1, min(config.token_budget, max_model_len - NUM_DECODES - 1))
    few = min(8, config.max_num_seqs)
    many = min(config.max_num_seqs, 64)
    yield Point(1, min(SHORT, longest))
    yield Point(few, max(1, min(SHORT, longest // few)))
    yield Point(1, longest)
    yield Point(few, max(1, longest // few))
    yield Point(1, max(1, longest // 4))
    yield Point(many, max(1, min(SHORT, longest // many)))


def make_sample(stepped: Stepped, before: Mapping[int, Progress]) -> StepSample:
    """Shape and time of a step. before: the sequences as they were; those without output were not in it."""
    prefill_tokens = kv_tokens = 0
    query_context = 0.0
    for output in stepped.outputs:
        context, is_prefilled = before[output.rid]
        if is_prefilled:
            kv_tokens += context
        else:
            computed = context - output.num_cached_tokens
            prefill_tokens += computed
            query_context += computed * (output.num_cached_tokens + (computed + 1) / 2)
    return StepSample(len(stepped.outputs), prefill_tokens, query_context, kv_tokens, 0, max(stepped.seconds, 1e-6))


def _run(compute: Callable[[list[Add]], Iterator[Stepped]], point: Point, rids: Iterator[int]) -> list[StepSample]:
    """The prefill and the fastest decode step of a point."""
    adds = [_make_add(next(rids), point.prompt, GREEDY) for _ in range(point.rows)]
    progress = {add.rid: Progress(point.prompt, False) for add in adds}
    prefills: list[StepSample] = []
    decodes: list[StepSample] = []
    for stepped in compute(adds):
        if len(stepped.outputs) == point.rows:
            sample = make_sample(stepped, progress)
            (prefills if sample.prefill_tokens else decodes).append(sample)
        for output in stepped.outputs:
            progress[output.rid] = Progress(progress[output.rid].context + len(output.token_ids), True)
    return prefills[:1] + sorted(decodes, key=lambda sample: sample.seconds)[:1]


def _make_add(rid: int, num_tokens: int, sampling: dict[str, Any]) -> Add:
    """A made-up sequence with a salt of its own: nothing of it is found in the cache, and nobody finds it there."""
    return Add(rid, pack_token_ids([1] * num_tokens), sampling, f"probe:{rid}")
