"""Escalation of hard requests: what the edge model's doubt is worth, and what waiting for it costs.

    PENSTOCK_TEST_DATA=FOLDER python -m bench.escalation --answers FOLDER [--edge demo] [--skip-live]

The cloud's model is the demo model with dense bfloat16 weights, the edge's the same in another precision (`--edge`:
the demo's own file of 4 bits, or a checkpoint by `penstock quantize`). Both answer grade-school sums and simple
requests, each behind three answered ones of its kind. How many tokens are judged, and the threshold for an agreement
of WANTED, are found on some prompts; everything reported is of others. Agreement: the same final answer as the
cloud's, by the rule of `penstock tiers tune`. The area above escalating a share that is drawn at random has a 95 %
interval by resampling prompts.

Then a platform with both pools answers further requests, streamed, each for a tenant that may leave the edge and for
one that may not, one after the other: the time to the first token that is shown, with and without the hold. And one
engine decodes the same sequences with and without log probabilities: what the measure costs in CPU time. Answers are
kept in the folder, so that a run that was broken off goes on. Fails (status 1) where the area may be chance.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.support.bf16_checkpoint import write_bf16_checkpoint
from bench.support.escalation_prompts import is_sum, read_prompts
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from penstock.base.cores import available_cores
from penstock.cli.tiers.checkpoint import ask_checkpoint
from penstock.cli.tiers.curve import (
    Pair,
    Point,
    Prices,
    area_above_random,
    draw_curve,
    interval,
    largest_area,
    pair_of,
    propose_for_agreement,
)
from penstock.cli.tiers.questions import CLOUD, EDGE, KeptAnswers, Question, read_questions
from penstock.tenancy.tenants import Settings
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.sequence import SeqOutput

MAX_TOKENS = 8
WANTED = 0.98
"""Agreement for which a threshold is looked for."""
NUMS_JUDGED = (1, 2, 4, 8)
PRICES = Prices(1.0, 1.0)
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "escalation.png"
CONFIG = """
gateway: {{port: {port}, ttft_target_s: 30.0}}
pools:
- {{name: edge, tier: edge, model: EDGE, served_names: [chat], escalation: {{tokens: TOKENS, min_mean_logprob: LEAST}},
   engine: {{threads: 1, kv_memory_bytes: 268435456}}}}
- {{name: cloud, tier: cloud, model: CLOUD, served_names: [chat], engine: {{threads: 1, kv_memory_bytes: 268435456}}}}
"""
HELD = (2, 4, 8, 16)
"""Numbers of held tokens whose wait is shown."""
LIVE_TOKENS, LIVE_LEAST, LIVE_MAX_TOKENS = 16, -0.8, 48
NUM_LIVE = 31
WITHIN_S = 120.0
LOGPROB_ROWS, LOGPROB_TOKENS, LOGPROB_ROUNDS = (1, 8), 64, 3


class Found(NamedTuple):
    """What doubt is worth for one kind of prompts."""

    kind: str
    pairs: Sequence[Pair]
    points: Sequence[Point]


class Answers(NamedTuple):
    """What models have answered."""

    kept: KeptAnswers
    digests: dict[str, str]
    """Digest of each checkpoint, by place."""


class Reply(NamedTuple):
    """One streamed answer of the platform."""

    first_s: float
    whole_s: float
    outcome: str


def ask_all(models: dict[str, str], questions: Sequence[Question], answers: Answers) -> None:
    """Have both models answer what they have not answered."""
    for place, model in models.items():
        missing = answers.kept.missing(place, answers.digests[place], questions, MAX_TOKENS)
        print(f"{place}: {len(missing)} of {len(questions)} prompts to answer", file=sys.stderr)
        if missing:
            ask_checkpoint(model, place, missing, MAX_TOKENS, available_cores(), answers.kept.add)


def pair_up(questions: Sequence[Question], answers: Answers, num_judged: int) -> list[Pair]:
    pairs = []
    for question in questions:
        edge, cloud = (
            answers.kept.find(place, answers.digests[place], question, MAX_TOKENS) for place in (EDGE, CLOUD)
        )
        if edge is not None and cloud is not None:
            pairs.append(pair_of(question, edge, cloud, num_judged, "auto", PRICES, PRICES))
    return pairs


def find(questions: Sequence[Question], answers: Answers, num_judged: int) -> list[Found]:
    """All prompts, and those of each kind."""
    kinds = {
        "all prompts": questions,
        "sums": [question for question in questions if is_sum(question)],
        "simple requests": [question for question in questions if not is_sum(question)],
    }
    paired = {kind: pair_up(of_kind, answers, num_judged) for kind, of_kind in kinds.items()}
    return [Found(kind, pairs, draw_curve(pairs)) for kind, pairs in paired.items()]


def rows_of(found: Found) -> list[Row]:
    kind, pairs, points = found
    area, bounds = area_above_random(pairs), interval(pairs)
    return [
        Row(f"{kind} ({len(pairs)}): agreement with none sent on", 100 * points[0].agreement, None, "%"),
        Row(f"{kind}: area above random (ours), an order that knows all (rival)", area, largest_area(pairs), ""),
        Row(f"{kind}: the area's 95 % interval, from", bounds.low, None, ""),
        Row(f"{kind}: to", bounds.high, None, ""),
    ]


def threshold_rows(found: Found, threshold: float) -> list[Row]:
    """What a threshold that was found on other prompts gives."""
    pairs = found.pairs
    share = sum(pair.score < threshold for pair in pairs) / len(pairs)
    agreement = sum(pair.score < threshold or pair.agrees for pair in pairs) / len(pairs)
    base = found.points[0].agreement
    return [
        Row(f"sent on by the threshold for {100 * WANTED:.0f} % on other prompts", 100 * share, None, "%"),
        Row(
            "agreement then (ours), with as many drawn (rival)", 100 * agreement, 100 * (base + share * (1 - base)), "%"
        ),
    ]


# the wait


def run_live(folder: Path, models: dict[str, str], questions: Sequence[Question]) -> dict[str, list[Reply]]:
    """Replies by what became of them: `stayed` where nothing was held."""
    config = (
        CONFIG.replace("EDGE", models[EDGE])
        .replace("CLOUD", models[CLOUD])
        .replace("TOKENS", str(LIVE_TOKENS))
        .replace("LEAST", str(LIVE_LEAST))
    )
    tenants = {"stays": Settings(tier_policy="edge_only"), "leaves": Settings(tier_policy="edge_first")}
    replies: dict[str, list[Reply]] = {}
    with running_platform(folder, config) as platform:
        keys = asyncio.run(make_keys(platform, tenants))
        with httpx.Client(base_url=platform.url, timeout=WITHIN_S, trust_env=False, verify=False) as client:
            for number, question in enumerate(questions):
                for name in sorted(keys, reverse=bool(number % 2)):
                    reply = ask_live(client, keys[name], question)
                    if number:  # the first one warms both
                        replies.setdefault(reply.outcome, []).append(reply)
        check_counts(platform, replies)
    return replies


def ask_live(client: httpx.Client, key: str, question: Question) -> Reply:
    """One answer, streamed. Raises httpx.HTTPStatusError."""
    headers = {"authorization": f"Bearer {key}"}
    body = {
        "model": "chat",
        "messages": question.as_dicts(),
        "max_tokens": LIVE_MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    first_s, began_s = None, time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if first_s is None and line.startswith("data: ") and '"content":"' in line and '"content":""' not in line:
                first_s = time.perf_counter() - began_s
        whole_s = time.perf_counter() - began_s
        request_id = response.headers["x-penstock-request-id"]
    receipt = client.get(f"/v1/receipts/{request_id}", headers=headers).json()
    return Reply(first_s or whole_s, whole_s, receipt["choices"][0]["escalation"]["outcome"])


def check_counts(platform: PlatformProcess, replies: dict[str, list[Reply]]) -> None:
    """The metric counts what receipts say; both tenants' first requests are not among the replies."""
    for outcome, of_outcome in replies.items():
        counted = platform.metric("penstock_escalations_total", model="chat", outcome=outcome)
        assert len(of_outcome) <= counted <= len(of_outcome) + 2, f"{outcome}: {counted} counted"


def live_rows(replies: dict[str, list[Reply]]) -> list[Row]:
    stayed = replies["not_allowed"]
    base = 1e3 * statistics.median(reply.first_s for reply in stayed)
    rows = []
    for outcome, of_outcome in replies.items():
        first, whole = [reply.first_s for reply in of_outcome], [reply.whole_s for reply in of_outcome]
        name = "not held" if outcome == "not_allowed" else outcome
        rows.append(
            Row(f"TTFT, {name} ({len(of_outcome)}); rival: not held", 1e3 * statistics.median(first), base, "ms")
        )
        rows.append(Row(f"whole answer, {name}", 1e3 * statistics.median(whole), None, "ms"))
    return rows


# the wait for what is held, at the engine alone


def time_first_tokens(model: str, questions: Sequence[Question]) -> list[list[float]]:
    """Seconds from the asking to each token of each answer, one question after the other."""
    source = resolve(model)
    tokenizer = load_tokenizer(source)
    config = EngineConfig(max_num_seqs=1, max_batched_tokens=512, threads=1, max_model_len=1024)
    times: dict[str, list[float]] = {}

    def note(output: SeqOutput) -> None:
        times[output.seq.request_id] += [time.perf_counter()] * len(output.token_ids)

    found = []
    with OfflineEngine(load_runner(source, config), config, note) as engine:
        for number, question in enumerate(questions):
            times[str(number)] = []
            began_s = time.perf_counter()
            prompt = tokenizer.encode_chat(question.as_dicts())
            params = SamplingParams(LIVE_TOKENS, temperature=0.0, logprobs=0, logprobs_tokens=LIVE_TOKENS)
            engine.submit(str(number), prompt, params)
            engine.wait()
            found.append([at_s - began_s for at_s in times[str(number)]])
    return found[1:]  # the first one warms the engine


def hold_rows(times: Sequence[Sequence[float]]) -> list[Row]:
    first_ms = 1e3 * statistics.median(each[0] for each in times)
    rows = []
    for count in HELD:
        shown_ms = 1e3 * statistics.median(each[min(count, len(each)) - 1] for each in times)
        rows.append(
            Row(f"engine alone: token {count} is there (ours), the first one (rival)", shown_ms, first_ms, "ms")
        )
    return rows


# the measure


def cost_rows(model: str) -> list[Row]:
    """CPU time of a token with log probabilities and without, in rounds that take turns."""
    source = resolve(model)
    tokenizer = load_tokenizer(source)
    config = EngineConfig(max_num_seqs=max(LOGPROB_ROWS), max_batched_tokens=512, threads=1, max_model_len=512)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Tell me about the sea and the ships on it."}])
    rows = []
    with OfflineEngine(load_runner(source, config), config) as engine:
        for num_rows in LOGPROB_ROWS:
            spent: dict[int | None, list[float]] = {None: [], 0: []}
            for _ in range(LOGPROB_ROUNDS + 1):
                for logprobs, times in spent.items():
                    times.append(_decode(engine, prompt, num_rows, logprobs))
            plain, told = (1e6 * statistics.median(times[1:]) for times in spent.values())
            rows.append(
                Row(
                    f"CPU time of a token, {num_rows} at once, with its log probability; rival: without",
                    told,
                    plain,
                    "us",
                )
            )
    return rows


def _decode(engine: OfflineEngine, prompt: list[int], num_rows: int, logprobs: int | None) -> float:
    """CPU seconds a token."""
    params = SamplingParams(LOGPROB_TOKENS, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    began_s = time.process_time()
    for number in range(num_rows):
        engine.submit(str(number), prompt, params)
    for _ in range(num_rows):
        engine.wait()
    return (time.process_time() - began_s) / (num_rows * LOGPROB_TOKENS)


def plot(found: Sequence[Found], times: Sequence[Sequence[float]], replies: dict[str, list[Reply]]) -> None:
    """Agreement by the share sent on; and the time to the first token shown, at the engine by the number of tokens
    held, and on the platform by what became of the answer, where it was asked."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (half a second that only this needs)

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, pairs, points in found:
        shares = [100 * point.share for point in points]
        (line,) = left.step(
            shares, [100 * point.agreement for point in points], where="post", label=f"{kind} ({len(pairs)})"
        )
        left.plot([0, 100], [100 * points[0].agreement, 100], linestyle="--", linewidth=0.8, color=line.get_color())
    left.set_xlabel("% sent on (dashed: drawn at random)")
    left.set_ylabel("% with the cloud model's final answer")
    left.legend(loc="lower right")
    for outcome, of_outcome in replies.items():
        shown = sorted(1e3 * reply.first_s for reply in of_outcome)
        parts = [100 * (number + 1) / len(shown) for number in range(len(shown))]
        name = "not held" if outcome == "not_allowed" else outcome
        right.step(shown, parts, where="post", label=f"{name} ({len(times)})")
    for count in () if replies else (1, *HELD):
        shown = sorted(1e3 * each[min(count, len(each)) - 1] for each in times)
        parts = [100 * (number + 1) / len(shown) for number in range(len(shown))]
        right.step(shown, parts, where="post", label="nothing held" if count == 1 else f"{count} tokens held")
    right.set_xlabel("ms to the first token that is shown")
    right.set_ylabel("% of answers")
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="folder of the kept answers and the bfloat16 model")
    parser.add_argument("--edge", default="demo", help="the edge's checkpoint")
    parser.add_argument("--skip-live", action="store_true", help="leave out the platform")
    options = parser.parse_args()
    data = os.environ.get("PENSTOCK_TEST_DATA")
    if data is None:
        parser.error("PENSTOCK_TEST_DATA names no folder with prompts")
    cloud = options.answers / "bf16"
    if not (cloud / "config.json").exists():
        write_bf16_checkpoint(cloud)
    models = {EDGE: options.edge, CLOUD: str(cloud)}
    prompts = read_prompts(Path(data))
    answers = Answers(
        KeptAnswers(options.answers / f"{Path(options.edge).name}.jsonl"),
        {place: resolve(model).digest for place, model in models.items()},
    )
    ask_all(models, [*prompts.tuning, *prompts.measured], answers)

    # what tuning says
    areas = {count: area_above_random(pair_up(prompts.tuning, answers, count)) for count in NUMS_JUDGED}
    num_judged = max(areas, key=lambda count: areas[count])
    chosen = propose_for_agreement(draw_curve(pair_up(prompts.tuning, answers, num_judged)), WANTED)

    # what it is worth elsewhere
    found = find(prompts.measured, answers, num_judged)
    rows = [row for each in found for row in rows_of(each)] + threshold_rows(found[0], chosen.threshold)
    rows += cost_rows(options.edge)
    notes = [
        f"edge: {Path(options.edge).name}, cloud: the demo model in bfloat16; answers of {MAX_TOKENS} tokens at most",
        f"tokens judged, by the largest area on {len(prompts.tuning)} other prompts: {num_judged} of {NUMS_JUDGED}",
        f"threshold for {100 * WANTED:.0f} % agreement there: {chosen.threshold:.4f}",
    ]
    live = read_questions(Path(data) / "text" / "eagle_alpaca.jsonl")[:NUM_LIVE]
    times, replies = time_first_tokens(options.edge, live), dict[str, list[Reply]]()
    rows += hold_rows(times)
    if not options.skip_live:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            replies = run_live(Path(folder), models, live)
        rows += live_rows(replies)
        notes.append(f"TTFT: {LIVE_TOKENS} tokens held, threshold {LIVE_LEAST}, one request at a time")
    plot(found, times, replies)
    write_report("escalation", rows, notes=notes)
    return 0 if interval(found[0].pairs).low > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
