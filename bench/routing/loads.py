"""The loads of the contest: two traces whose prompts go on from each other, and three drawn ones whose prompts begin
alike.

| load | prompts | shared |
|---|---|---|
| conversation | Mooncake's conversations in their own order and rhythm | what the trace says |
| synthetic | Mooncake's synthetic trace, likewise | what the trace says |
| one prefix | drawn | 200 tokens, by all |
| groups | drawn | 50 to 2,000 tokens in each of 16 groups; the groups' popularity by Zipf |
| adapters | drawn | 400 tokens by requests of the same adapter of 64; the adapters' popularity by Zipf |

Prompts and answers of the traces are an eighth as long as there. Requests of different adapters have no block in
common, as on a replica; adapters take no time to load here and are in no slots. Invariant: the same load, seed, rate
and length give the same requests.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from bench.autoscaling.replicas import work_s
from penstock.base.errors import ConfigError
from penstock.sim.content import SegmentMaker, make_keys, read_segments
from penstock_loadtest.planned import Planned
from penstock_loadtest.scenario import Prompts, Trace
from penstock_loadtest.workload.trace_row import TraceRow, fit_to_replay
from penstock_loadtest.workload.traces import read_mooncake

BLOCK: Final = 16
SAMPLE: Final = 2000
"""Requests from which the capacity is computed."""
TOKEN_SCALE: Final = 1 / 8
FILES: Final = {
    "conversation": "mooncake/conversation_trace.jsonl",
    "synthetic": "mooncake/synthetic_trace.jsonl",
}
NUM_GROUPS, LEAST_SHARED, MOST_SHARED, GROUP_SKEW = 16, 50, 2000, 1.1
NUM_ADAPTERS, ADAPTER_SHARED, ADAPTER_SKEW = 64, 400, 1.0
ONE_SHARED: Final = 200
FURTHER_IDS: Final = 1 << 40
"""Difference of the ids of a trace's blocks from those of the same blocks when they come again."""
NUM_WINDOWS: Final = 5
"""Parts of a trace with which seeds begin."""


class Drawn(NamedTuple):
    """A request without its time. prompt: numbers and lengths of its segments, as `penstock.sim.content` has them."""

    prompt: list[int]
    output_tokens: int
    at_s: float | None = None
    """The trace's own time; None: drawn."""


class Load(NamedTuple):
    """A load by name. draw: its requests without end for a seed."""

    name: str
    draw: Callable[[int], Iterator[Drawn]]
    is_uneven: bool
    """Whether prompts share unevenly: some much, others little."""
    digest: str = ""
    """Digest of the trace's file."""

    def plan(self, seed: int, rate: float, seconds: float) -> list[Planned]:
        """The requests of so many seconds at `rate` requests a second on the average."""
        drawn = list(islice(self.draw(seed), max(2, round(rate * seconds))))
        times_s = _times_s(drawn, rate, Random(f"{self.name} times {seed}"))
        return [
            Planned(index=index, at_s=at_s, endpoint="completions", prompt=each.prompt, max_tokens=each.output_tokens)
            for index, (at_s, each) in enumerate(zip(times_s, drawn, strict=True))
        ]


def load_loads(folder: Path | None, names: Sequence[str]) -> tuple[list[Load], list[str]]:
    """The loads of these names, and why others are left out. folder: has FILES, or None. Raises ConfigError for a
    name that there is not."""
    found, missing = [], []
    for name in names:
        if name in _DRAWN:
            found.append(Load(name, *_DRAWN[name]))
            continue
        if name not in FILES:
            raise ConfigError(f"there is no load {name!r}; there are {', '.join(NAMES)}")
        path = None if folder is None else folder / FILES[name]
        if path is None or not path.is_file():
            where = "PENSTOCK_TEST_DATA is not set" if path is None else f"{path} is not there"
            missing.append(f"{name} is left out: {where}; docs/testing.md says where the trace is from")
        else:
            found.append(Load(name, _Replay(path), is_uneven=True, digest=sha256(path.read_bytes()).hexdigest()))
    return found, missing


@cache
def mean_work_s(load: Load) -> float:
    """Seconds of a replica that a request takes on the average if one endless cache had all that was before: what no
    routing can go below."""
    known: set[bytes] = set()
    total_s = 0.0
    for planned in load.plan(0, 1.0, SAMPLE):
        segments = read_segments(planned)
        keys = make_keys(segments, BLOCK)
        cached = next((place for place, key in enumerate(keys) if key not in known), len(keys))
        known.update(keys)
        prompt_tokens = sum(segment.num_tokens for segment in segments)
        total_s += work_s(max(1, prompt_tokens - cached * BLOCK), planned.max_tokens)
    return total_s / SAMPLE


@dataclass(frozen=True, slots=True)
class _Replay:
    """The requests of a trace from a seed's place on, and from its beginning again; what comes a second time has other
    tokens."""

    path: Path

    def __call__(self, seed: int) -> Iterator[Drawn]:
        rows = _read_rows(self.path)
        place = seed % NUM_WINDOWS * len(rows) // NUM_WINDOWS
        maker = SegmentMaker(Prompts(), seed)
        begin_s, span_s = rows[place].at_s, rows[-1].at_s - rows[0].at_s
        for index in range(place, 1 << 30):
            round_number, row = index // len(rows), rows[index % len(rows)]
            assert row.hash_ids is not None
            again = (index - place) // len(rows) * FURTHER_IDS
            ids = [hash_id + again for hash_id in row.hash_ids]
            prompt = maker.block_tokens(ids, row.block_tokens, row.prompt_tokens)
            yield Drawn(prompt, row.output_tokens, row.at_s + round_number * span_s - begin_s)


@cache
def _read_rows(path: Path) -> list[TraceRow]:
    trace = Trace(format="mooncake", path=path, token_scale=TOKEN_SCALE)
    return [fit_to_replay(row, trace) for row in read_mooncake(path)]


def _draw_one(seed: int) -> Iterator[Drawn]:
    random = Random(f"one prefix {seed}")
    for index in range(1 << 30):
        yield _draw(random, index, 0, ONE_SHARED)


def _draw_groups(seed: int) -> Iterator[Drawn]:
    """The lengths lie on a geometric scale; which group has which length is drawn anew for each seed."""
    random = Random(f"groups {seed}")
    step = (MOST_SHARED / LEAST_SHARED) ** (1 / (NUM_GROUPS - 1))
    lengths = [round(LEAST_SHARED * step**place) for place in range(NUM_GROUPS)]
    random.shuffle(lengths)
    bounds = _zipf(NUM_GROUPS, GROUP_SKEW)
    for index in range(1 << 30):
        group = random.choices(range(NUM_GROUPS), cum_weights=bounds)[0]
        yield _draw(random, index, group, lengths[group])


def _draw_adapters(seed: int) -> Iterator[Drawn]:
    random = Random(f"adapters {seed}")
    bounds = _zipf(NUM_ADAPTERS, ADAPTER_SKEW)
    for index in range(1 << 30):
        adapter = random.choices(range(NUM_ADAPTERS), cum_weights=bounds)[0]
        yield _draw(random, index, adapter, ADAPTER_SHARED)


def _draw(random: Random, index: int, shared: int, shared_tokens: int) -> Drawn:
    """A prompt that begins with the tokens `shared`; its own part has 300 tokens and the answer 120 in the median."""
    own = _lognormal(random, 300, 0.8, 20, 4000)
    return Drawn([shared, shared_tokens, -1 - index, own], _lognormal(random, 120, 0.7, 10, 800))


def _lognormal(random: Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, round(random.lognormvariate(math.log(median), sigma))))


def _zipf(count: int, skew: float) -> list[float]:
    return list(accumulate(1 / rank**skew for rank in range(1, count + 1)))


def _times_s(drawn: Sequence[Drawn], rate: float, random: Random) -> list[float]:
    """A trace's own times, stretched to the rate; Poisson arrivals without such."""
    last_s = drawn[-1].at_s
    if last_s is None:
        return list(accumulate(random.expovariate(rate) for _ in drawn))
    return [(each.at_s or 0.0) * (len(drawn) / rate) / last_s for each in drawn]


_DRAWN: Final = {
    "one prefix": (_draw_one, False),
    "groups": (_draw_groups, True),
    "adapters": (_draw_adapters, True),
}
NAMES: Final = (*FILES, *_DRAWN)
