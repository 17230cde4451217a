"""Speculation through the whole platform: the same seeded requests to a pool without, one with look-up, one with a
draft model.

    python -m bench.speculation [--only sameness speed head] [--requests 200] [--speed-requests 24] [--head FILE]

Sameness: three exact pools of the demo model that draft as much as they may; each gets the same requests greedy and
again at temperature 0.8, some with penalties, half of them about a text that the answer may quote. Reported: answers
whose token ids are the plain pool's, the share of draft tokens accepted as /metrics counts it, tokens of a sequence's
step (1 without drafts).

Speed: the same pools as they would be used, not exact, and drafting as much as pays; one request at a time, and four.
Everywhere the pools are asked in turn, a round of requests each, while the others are idle. Fails (status 1) when an
answer differs or a drafter has nothing accepted.

Head: a draft head for the demo model (--head), beside no drafter, over prompts of Spec-Bench and HumanEval
by category (PENSTOCK_TEST_DATA), with the 4-bit file and with the same weights in bfloat16, one and eight requests at a
time, greedy and at 0.8; each prompt goes to both pools in turn, time is from sending to the whole answer.

The draft model is the demo model's own first 25 layers of 30: no smaller one has its vocabulary. It costs nearly what
it saves, so it shows that answers stay the same and that drafts which do not pay are left out, not what a good draft
model gains.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.support.bf16_checkpoint import write_bf16_checkpoint
from bench.support.drafted_prompts import MAX_WORDS, TEMPERATURES, chat, data_folder, drafted_prompts
from bench.support.loopback import WORDS
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report

PARTS = ("sameness", "speed", "head")
PLAIN, DRAFTING = "plain", ("ngram", "draft")
POOLS = (PLAIN, *DRAFTING)
CONFIG = """
gateway: {{port: {port}}}
pools:
  - name: plain
    served_names: [plain]
    engine: &engine ENGINE
  - name: ngram
    served_names: [ngram]
    engine: {{<<: *engine, speculation: {{method: ngram, adaptive: ADAPTIVE}}}}
  - name: draft
    served_names: [draft]
    engine: {{<<: *engine, speculation: {{method: draft, model: demo, draft_layers: 25, adaptive: ADAPTIVE}}}}
"""
HEAD_CONFIG = """
gateway: {{port: {port}}}
pools:
  - name: plain
    model: MODEL
    served_names: [plain]
    engine: &engine {{threads: 2, kv_memory_bytes: 300000000, max_num_seqs: 8}}
  - name: head
    model: MODEL
    served_names: [head]
    engine: {{<<: *engine, speculation: {{method: head, head: HEAD, max_draft_tokens: 3}}}}
"""
ENGINE = "threads: 2, kv_memory_bytes: 300000000, max_num_seqs: 8"
EXACT = CONFIG.replace("ENGINE", f"{{{{dtype: float32, exact: true, {ENGINE}, max_batched_tokens: 64}}}}").replace(
    "ADAPTIVE", "false"
)
FAST = CONFIG.replace("ENGINE", f"{{{{{ENGINE}}}}}").replace("ADAPTIVE", "true")
STREAMS, MAX_TOKENS, ROUND = 8, 16, 25
SPEED_STREAMS, SPEED_TOKENS, SPEED_ROUND = (1, 4), 64, 8
HEAD_STREAMS = (1, 8)
HEAD_ROUND, HEAD_PASSES = 26, 3
"""Requests of a round with more than one at a time: as one ends, the next one begins. And how often all of them are
asked: a round takes three seconds, and so few differ by more than drafts gain."""
REPORT_S = 1.5
"""Seconds after which a replica's counts are on /metrics: it reports at least once a second."""


class Counts(NamedTuple):
    """Draft tokens of a pool, as on /metrics."""

    drafted: float
    accepted: float

    def since(self, before: "Counts") -> "Counts":
        return Counts(self.drafted - before.drafted, self.accepted - before.accepted)


class Run(NamedTuple):
    """A pool's answers, in the order of the requests."""

    token_ids: list[list[int]]
    seconds: float
    counts: Counts

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def acceptance(self) -> float:
        return self.counts.accepted / self.counts.drafted if self.counts.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives a sequence: the draft tokens it accepts, and one more."""
        return self.num_tokens / (self.num_tokens - self.counts.accepted)


def request(number: int, temperature: float, max_tokens: int, num_words: int = 24) -> dict[str, Any]:
    """The number-th request, without its model. num_words: length of the text that every other one asks to repeat."""
    rng = random.Random(number)
    text = " ".join(rng.choices(WORDS, k=num_words))
    content = (
        f"Repeat this text twice, word by word: {text}"
        if number % 2
        else f"What is a {rng.choice(WORDS)} {rng.choice(WORDS)}? Question {number}."
    )
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "seed": number,
        "return_token_ids": True,
    }
    body["temperature"] = temperature
    if number % 5 == 4:
        body |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 4}
    return body


async def ask_all(
    platform: PlatformProcess, pool: str, bodies: Iterable[dict[str, Any]], streams: int
) -> list[list[int]]:
    """Token ids of the answers, in the order of the requests."""
    answers: dict[int, list[int]] = {}
    waiting = enumerate(bodies)
    headers = {"authorization": f"Bearer {platform.key}"}
    async with httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=300, trust_env=False) as http:

        async def stream() -> None:
            for place, body in waiting:
                response = await http.post("/v1/chat/completions", json=body | {"model": pool})
                response.raise_for_status()
                answers[place] = response.json()["choices"][0]["token_ids"]

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(stream())
    return [answers[place] for place in sorted(answers)]


def counted(platform: PlatformProcess, pool: str) -> Counts:
    return Counts(
        platform.metric("penstock_draft_tokens_total", pool=pool),
        platform.metric("penstock_accepted_draft_tokens_total", pool=pool),
    )


def run_in_turn(
    platform: PlatformProcess, pools: tuple[str, ...], bodies: list[dict[str, Any]], streams: int, round_size: int
) -> dict[str, Run]:
    """Every pool gets every request, a round of them at a time."""
    before = {pool: counted(platform, pool) for pool in pools}
    answers: dict[str, list[list[int]]] = {pool: [] for pool in pools}
    seconds = dict.fromkeys(pools, 0.0)
    for start in range(0, len(bodies), round_size):
        for pool in pools:
            begun_s = time.perf_counter()
            answers[pool] += asyncio.run(ask_all(platform, pool, bodies[start : start + round_size], streams))
            seconds[pool] += time.perf_counter() - begun_s
        print(f"{len(answers[pools[0]])} of {len(bodies)}", file=sys.stderr, end="\r")
    time.sleep(REPORT_S)
    return {pool: Run(answers[pool], seconds[pool], counted(platform, pool).since(before[pool])) for pool in pools}


def sameness(requests: int) -> Iterator[tuple[float, dict[str, Run]]]:
    """Runs with each drafter over the same requests, at one temperature after another."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), EXACT) as platform,
    ):
        for temperature in TEMPERATURES:
            yield (
                temperature,
                run_in_turn(
                    platform,
                    POOLS,
                    [request(number, temperature, MAX_TOKENS) for number in range(requests)],
                    STREAMS,
                    ROUND,
                ),
            )


def speed(requests: int) -> Iterator[tuple[int, dict[str, Run]]]:
    """Runs with each drafter, at one number of concurrent requests after another."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), FAST) as platform,
    ):
        for streams in SPEED_STREAMS:
            # other numbers each time: no prompt is in the prefix cache already
            numbers = range(10_000 * streams, 10_000 * streams + requests)
            bodies = [
                request(number, TEMPERATURES[number // 2 % 2], SPEED_TOKENS) | {"ignore_eos": True}
                for number in numbers
            ]
            yield streams, run_in_turn(platform, POOLS, bodies, streams, SPEED_ROUND)


def head_speed(head: str, count: int, max_tokens: int) -> Iterator[Row]:
    """Output with a head beside that without, by weights, requests at a time, temperature and category."""
    folder = data_folder()
    if folder is None:
        print("PENSTOCK_TEST_DATA names no folder of prompts: no head is measured", file=sys.stderr)
        return
    prompts = drafted_prompts(folder, count)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        write_bf16_checkpoint(Path(name) / "bf16")
        for weights, model in (("int4", "demo"), ("bf16", f"{name}/bf16")):
            config = HEAD_CONFIG.replace("MODEL", model).replace("HEAD", head)
            state = Path(name) / f"platform-{weights}"
            state.mkdir()
            with running_platform(state, config) as platform:
                yield from _cost_rows(platform, weights)
                yield from _head_rows(platform, weights, prompts, max_tokens)


def _cost_rows(platform: PlatformProcess, weights: str) -> Iterator[Row]:
    """What the replica with the head takes a step's parts to cost, by the receipt of a request: whether it drafts hangs
    on that."""
    with httpx.Client(
        base_url=platform.url, headers={"authorization": f"Bearer {platform.key}"}, timeout=60, trust_env=False
    ) as client:
        response = client.post("/v1/chat/completions", json=chat("Hello", 1, 0.0, 4) | {"model": "head"})
        response.raise_for_status()
        receipt = client.get(f"/v1/receipts/{response.headers['x-penstock-request-id']}").raise_for_status().json()
    costs = receipt["choices"][0]["basis"]["compared"][0]["costs"]
    for name in ("base_s", "row_s", "draft_token_s", "draft_round_s", "sampled_row_s"):
        said = f"head, {weights}: {name.removesuffix('_s')}, as the replica measured it"
        yield Row(said, 1e3 * costs[name], None, "ms")


def _head_rows(
    platform: PlatformProcess, weights: str, prompts: dict[str, list[str]], max_tokens: int
) -> Iterator[Row]:
    pools = (PLAIN, "head")
    for streams in HEAD_STREAMS:
        for temperature in TEMPERATURES:
            where = f"head, {weights}, {streams} at a time, temperature {temperature:g}"
            runs: dict[str, list[Run]] = {pool: [] for pool in pools}
            texts_of_all = [text for texts in prompts.values() for text in texts]
            groups = prompts if streams == 1 else {"all": HEAD_PASSES * texts_of_all}
            for category, texts in groups.items():
                # another seed each time; from the second pass on prompts are in the prefix cache of both pools
                bodies = [chat(text, 100 * streams + n, temperature, max_tokens) for n, text in enumerate(texts)]
                found = run_in_turn(platform, pools, bodies, streams, 1 if streams == 1 else HEAD_ROUND)
                for pool in pools:
                    runs[pool].append(found[pool])
                if streams == 1:
                    yield _speed_row(f"{where}: {category}", found["head"], found[PLAIN])
            head, plain = (_together(runs[pool]) for pool in ("head", PLAIN))
            yield _speed_row(f"{where}: all", head, plain)
            yield Row(f"{where}: tokens a step (rival: plain)", head.tokens_per_step, 1.0, "")
            yield Row(f"{where}: draft tokens accepted", 100 * head.acceptance, None, "%")


def _speed_row(name: str, found: Run, plain: Run) -> Row:
    return Row(name, found.num_tokens / found.seconds, plain.num_tokens / plain.seconds, "tokens/s")


def _together(runs: list[Run]) -> Run:
    counts = [run.counts for run in runs]
    return Run(
        [ids for run in runs for ids in run.token_ids],
        sum(run.seconds for run in runs),
        Counts(sum(count.drafted for count in counts), sum(count.accepted for count in counts)),
    )


def num_equal(found: Run, plain: Run) -> int:
    return sum(mine == theirs for mine, theirs in zip(found.token_ids, plain.token_ids, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Speculation: the same answers, sooner.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--speed-requests", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--head", default="demo", help="file of a draft head for the demo model; the one that comes with Penstock"
    )
    parser.add_argument("--head-prompts", type=int, default=3, help="prompts of a category")
    parser.add_argument("--head-tokens", type=int, default=96, help="longest answer")
    options = parser.parse_args()
    rows: list[Row] = []
    is_good = True
    for temperature, runs in sameness(options.requests) if "sameness" in options.only else ():
        for pool in DRAFTING:
            found, at = runs[pool], f"{pool}, temperature {temperature:g}"
            equal = num_equal(found, runs[PLAIN])
            is_good = is_good and equal == options.requests and found.counts.accepted > 0
            rows.append(
                Row(
                    f"{at}: answers with the plain pool's token ids (ours), of all (rival)", equal, options.requests, ""
                )
            )
            rows.append(Row(f"{at}: draft tokens accepted", 100 * found.acceptance, None, "%"))
            rows.append(Row(f"{at}: tokens a step (rival: plain)", found.tokens_per_step, 1.0, ""))
    for streams, runs in speed(options.speed_requests) if "speed" in options.only else ():
        for pool in DRAFTING:
            found, plain, at = runs[pool], runs[PLAIN], f"{pool} as used, {streams} at a time"
            rows.append(
                Row(
                    f"{at}: output (rival: plain)",
                    found.num_tokens / found.seconds,
                    plain.num_tokens / plain.seconds,
                    "tokens/s",
                )
            )
            rows.append(Row(f"{at}: tokens a step (rival: plain)", found.tokens_per_step, 1.0, ""))
    if "head" in options.only:
        rows += head_speed(options.head, options.head_prompts, options.head_tokens)
    notes = [
        f"SmolLM2-135M-Instruct, one CPU replica a pool, 2 threads, pools asked in turn; sameness: {options.requests} "
        "requests a temperature of up to "
        f"{MAX_TOKENS} tokens, {STREAMS} at a time, float32, exact, not adaptive",
        f"speed: {options.speed_requests} requests of {SPEED_TOKENS} tokens, half at temperature 0 and half at 0.8, "
        "not exact, adaptive",
        f"head: {options.head_prompts} prompts of a category, of up to {MAX_WORDS} words, answers of up to "
        f"{options.head_tokens} tokens, adaptive",
    ]
    variant = "" if set(options.only) == set(PARTS) else "_".join(options.only)
    write_report("speculation", rows, notes=notes, variant=variant)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
