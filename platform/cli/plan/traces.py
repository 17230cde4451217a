"""The load that a trace is: how many requests a second, how long, as the load tester reads traces."""

from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal, NamedTuple

from penstock.base.errors import ConfigError
from penstock.perf.planning.loads import Load
from penstock_loadtest.errors import LoadtestError
from penstock_loadtest.scenario import Trace
from penstock_loadtest.workload.hit_rate import measure_hit_rate_of_ids
from penstock_loadtest.workload.trace_row import TraceRow
from penstock_loadtest.workload.traces import read_trace

Format = Literal["mooncake", "azure", "burstgpt", "servegen"]
MOST_ROWS = 200_000
WINDOW_S = 60.0
"""Seconds whose arrivals make a rate: the busiest such window is planned for."""


class TraceLoad(NamedTuple):
    load: Load
    """Requests of mean lengths at the rate of the busiest window."""
    mean_rps: float
    num_requests: int
    num_too_long: int
    """Requests beyond the context, left out of the lengths."""
    hit_share: float | None
    """Part of the prompts' tokens that one cache which forgets nothing would have; None: the trace does not say."""


def read_load(path: Path, context_tokens: int, cached_share: float = 0.0) -> TraceLoad:
    """Read a trace. cached_share: part of each prompt that is taken as found in a cache. Raises ConfigError."""
    try:
        rows = list(islice(read_trace(Trace(find_format(path), path)), MOST_ROWS))
    except (LoadtestError, OSError) as error:
        raise ConfigError(str(error)) from error
    fitting = [row for row in rows if row.prompt_tokens + row.output_tokens <= context_tokens]
    if not fitting:
        raise ConfigError(f"no request of {path} fits --context {context_tokens}")
    prompts = [float(row.prompt_tokens) for row in fitting]
    prompt = fmean(prompts)
    load = Load(
        busiest_rps([row.at_s for row in rows]),
        prompt * (1 - cached_share),
        max(1.0, fmean(row.output_tokens for row in fitting)),
        prompt * cached_share,
        pstdev(prompts) / prompt if len(prompts) > 1 else 0.0,
    )
    return TraceLoad(load, _mean_rps(rows), len(rows), len(rows) - len(fitting), _hit_share(rows))


def find_format(path: Path) -> Format:
    """The format by the file's first line. Raises ConfigError."""
    import gzip  # noqa: PLC0415 (only what is compressed needs it)

    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            first = file.readline(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if first.lstrip().startswith("{"):
        return "mooncake"
    if first.startswith("TIMESTAMP"):
        return "azure"
    return "burstgpt" if first.startswith("Timestamp") else "servegen"


def busiest_rps(times_s: list[float]) -> float:
    """Requests a second in the busiest WINDOW_S, of times that do not decrease; a shorter trace counts as a whole."""
    span = times_s[-1] - times_s[0]
    if span <= WINDOW_S:
        return len(times_s) / max(span, 1.0)
    most = first = 0
    for index, at_s in enumerate(times_s):
        while at_s - times_s[first] >= WINDOW_S:
            first += 1
        most = max(most, index - first + 1)
    return most / WINDOW_S


def _mean_rps(rows: list[TraceRow]) -> float:
    return len(rows) / max(rows[-1].at_s - rows[0].at_s, 1.0)


def _hit_share(rows: list[TraceRow]) -> float | None:
    if any(row.hash_ids is None for row in rows):
        return None
    return measure_hit_rate_of_ids(row.hash_ids or () for row in rows)
