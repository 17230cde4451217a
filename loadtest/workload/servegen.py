"""ServeGen's workloads (arXiv 2505.09999): every client of a service with its own rate, burstiness and lengths, as
rates to draw from or as requests.

Client rates: for every client and window of 600 s the rate and the fitted gaps, Gamma or Weibull. They are drawn window
by window. A client's arrivals are one renewal process in its operational time (the integral of its rate), begun in
equilibrium: its rate is that of the table from the first second on, and a window's border is no arrival. The rate
column sets the rate, the fit the burstiness only: in many windows the fit's own mean is far from the rate.
"""

from collections.abc import Iterator
from itertools import groupby
from math import exp, lgamma
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.scenario import Trace
from penstock_loadtest.workload.lines import make_line_error, read_csv, read_header, to_number, to_whole
from penstock_loadtest.workload.servegen_lengths import LengthTable
from penstock_loadtest.workload.trace_row import MonotonicTimes, TraceRow

WINDOW_S: Final = 600.0
MIN_GAMMA_SHAPE: Final = 1 / 64
MIN_WEIBULL_SHAPE: Final = 0.2542
"""Both bound the coefficient of variation of the gaps at 8. Fits of a few windows are far burstier: 10^20 requests at
once, and then none for years."""

Floats = npt.NDArray[np.float64]
Pattern = Literal["G", "W"]


class ClientRate(NamedTuple):
    """What one client does in one window."""

    t_s: float
    client: int
    rate: float
    pattern: Pattern
    shape: float


class Renewal:
    """Arrivals of one client, in its operational time: gaps have mean 1, whatever their shape. rng: the client's own,
    so that no client changes another's."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._next: float | None = None  # from now to the next arrival

    def arrivals(self, length: float, pattern: Pattern, shape: float) -> Floats:
        """Times in [0, length), ascending; the next call goes on from `length`."""
        first = self._residual(pattern, shape) if self._next is None else self._next
        parts = [np.array([first])]
        while (last := float(parts[-1][-1])) < length:
            count = int(length - last) + 16
            parts.append(last + np.cumsum(self._gaps(pattern, shape, count)))
        times = np.concatenate(parts)
        inside = int(np.searchsorted(times, length))
        self._next = float(times[inside]) - length
        return times[:inside]

    def _gaps(self, pattern: Pattern, shape: float, count: int) -> Floats:
        if pattern == "G":
            return self.rng.gamma(shape, 1 / shape, count)
        return self.rng.weibull(shape, count) * exp(-lgamma(1 + 1 / shape))

    def _residual(self, pattern: Pattern, shape: float) -> float:
        """What is left of the gap that an observer falls into: a uniform part of a gap drawn in proportion to its
        length."""
        part = float(self.rng.uniform())
        if pattern == "G":
            return part * self.rng.gamma(shape + 1, 1 / shape)
        weighted: float = self.rng.gamma(1 + 1 / shape) ** (1 / shape)
        return part * weighted * exp(-lgamma(1 + 1 / shape))


def is_client_rates(path: Path) -> bool:
    """Whether the file holds rates to draw from, not requests. Raises TraceInvalid."""
    return "rate_rps" in read_header(path)


def read_requests(path: Path) -> Iterator[TraceRow]:
    """A CSV of requests: t_s, client, input_tokens, output_tokens. Raises TraceInvalid."""
    make_monotonic = MonotonicTimes()
    for number, (t_s, client, prompt, output) in read_csv(path, ("t_s", "client", "input_tokens", "output_tokens")):
        try:
            at_s = make_monotonic(to_number(t_s, "t_s"))
            row = TraceRow(
                at_s=at_s,
                prompt_tokens=to_whole(prompt, "input_tokens"),
                output_tokens=to_whole(output, "output_tokens"),
                client=client,
            )
        except ValueError as error:
            raise make_line_error(path, number, str(error)) from None
        yield row


def draw_requests(trace: Trace, seed: int) -> Iterator[TraceRow]:
    """Requests of a file of client rates, from the window that holds trace.start_s on. Times count from the first
    window of the file.

    trace.rate: every client's rate is multiplied by the same number so that the replayed part has this mean, after time
    scaling; burstiness stays. Raises TraceInvalid, and ScenarioInvalid when there is no table of lengths.
    """
    lengths = LengthTable.read(_lengths_path(trace), seed)
    factor = 1.0 if trace.rate is None else trace.rate * trace.time_scale / measure_mean_rate(trace)
    processes: dict[int, Renewal] = {}
    zero_s: float | None = None
    for t_s, group in groupby(read_client_rates(trace.path), key=lambda row: row.t_s):
        zero_s = t_s if zero_s is None else zero_s
        if t_s - zero_s >= trace.end_s:
            return
        if t_s - zero_s + WINDOW_S > trace.start_s:
            for row in _draw_window(t_s, list(group), factor, processes, lengths, seed):
                yield msgspec.structs.replace(row, at_s=row.at_s - zero_s)


def measure_mean_rate(trace: Trace) -> float:
    """Requests per second over the part of the trace that is replayed, all clients together. Raises TraceInvalid, and
    ScenarioInvalid when it is 0."""
    requests, end_s = 0.0, trace.start_s
    zero_s: float | None = None
    for row in read_client_rates(trace.path):
        zero_s = row.t_s if zero_s is None else zero_s
        begin_s = row.t_s - zero_s
        window_end_s = min(begin_s + WINDOW_S, trace.end_s)
        requests += row.rate * max(0.0, window_end_s - max(begin_s, trace.start_s))
        end_s = max(end_s, window_end_s)
    if requests == 0:
        raise ScenarioInvalid(
            f"trace.rate can't be met: {trace.path} has no requests between {trace.start_s:g} s and {trace.end_s:g} s "
            "after its first row."
        )
    return requests / (end_s - trace.start_s)


def read_client_rates(path: Path) -> Iterator[ClientRate]:
    """Rows of the CSV t_s, client, rate_rps, cv, pattern, shape, scale, windows in order of time. Raises
    TraceInvalid."""
    last = -1.0
    clients: set[int] = set()
    for number, fields in read_csv(path, ("t_s", "client", "rate_rps", "pattern", "shape")):
        try:
            row = _parse(fields)
            if row.t_s < last:
                raise ValueError(f"the time runs back by {last - row.t_s:g} s")
            if last < row.t_s < last + WINDOW_S and clients:
                raise ValueError(f"a window {row.t_s - last:g} s behind the one before; they are {WINDOW_S:g} s long")
            if row.t_s > last:
                clients.clear()
            if row.client in clients:
                raise ValueError(f"client {row.client} has a row in this window already")
        except ValueError as error:
            raise make_line_error(path, number, str(error)) from None
        last = row.t_s
        clients.add(row.client)
        yield row


def _parse(fields: list[str]) -> ClientRate:
    t_s, rate, shape = to_number(fields[0], "t_s"), to_number(fields[2], "rate_rps"), to_number(fields[4], "shape")
    if shape == 0:
        raise ValueError("shape is 0")
    client = to_whole(fields[1], "client")
    if fields[3] == "G":
        return ClientRate(t_s, client, rate, "G", max(shape, MIN_GAMMA_SHAPE))
    if fields[3] == "W":
        return ClientRate(t_s, client, rate, "W", max(shape, MIN_WEIBULL_SHAPE))
    raise ValueError(f"pattern is {fields[3]!r}, not G (Gamma) or W (Weibull)")


def _draw_window(
    t_s: float, rows: list[ClientRate], factor: float, processes: dict[int, Renewal], lengths: LengthTable, seed: int
) -> Iterator[TraceRow]:
    """Requests of all clients in one window, merged by time."""
    parts: list[tuple[Floats, Floats, Floats, Floats]] = []
    for row in rows:
        if row.client not in processes:
            processes[row.client] = Renewal(np.random.default_rng([seed, row.client]))
        process, rate = processes[row.client], row.rate * factor
        if rate > 0 and len(times := process.arrivals(rate * WINDOW_S, row.pattern, row.shape)):
            prompt, output = lengths.draw(t_s, row.client, len(times), process.rng)
            parts.append((t_s + times / rate, prompt, output, np.full(len(times), row.client, np.float64)))
    if not parts:
        return
    at_s, prompts, outputs, clients = (np.concatenate(column) for column in zip(*parts, strict=True))
    for place in np.argsort(at_s, kind="stable"):
        yield TraceRow(
            at_s=float(at_s[place]),
            prompt_tokens=int(prompts[place]),
            output_tokens=int(outputs[place]),
            client=str(int(clients[place])),
        )


def _lengths_path(trace: Trace) -> Path:
    """The one that the scenario names, else the one published beside X_client_rates.csv.gz: X_lengths.jsonl.gz."""
    if trace.lengths is not None:
        return trace.lengths
    stem, found, _ = trace.path.name.rpartition("_client_rates")
    for name in (f"{stem}_lengths.jsonl.gz", f"{stem}_lengths.jsonl") if found else ():
        if (trace.path.parent / name).is_file():
            return trace.path.parent / name
    raise ScenarioInvalid(f"{trace.path} holds rates without lengths: name the table of lengths as trace.lengths.")
