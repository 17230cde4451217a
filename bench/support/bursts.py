"""The bursty trace of the autoscaling demo: how it is made, and where a load has bursts.

    python -m bench.support.bursts

writes examples/autoscale/bursts.csv again: Poisson arrivals by a seed, calm with BURSTS in it, in the layout of Azure's
LLM inference traces. Nothing in it was recorded anywhere.
"""

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

TRACE = Path(__file__).resolve().parents[2] / "examples" / "autoscale" / "bursts.csv"
SEED = 18
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LENGTH_S = 440.0
CALM_RPS = 0.6
PROMPT_TOKENS = (96, 256)
OUTPUT_TOKENS = (24, 72)
BIN_S = 5.0
BUSY_RPS = 3.0
"""Requests a second from which five seconds belong to a burst: what one replica of the example takes for good."""


class Burst(NamedTuple):
    begin_s: float
    end_s: float
    """Seconds after the load's begin."""
    rps: float
    """Requests a second."""


BURSTS = (
    Burst(20, 50, 6.0),
    Burst(85, 110, 6.5),
    Burst(150, 180, 5.0),
    Burst(215, 240, 6.5),
    Burst(275, 305, 5.5),
    Burst(340, 365, 6.5),
    Burst(400, 425, 5.0),
)


def write_trace(path: Path) -> None:
    """Write the trace as a CSV; the same bytes every time."""
    path.write_text("".join(f"{line}\n" for line in _lines(random.Random(SEED))), encoding="utf-8")


def _lines(draw: random.Random) -> Iterator[str]:
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for at_s in _arrivals(draw):
        time = (BEGIN + timedelta(seconds=at_s)).strftime("%Y-%m-%d %H:%M:%S.%f")
        yield f"{time},{draw.randint(*PROMPT_TOKENS)},{draw.randint(*OUTPUT_TOKENS)}"


def _arrivals(draw: random.Random) -> Iterator[float]:
    """Times of a Poisson process whose rate changes with BURSTS, by thinning; the first one is 0."""
    most = max(burst.rps for burst in BURSTS)
    at_s = 0.0
    while at_s < LENGTH_S:
        if at_s == 0 or draw.random() * most < _rps(at_s):
            yield at_s
        at_s += draw.expovariate(most)


def _rps(at_s: float) -> float:
    return next((burst.rps for burst in BURSTS if burst.begin_s <= at_s < burst.end_s), CALM_RPS)


def bursts_of(at_s: Sequence[float]) -> list[Burst]:
    """Bursts of a load whose requests are sent at these times: successive bins of BIN_S with BUSY_RPS or more."""
    counts: dict[int, int] = {}
    for each in at_s:
        counts[int(each // BIN_S)] = counts.get(int(each // BIN_S), 0) + 1
    found: list[Burst] = []
    for number in sorted(number for number, count in counts.items() if count >= BUSY_RPS * BIN_S):
        begin_s, end_s = number * BIN_S, (number + 1) * BIN_S
        if found and found[-1].end_s == begin_s:
            begin_s = found.pop().begin_s
        rps = sum(begin_s <= each < end_s for each in at_s) / (end_s - begin_s)
        found.append(Burst(begin_s, end_s, round(rps, 1)))
    return found


if __name__ == "__main__":
    write_trace(TRACE)
