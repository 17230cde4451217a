"""Fair shares: one tenant floods with 50 streams, three send lightly, over timed replicas (10 ms a step, 32 places).

    python -m bench.fairness [--quick | --weights]

Reported: time to first token of the light tenants beside the flood, against a flooder that is capped at its share,
against none, and against order of arrival (`gateway.fairness: arrival`); output tokens a second of all; the tokens of
three tenants with weights 1, 2 and 4 that all have more to send than fits, at one gateway and at three, and how far
they are from that ratio. The scenarios take turns; each order has a platform of its own. Draws docs/fairness.png, not
with --quick.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.support.loopback import Answer, ChatClient, prompt
from bench.support.more_gateways import start_gateways
from bench.support.platform_process import PlatformProcess, running_platform, timed_platform
from bench.support.report import FOLDER, Row, write_report
from penstock.base.redis import connect
from penstock.cli.state import StateDir
from penstock.tenancy.keys import create_key
from penstock.tenancy.tenants import Settings, Tenants

PICTURE = FOLDER.parent / "docs" / "fairness.png"
CONFIG = timed_platform(
    "max_num_seqs: 16, max_batched_tokens: 2048, timed: {base_s: 0.010, prefill_token_s: 0.00002, num_blocks: 40000, "
    "max_model_len: 8192}",
    gateway="fairness: FAIRNESS",
)
NUM_PLACES = 32
FLOODER, LIGHT = "flooder", ("light-1", "light-2", "light-3")
WEIGHTS = {"weight-1": 1.0, "weight-2": 2.0, "weight-4": 4.0}
FLOOD_STREAMS = 50
CAPPED_STREAMS = NUM_PLACES // (1 + len(LIGHT))
"""The flooder's share of the places among four tenants."""
FLOOD_PROMPT, FLOOD_TOKENS = 200, (64, 192)
"""Tokens of a prompt, and of an answer, at the least and at the most."""
NUM_GATEWAYS = 3
WAITING_STREAMS = {1: NUM_PLACES, NUM_GATEWAYS: 2 * NUM_PLACES}
"""Streams of each weighted tenant, by the number of gateways: at each more than it gets places there, and few enough
for those with the least weight to be placed within the gateway's 30 s."""
LIGHT_PROMPT, LIGHT_TOKENS, LIGHT_PAUSE_S = 100, 16, 0.3
WARM_S = 3.0
"""Time before measuring: until the flood has filled all places."""


@dataclass
class Load:
    """What came back in one scenario, within the measured time."""

    ttft_s: list[float] = field(default_factory=list)
    """Times to first token of light tenants."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Output tokens by tenant."""
    seconds: float = 0.0

    def count(self, tenant: str, answer: Answer, window: tuple[float, float]) -> None:
        """Count the tokens of an answer that came within the measured time."""
        inside = sum(1 for arrival in answer.arrivals if window[0] <= answer.began_s + arrival < window[1])
        self.tokens[tenant] = self.tokens.get(tenant, 0) + inside

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens.values()) / self.seconds


class Scenario(NamedTuple):
    name: str
    flood_streams: int
    fairness: str = "vtc"


SCENARIOS = (
    Scenario("alone", 0),
    Scenario("flooder capped", CAPPED_STREAMS),
    Scenario("flooded, vtc", FLOOD_STREAMS),
    Scenario("flooded, arrival", FLOOD_STREAMS, "arrival"),
)


class Driver:
    """The clients of all tenants of one platform."""

    def __init__(self, urls: Sequence[str], keys: Mapping[str, str]) -> None:
        """urls: of the gateways, among which the streams of each backlogged tenant are spread."""
        self._clients = {
            name: [ChatClient(url, "sim", key, extra={"ignore_eos": True}) for url in urls]
            for name, key in keys.items()
        }

    async def run(self, streams: Mapping[str, int], light: Sequence[str], seconds: float, seed: int) -> Load:
        """Backlogged tenants with so many streams each, beside light ones that send now and then."""
        load = Load(seconds=seconds)
        began = time.perf_counter()
        window = began + WARM_S, began + WARM_S + seconds
        async with asyncio.TaskGroup() as tasks:
            for name, count in streams.items():
                for number in range(count):
                    rng = random.Random(f"{seed} {name} {number}")
                    tasks.create_task(self._flood(name, number, rng, window, load))
            for name in light:
                tasks.create_task(self._send_lightly(name, random.Random(f"{seed} {name}"), window, load))
        return load

    async def _flood(self, name: str, number: int, rng: random.Random, window: tuple[float, float], load: Load) -> None:
        client = self._clients[name][number % len(self._clients[name])]
        while time.perf_counter() < window[1]:
            answer = await client.chat(prompt(rng, FLOOD_PROMPT), rng.randint(*FLOOD_TOKENS))
            load.count(name, answer, window)

    async def _send_lightly(self, name: str, rng: random.Random, window: tuple[float, float], load: Load) -> None:
        while time.perf_counter() < window[1]:
            at = time.perf_counter()
            answer = await self._clients[name][0].chat(prompt(rng, LIGHT_PROMPT), LIGHT_TOKENS)
            load.count(name, answer, window)
            if at >= window[0]:
                load.ttft_s.append(answer.ttft_s)
            await asyncio.sleep(rng.expovariate(1.0 / LIGHT_PAUSE_S))

    def close(self) -> None:
        for clients in self._clients.values():
            for client in clients:
                client.close()


async def make_keys(platform: PlatformProcess, tenants: Mapping[str, Settings]) -> dict[str, str]:
    """A key for each of these tenants, which are made."""
    secret, keys = StateDir(platform.state).secret(), {}
    async with connect(platform.redis_url) as client:
        for name, settings in tenants.items():
            await Tenants(client).create(name, settings, time.time())
            keys[name] = await create_key(client, secret, name)
    return keys


def run(seconds: float, rounds: int) -> tuple[dict[str, Load], dict[int, Load]]:
    """The scenarios in turn, and then the weighted tenants, by the number of gateways."""
    tenants = {name: Settings() for name in (FLOODER, *LIGHT)}
    tenants |= {name: Settings(weight=weight) for name, weight in WEIGHTS.items()}
    loads: dict[str, Load] = {}
    with ExitStack() as cleanup:
        loop = cleanup.enter_context(asyncio.Runner())
        platforms = {order: cleanup.enter_context(_platform(order)) for order in ("vtc", "arrival")}
        keys = {order: loop.run(make_keys(platform, tenants)) for order, platform in platforms.items()}
        drivers = {order: Driver([platform.url], keys[order]) for order, platform in platforms.items()}
        for number in range(rounds):  # none: the weights alone
            for scenario in SCENARIOS:
                streams = {FLOODER: scenario.flood_streams} if scenario.flood_streams else {}
                load = loop.run(drivers[scenario.fairness].run(streams, LIGHT, seconds, number))
                _add(loads, scenario.name, load)
                print(f"{scenario.name}: {_brief(load)}", file=sys.stderr, flush=True)
        for driver in drivers.values():
            driver.close()
        weighted, urls = {}, [platforms["vtc"].url]
        for count in (1, NUM_GATEWAYS):
            urls += start_gateways(platforms["vtc"], count - len(urls)) if count > len(urls) else []
            driver = Driver(urls, keys["vtc"])
            streams = dict.fromkeys(WEIGHTS, WAITING_STREAMS[count])
            weighted[count] = loop.run(driver.run(streams, (), 3 * seconds, 0))
            print(f"weights, gateways: {count}: {weight_errors(weighted[count].tokens)}", file=sys.stderr, flush=True)
            driver.close()
    return loads, weighted


@contextmanager
def _platform(fairness: str) -> Iterator[PlatformProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), CONFIG.replace("FAIRNESS", fairness)) as platform,
    ):
        yield platform


def _add(loads: dict[str, Load], name: str, more: Load) -> None:
    load = loads.setdefault(name, Load())
    load.ttft_s += more.ttft_s
    load.seconds += more.seconds
    for tenant, tokens in more.tokens.items():
        load.tokens[tenant] = load.tokens.get(tenant, 0) + tokens


def _brief(load: Load) -> str:
    return f"p90 {1e3 * quantile(load.ttft_s, 0.9):.1f} ms, {load.tokens_per_s:.0f} tokens/s"


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def weight_errors(tokens: Mapping[str, int]) -> dict[str, float]:
    """How far each weighted tenant is from its share of all tokens, as a part of that share."""
    total, weights = sum(tokens.values()), sum(WEIGHTS.values())
    return {name: tokens[name] / (total * weight / weights) - 1 for name, weight in WEIGHTS.items()}


def rows_of(loads: Mapping[str, Load], weighted: Mapping[int, Load]) -> list[Row]:
    return [*_rows_of_the_flood(loads), *_rows_of_weights(weighted)]


def _rows_of_the_flood(loads: Mapping[str, Load]) -> list[Row]:
    if not loads:
        return []
    ours = loads["flooded, vtc"]
    rows = []
    for other in ("alone", "flooder capped", "flooded, arrival"):
        for q in (0.5, 0.9, 0.99):
            times = 1e3 * quantile(ours.ttft_s, q), 1e3 * quantile(loads[other].ttft_s, q)
            rows.append(Row(f"TTFT of light tenants p{100 * q:g}, vtc beside: {other}", *times, "ms"))
    arrival = loads["flooded, arrival"]
    rows.append(Row("output of all, vtc beside: flooded, arrival", ours.tokens_per_s, arrival.tokens_per_s, "tokens/s"))
    return rows


def _rows_of_weights(weighted: Mapping[int, Load]) -> list[Row]:
    return [
        Row(f"{name}: tokens beside its share, gateways: {count}", 100 * error, None, "%")
        for count, load in weighted.items()
        for name, error in weight_errors(load.tokens).items()
    ]


def draw(loads: Mapping[str, Load], weighted: Mapping[int, Load], picture: Path) -> None:
    """Draw how the light tenants' times are distributed, and what the weighted ones got."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (half a second that only this needs)

    figure = Figure(figsize=(9, 4), layout="constrained")
    times, shares = figure.subplots(1, 2, width_ratios=[2, 1])
    for scenario, color in zip(SCENARIOS, ("#16806a", "#86bce4", "#1f6fb5", "#b93a1e"), strict=True):
        ordered = sorted(1e3 * each for each in loads[scenario.name].ttft_s)
        shown = [(number + 1) / len(ordered) for number in range(len(ordered))]
        times.step(ordered, shown, where="post", color=color, label=scenario.name)
    times.set_xscale("log")
    times.set_xlabel("time to first token of light tenants, ms")
    times.set_ylabel("share of requests")
    times.legend(loc="lower right", frameon=False)
    for number, (count, load) in enumerate(sorted(weighted.items())):
        total = sum(load.tokens.values())
        places = [place - 0.2 + 0.4 * number for place in range(len(WEIGHTS))]
        parts = [load.tokens[name] / total for name in WEIGHTS]
        label = f"{count} gateway" + ("s" if count > 1 else "")
        shares.bar(places, parts, width=0.38, color=("#16806a", "#86bce4")[number], label=label)
    for place, weight in enumerate(WEIGHTS.values()):
        shares.plot([place - 0.4, place + 0.4], [weight / sum(WEIGHTS.values())] * 2, color="black")
    shares.set_xticks(range(len(WEIGHTS)), [f"{weight:g}" for weight in WEIGHTS.values()])
    shares.legend(loc="upper left", frameon=False)
    shares.set_xlabel("weight")
    shares.set_ylabel("share of the tokens; line: what it should be")
    for part in (times, shares):
        part.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One tenant floods with {FLOOD_STREAMS} streams, three send lightly; {NUM_PLACES} places")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="less than two minutes; the tails are those of few requests"
    )
    parser.add_argument("--weights", action="store_true", help="the weighted tenants alone, in five minutes")
    args = parser.parse_args()
    seconds, rounds = (8.0, 1) if args.quick else (30.0, 0 if args.weights else 3)
    loads, weighted = run(seconds, rounds)
    counts = ", ".join(f"{name} {len(load.ttft_s)}" for name, load in loads.items())
    notes = [f"requests of light tenants: {counts}"]
    write_report(
        "fairness",
        rows_of(loads, weighted),
        notes=notes,
        variant="quick" if args.quick else "weights" if args.weights else "",
    )
    if not args.quick and not args.weights:
        draw(loads, weighted, PICTURE)


if __name__ == "__main__":
    main()
