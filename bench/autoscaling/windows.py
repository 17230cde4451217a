"""The loads: windows of at most twenty minutes, one of each trace for tuning and a later one for scoring.

A trace's last third is scored, what comes before is for tuning. Before each window its trace runs for a while without
being counted, so that every autoscaler knows the load when counting begins.

| window | arrivals | lengths |
|---|---|---|
| conv | Azure's conversation trace of 2023 | its own |
| large | ServeGen's language_m-large, time 2.5 times as fast | its own |
| small | ServeGen's language_m-small, time five times as fast | Azure's conversations, in their order |
| mooncake | Mooncake's conversation trace | its own, prompts an eighth as long; no block is shared |
| code | Azure's code trace: bursts shorter than a start | its own |
| step | drawn: 0.8 requests a second, and twice ten times as many for two minutes | Azure's conversations, drawn |
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.autoscaling.replicas import work_s
from penstock.base.errors import ConfigError
from penstock_loadtest.planned import Planned
from penstock_loadtest.workload.traces import read_azure, read_mooncake

LONGEST_S: Final = 1200.0
LEAD_S: Final = 300.0
"""Seconds before a window that are played and not counted."""
LEARNING_S: Final = 900.0
"""The same where bursts come: what is learned from an earlier one needs an earlier one."""
SCORED_FROM: Final = 2 / 3
SMOOTH: Final = ("conv", "large", "small", "mooncake")
BURSTS: Final = ("code", "step")
NAMES: Final = SMOOTH + BURSTS
STEP_RPS, STEP_FACTOR = 0.8, 10.0
STEP_BURSTS_S: Final = ((60.0, 180.0), (900.0, 1020.0))
"""Both bursts of the step, seconds from the window's beginning: further apart than the default delay of going down."""
FIRST_UTILISATION: Final = 0.65
MOONCAKE_PART: Final = 8
FILES: Final = {
    "conv": "azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
    "code": "azure_llm_2023/AzureLLMInferenceTrace_code.csv",
    "mooncake": "mooncake/conversation_trace.jsonl",
    "large": "servegen/language_m-large_requests_2rps.csv.gz",
    "small": "servegen/language_m-small_requests_1rps.csv.gz",
}

Rows = npt.NDArray[np.float64]
"""Requests of a trace, shape (requests, 3): seconds, prompt tokens, output tokens."""


class Burst(NamedTuple):
    """A part of a window that is also counted by itself. Seconds from the beginning of what is played."""

    name: str
    begin_s: float
    end_s: float


class Window(NamedTuple):
    """A load. begin_s, end_s: what is counted, seconds from the beginning of what is played."""

    name: str
    rows: list[tuple[float, int, int]]
    """Time, prompt tokens and output tokens of each request."""
    begin_s: float
    end_s: float
    bursts: tuple[Burst, ...] = ()

    @property
    def hours(self) -> float:
        return (self.end_s - self.begin_s) / 3600

    @property
    def first_replicas(self) -> int:
        """Number of replicas at the beginning, for those who scale: right for the load until counting begins."""
        busy_s = sum(work_s(prompt, output) for at_s, prompt, output in self.rows if at_s < self.begin_s)
        return max(1, round(busy_s / self.begin_s / FIRST_UTILISATION))

    def plan(self) -> Iterator[Planned]:
        """The requests as the simulator takes them. No prompt shares anything with another."""
        for index, (at_s, prompt, output) in enumerate(self.rows):
            yield Planned(
                index=index, at_s=at_s, endpoint="completions", prompt=[-1 - index, prompt], max_tokens=output
            )


def load_windows(folder: Path, names: tuple[str, ...] = NAMES) -> dict[str, tuple[Window, Window]]:
    """The window for tuning and the one for scoring, by name. folder: has FILES. Raises ConfigError for a file that is
    not there."""
    conversations = _read(folder, "conv")
    lengths = conversations[:, 1:]
    found = {}
    for name in names:
        if name == "step":
            found[name] = _draw_steps(lengths, "tuning"), _draw_steps(lengths, "scored")
        else:
            found[name] = _cut(name, _read_scaled(folder, name, lengths))
    return found


def _read_scaled(folder: Path, name: str, lengths: Rows) -> Rows:
    """A trace in the time and with the lengths of its replay."""
    if name == "conv":
        return np.column_stack([_read(folder, "conv")[:, 0], lengths])
    rows = _read(folder, name)
    if name == "mooncake":
        rows[:, 1] = np.maximum(1.0, np.round(rows[:, 1] / MOONCAKE_PART))
    if name == "large":
        rows[:, 0] /= 2.5
    if name == "small":
        rows[:, 0] /= 5
        rows[:, 1:] = lengths[np.arange(len(rows)) % len(lengths)]
    return rows


def _read(folder: Path, name: str) -> Rows:
    path = folder / FILES[name]
    if not path.is_file():
        raise ConfigError(f"{path} is not there; --traces names the folder that has the files of docs/testing.md")
    if path.suffix == ".gz":
        rows = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 2, 3))
    else:
        read = read_mooncake if path.suffix == ".jsonl" else read_azure
        rows = np.array([(row.at_s, row.prompt_tokens, row.output_tokens) for row in read(path)], dtype=np.float64)
    rows[:, 0] -= rows[0, 0]
    rows[:, 1:] = np.maximum(1.0, rows[:, 1:])
    return rows


def _cut(name: str, rows: Rows) -> tuple[Window, Window]:
    """A trace's two windows: of a short trace the first minutes and the last third, of one of days the middle of what
    is for tuning and the last minutes."""
    span_s, lead_s = float(rows[-1, 0]), LEARNING_S if name in BURSTS else LEAD_S
    border_s = SCORED_FROM * span_s
    tuned_s = max(LEAD_S, border_s / 2 - LONGEST_S) if span_s > 10 * LONGEST_S else LEAD_S
    scored_s = max(border_s, span_s - LONGEST_S)
    return (
        _take(name, rows, tuned_s, min(tuned_s + LONGEST_S, border_s), LEAD_S),
        _take(name, rows, scored_s, min(scored_s + LONGEST_S, span_s), lead_s),
    )


def _take(name: str, rows: Rows, begin_s: float, end_s: float, lead_s: float) -> Window:
    first, last = np.searchsorted(rows[:, 0], [begin_s - lead_s, end_s])
    taken = rows[first:last]
    return Window(
        name,
        [(float(at_s) - begin_s + lead_s, int(prompt), int(output)) for at_s, prompt, output in taken],
        lead_s,
        end_s - begin_s + lead_s,
    )


def _draw_steps(lengths: Rows, part: str) -> Window:
    """Poisson arrivals with two like bursts."""
    random, end_s = Random(f"step, {part}"), LEAD_S + LONGEST_S
    bursts = tuple(
        Burst(f"burst {number}", LEAD_S + begin_s, LEAD_S + until_s)
        for number, (begin_s, until_s) in enumerate(STEP_BURSTS_S, 1)
    )
    rows, at_s = [], 0.0
    while (at_s := at_s + random.expovariate(STEP_RPS * STEP_FACTOR)) < end_s:
        is_burst = any(burst.begin_s <= at_s < burst.end_s for burst in bursts)
        if is_burst or random.random() < 1 / STEP_FACTOR:
            prompt, output = lengths[random.randrange(len(lengths))]
            rows.append((at_s, int(prompt), int(output)))
    return Window("step", rows, LEAD_S, end_s, bursts)
