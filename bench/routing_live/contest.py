"""The contest live, of ours and the two best rivals of each load: the loads of the simulated contest as token ids, each
policy in a gateway of its own, in turn, for several rounds.

The replicas are `SPEED` times as fast as those that are simulated, and so are arrivals and targets: a run is over in
half the time. Answers are cut to `MAX_OUTPUT_TOKENS`, so that a run ends soon after its last request came; its rate is
a part of the capacity that follows from the shorter answers. A round's requests are the same for every policy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from bench.autoscaling.replicas import is_in_target
from bench.routing.loads import Drawn, Load, mean_work_s
from bench.routing.play import Outcome
from bench.routing_live.live_platform import NUM_REPLICAS, LivePlatform
from penstock.sim.content import read_segments
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.records import Record
from penstock_loadtest.scenario import Prompts, Scenario
from penstock_loadtest.workload.text import TextMaker

SPEED: Final = 2.0
PART: Final = 0.7
"""Requests a second, as a part of what the replicas would take with one endless cache."""
LOAD_S, QUICK_LOAD_S = 15.0, 4.0
LEAD_PART: Final = 0.2
"""Part of a run that is played before counting begins: the caches fill."""
DRAIN_S: Final = 20.0
TIMEOUT_S: Final = 40.0
MAX_OUTPUT_TOKENS: Final = 240


def cut(load: Load) -> Load:
    """The load with answers of MAX_OUTPUT_TOKENS at most."""
    return load._replace(draw=partial(_draw_cut, load.draw))


def _draw_cut(draw: Callable[[int], Iterator[Drawn]], seed: int) -> Iterator[Drawn]:
    for drawn in draw(seed):
        yield drawn._replace(output_tokens=min(drawn.output_tokens, MAX_OUTPUT_TOKENS))


def make_plan(load: Load, seed: int, seconds: float) -> list[Planned]:
    """The requests of a run: prompts as token ids that are equal where the load's segments are."""
    texts = TextMaker(Prompts(source="tokens"), seed)
    rate = PART * SPEED * NUM_REPLICAS / mean_work_s(load)
    return [
        msgspec.structs.replace(
            planned,
            prompt=[
                token_id
                for segment in read_segments(planned)
                for token_id in texts.tokens(segment.num_tokens, segment.number)
            ],
            ignore_eos=True,
        )
        for planned in load.plan(seed, rate, seconds)
    ]


def play(platform: LivePlatform, load: Load, seed: int, seconds: float) -> tuple[Outcome, float]:
    """One run under the platform's policy: what came of it, and the part of all cores that gateway and client took."""
    scenario = Scenario(name=load.name, duration_s=seconds, drain_s=DRAIN_S, timeout_s=TIMEOUT_S)
    run = platform.play(scenario, iter(make_plan(load, seed, seconds)))
    return judge_run(run.records, seconds), run.gateway_cpu + run.client_cpu


def judge_run(records: Sequence[Record], seconds: float) -> Outcome:
    """What came of a run, of the requests behind its lead. A request without a token counts as missed, with the longest
    time to first token that there is."""
    begin_s = LEAD_PART * seconds
    counted = [record for record in records if begin_s <= record.intended_s < seconds]
    span_s = seconds - begin_s
    ttfts_s = [TIMEOUT_S if record.ttft_s is None else record.ttft_s for record in counted]
    p50_s, p90_s, p99_s = np.quantile(ttfts_s, [0.5, 0.9, 0.99]).tolist()
    return Outcome(
        requests=len(counted),
        rate=len(counted) / span_s,
        goodput=sum(map(_is_in_target, counted)) / span_s,
        p50_s=p50_s,
        p90_s=p90_s,
        p99_s=p99_s,
        cached=measure_cached(counted),
        imbalance=measure_imbalance(counted),
        unanswered=sum(record.outcome != "finished" for record in counted),
    )


def measure_cached(records: Sequence[Record]) -> float:
    """Share of the prompts' tokens that were found in a cache, of the requests whose server told."""
    told = [record for record in records if record.prompt_tokens is not None]
    return sum(record.cached_tokens or 0 for record in told) / max(1, sum(record.prompt_tokens or 0 for record in told))


def measure_imbalance(records: Sequence[Record]) -> float:
    """Requests in flight on the fullest replica over the mean of all, over the moments at which requests left."""
    spans = [
        (record.replica, record.sent_s, record.end_s)
        for record in records
        if record.replica is not None and record.sent_s is not None and record.end_s is not None
    ]
    fullest = total = 0
    for _, at_s, _ in spans:
        counts: dict[str, int] = {}
        for replica, sent_s, end_s in spans:
            if sent_s <= at_s < end_s:
                counts[replica] = counts.get(replica, 0) + 1
        fullest += max(counts.values())
        total += sum(counts.values())
    return fullest * NUM_REPLICAS / total if total else 1.0


def _is_in_target(record: Record) -> bool:
    """Whether an answer came in time, in the time of the replicas that are simulated."""
    times_s = [
        SPEED * at_s for at_s, count in zip(record.chunk_s, record.chunk_tokens, strict=True) for _ in range(count)
    ]
    is_whole = record.outcome == "finished" and record.prompt_tokens is not None
    return is_whole and is_in_target(record.prompt_tokens or 0, SPEED * record.intended_s, times_s)


def hold(
    platform: LivePlatform,
    loads: Sequence[Load],
    rivals: Mapping[str, Sequence[str]],
    rounds: int,
    seconds: float,
    ours: str,
    note: Callable[[str], None],
) -> tuple[dict[str, dict[str, list[Outcome]]], float]:
    """All rounds: outcomes by load and policy, in the order of the rounds, and the largest part of all cores that
    gateway and client took in a run. rivals: of each load, by name. Each round begins with another policy."""
    shortened = [cut(load) for load in loads]
    policies = list(dict.fromkeys([ours, *(name for load in loads for name in rivals[load.name])]))
    outcomes: dict[str, dict[str, list[Outcome]]] = {
        load.name: {name: [] for name in [ours, *rivals[load.name]]} for load in loads
    }
    most = 0.0
    for number in range(rounds):
        turn = number % len(policies)
        for policy in policies[turn:] + policies[:turn]:
            platform.route_by(policy)
            for load in shortened:
                if policy not in outcomes[load.name]:
                    continue
                outcome, cpu = play(platform, load, number, seconds)
                outcomes[load.name][policy].append(outcome)
                most = max(most, cpu)
                note(
                    f"round {number + 1}, {load.name}, {policy}: {outcome.goodput:.2f} of {outcome.rate:.2f} requests/s"
                    f" in target, TTFT p90 {outcome.p90_s:.3f} s, {100 * outcome.cached:.1f} % cached, gateway and"
                    f" client {100 * cpu:.0f} % of the cores"
                )
    return outcomes, most
