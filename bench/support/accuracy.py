"""The load tester's figures against what a fake server was programmed to do: evidence that its numbers can be trusted.

Programmed figures follow from the plan's intended times and the behaviour alone, also through a stall, when most
requests that matter are late.
"""

import asyncio
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import uvloop

from penstock_loadtest.client.client import Answer, Client, Clock
from penstock_loadtest.client.target import find_target
from penstock_loadtest.fake.behaviour import Behaviour, Stall
from penstock_loadtest.fake.process import FakeProcess, fake_server_process
from penstock_loadtest.fake.truth import Chunk, Truth, shift_past_stalls
from penstock_loadtest.results.records import Record
from penstock_loadtest.results.summary import Distribution, Summary, summarize
from penstock_loadtest.run.runner import run_load
from penstock_loadtest.scenario import Arrivals, Kind, Lengths, Prompts, Scenario
from penstock_loadtest.workload.plan import draw_plan

FIGURES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "inter_token_s": "inter-token", "e2e_s": "end-to-end"}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SHARE, ABSOLUTE_S = 0.02, 0.001
"""How far a reported percentile may be from the programmed one: the larger of the two."""

BEHAVIOUR = Behaviour(ttft_s=Lengths(lognormal=(0.12, 0.5)), gap_s=Lengths(uniform=(0.01, 0.06)), gap_per="token")


def scenario(rate: float, duration_s: float) -> Scenario:
    """Streams of 8 to 24 tokens, at Poisson times."""
    kind = Kind(
        prompts=Prompts(tokens=Lengths(uniform=(10, 50))), output_tokens=Lengths(uniform=(8, 24)), ignore_eos=True
    )
    return Scenario(duration_s=duration_s, arrivals=Arrivals(rate=rate), kinds=[kind], drain_s=20.0)


def stalled(behaviour: Behaviour, *, from_s: float, for_s: float) -> Behaviour:
    return msgspec.structs.replace(behaviour, stalls=[Stall(from_s=from_s, for_s=for_s)])


class Compared(NamedTuple):
    name: str
    reported_s: float
    programmed_s: float

    @property
    def excess(self) -> float:
        """The difference as a share of what is allowed: at most 1 is good."""
        return abs(self.reported_s - self.programmed_s) / max(SHARE * self.programmed_s, ABSOLUTE_S)


class Measured(NamedTuple):
    compared: list[Compared]
    summary: Summary
    server_late_s: float
    """p99 over requests of the most that the fake server itself was late."""

    @property
    def worst(self) -> Compared:
        return max(self.compared, key=lambda each: each.excess)


def measure_accuracy(behaviour: Behaviour, load: Scenario, *, core: int | None = None) -> Measured:
    """The real tester's run, client and summary in this process, the fake server in one of its own. Raises RuntimeError
    when a request went astray."""
    with fake_server_process(behaviour, core=core) as fake:
        records, zero_s = uvloop.run(_run(load, fake))
        truths = {truth.request_id: truth for truth in fake.stop()}
    summary = summarize(records, load)
    if summary.outcomes.finished != len(records) or len(truths) != len(records):
        raise RuntimeError(
            f"{summary.outcomes.finished} of {len(records)} requests finished, the server saw {len(truths)}: "
            f"{summary.errors}"
        )
    programmed = _programmed(
        behaviour, [(truths[record.request_id or ""], zero_s + record.intended_s) for record in records]
    )
    late_s = np.quantile([truth.late_s for truth in truths.values()], 0.99)
    return Measured(list(_compare(summary, programmed)), summary, float(late_s))


async def _run(load: Scenario, fake: FakeProcess) -> tuple[list[Record], float]:
    records: list[Record] = []

    def on_ended(answer: Answer) -> None:
        records.append(answer.record)

    clock = Clock()
    client = Client(await find_target(fake.url, keys={}), clock)
    try:
        await run_load(
            load, draw_plan(load), client, on_sent=lambda _planned: None, on_ended=on_ended, stop=asyncio.Event()
        )
    finally:
        await client.close()
    return records, clock.zero_s


def _programmed(behaviour: Behaviour, requests: list[tuple[Truth, float]]) -> dict[str, list[float]]:
    """Every value of every figure, from intended times on the truths' clock."""
    zero_s = min(truth.arrival_s for truth, _ in requests)
    values: dict[str, list[float]] = {name: [] for name in FIGURES}
    for truth, intended_s in requests:
        chunks = truth.chunks(behaviour)
        sent_s = [_sent_s(behaviour, zero_s, truth.arrival_s, intended_s, chunk) for chunk in chunks]
        values["ttft_s"].append(sent_s[0] - intended_s)
        values["e2e_s"].append(sent_s[-1] - intended_s)
        token_s = [at for at, chunk in zip(sent_s, chunks, strict=True) for _ in range(chunk.tokens)]
        values["inter_token_s"] += [b - a for a, b in pairwise(token_s)]
        if len(chunks) > 1:
            values["tpot_s"].append((sent_s[-1] - sent_s[0]) / sum(chunk.tokens for chunk in chunks[1:]))
    return values


def _sent_s(behaviour: Behaviour, zero_s: float, arrival_s: float, intended_s: float, chunk: Chunk) -> float:
    """Seconds at which a chunk is to go out. Only whether a stall holds it is decided by the arrival: on its way, a
    request may just miss the stall's beginning."""
    due_s = arrival_s + chunk.offset_s - zero_s
    held_s = shift_past_stalls(behaviour.stalls, due_s)
    return zero_s + held_s if held_s != due_s else intended_s + chunk.offset_s


def _compare(summary: Summary, programmed: dict[str, list[float]]) -> Iterable[Compared]:
    for figure, name in FIGURES.items():
        reported: Distribution = getattr(summary, figure)
        for label, q in QUANTILES.items():
            value = getattr(reported, label)
            yield Compared(
                f"{name} {label}", math.inf if value is None else value, float(np.quantile(programmed[figure], q))
            )
