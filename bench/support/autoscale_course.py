"""A run of the autoscaling demo in figures and as a picture. Not what it must be like: that is bench.autoscale_demo."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.support.bursts import Burst, bursts_of
from bench.support.report import Row

TTFT_TARGET_S = 1.0
"""Target of the time to first token in both files of the example."""
MOST = 3
"""Replicas that the scaled pool may have."""
COLUMN_S = 2.0
"""Width of a column in the picture."""


class Sample(NamedTuple):
    unix_s: float
    values: dict[str, float]
    """Value of each gauge: replicas, target, queued, admitted (waiting on a replica) and running."""


class Course(NamedTuple):
    """A run; times are seconds since the load began."""

    at: "np.ndarray[Any, Any]"
    """Seconds at which the gauges were read."""
    shown: dict[str, "np.ndarray[Any, Any]"]
    """Values of each gauge at those seconds."""
    intended: "np.ndarray[Any, Any]"
    """Seconds at which requests were to be sent."""
    ttft: "np.ndarray[Any, Any]"

    @property
    def bursts(self) -> list[Burst]:
        return bursts_of(self.intended.tolist())


def course(began_s: float, samples: Sequence[Sample], records: Sequence[Mapping[str, Any]]) -> Course:
    """began_s: Unix time at which the load began. records: of the scaled pool's requests, by the load tester."""
    intended = np.array([row["intended_s"] for row in records])
    words = sorted({word for sample in samples for word in sample.values})
    return Course(
        at=np.array([sample.unix_s - began_s for sample in samples]),
        shown={word: np.array([sample.values.get(word, np.nan) for sample in samples]) for word in words},
        intended=intended,
        ttft=np.array([row.get("first_s", np.nan) for row in records]) - intended,
    )


def figures(run: Course, num_downs: int, took_s: float) -> list[Row]:
    """num_downs: scale-downs that the autoscaler carried out. took_s: seconds of the whole demo."""
    bursts = run.bursts
    is_burst = np.zeros(len(run.intended), dtype=bool)
    for burst in bursts:
        is_burst |= (run.intended >= burst.begin_s) & (run.intended < burst.end_s)
    parts = (("in bursts", run.ttft[is_burst]), ("between them", run.ttft[~is_burst]))
    up_s = list(_first_after(run, [burst.begin_s for burst in bursts], lambda replicas: replicas >= 2))
    down_s = list(_first_after(run, [burst.end_s for burst in bursts], lambda replicas: replicas == 1))
    during = (run.at >= 0) & (run.at <= run.intended.max())
    return [
        Row("bursts", len(bursts), None, ""),
        Row("scale-downs", num_downs, None, ""),
        Row("requests", len(run.ttft), None, ""),
        *_median_and_most("burst's begin to a second replica that serves", up_s),
        *_median_and_most("burst's end to 1 replica", down_s),
        Row("replicas under the load, mean", round(float(np.nanmean(run.shown["replicas"][during])), 2), None, ""),
        *[
            Row(f"TTFT {name}, p{percent}", _percentile(part, percent), None, "s")
            for name, part in parts
            for percent in (50, 99)
        ],
        Row(
            f"first tokens within {TTFT_TARGET_S:g} s",
            round(float(np.mean(run.ttft <= TTFT_TARGET_S)), 4),
            None,
            "share",
        ),
        Row("the whole demo", round(took_s), None, "s"),
    ]


def _first_after(
    run: Course, starts_s: Sequence[float], is_it: "Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]"
) -> Iterator[float]:
    """Seconds from each start until the replicas are so, where they are before the next start."""
    for start_s, next_s in itertools.pairwise([*starts_s, float("inf")]):
        found = run.at[(run.at > start_s) & (run.at < next_s) & is_it(run.shown["replicas"])]
        if len(found):
            yield float(found[0]) - start_s


def _median_and_most(name: str, values: Sequence[float]) -> list[Row]:
    return [
        Row(f"{name}, {word}", round(float(of(values)), 1) if values else None, None, "s")
        for word, of in (("median", np.median), ("longest", np.max))
    ]


def _percentile(values: "np.ndarray[Any, Any]", percent: int) -> float | None:
    return round(float(np.nanpercentile(values, percent)), 3) if len(values) else None


def draw(run: Course, picture: Path) -> None:
    """Draw load, replicas, queue and TTFT over time into the file `picture`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (half a second that only this needs)

    edges = np.arange(0.0, run.at.max() + COLUMN_S, COLUMN_S)
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    rate, replicas, queue, first = figure.subplots(4, 1, sharex=True, height_ratios=[1, 1.2, 1, 1.4])
    rate.stairs(np.histogram(run.intended, edges)[0] / COLUMN_S, edges, fill=True, color="#a3acb5")
    rate.set_ylabel("requests/s")
    _draw_replicas(replicas, run)
    _draw_queue(queue, run)
    _draw_ttft(first, run, edges)
    first.set_xlabel("seconds since the load began")
    first.set_xlim(0, edges[-1])
    for part in (rate, replicas, queue, first):
        part.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A timed pool under {len(run.bursts)} bursts")
    figure.savefig(picture, dpi=110)


def _draw_replicas(axes: Any, run: Course) -> None:
    axes.step(
        run.at, run.shown["target"], where="post", color="#e08e0b", linestyle="--", label="target of the autoscaler"
    )
    axes.step(run.at, run.shown["replicas"], where="post", color="#1f6fb5", linewidth=2.2, label="replicas that serve")
    axes.set_yticks(range(MOST + 2))
    axes.set_ylabel("replicas")
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _draw_queue(axes: Any, run: Course) -> None:
    waiting = run.shown["queued"] + run.shown["admitted"]
    axes.fill_between(
        run.at, waiting, step="post", color="#b93a1e", alpha=0.6, label="waiting, in the gateway or on a replica"
    )
    axes.step(run.at, run.shown["running"], where="post", color="#16806a", label="running on replicas")
    axes.set_ylabel("requests")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _draw_ttft(axes: Any, run: Course, edges: "np.ndarray[Any, Any]") -> None:
    axes.plot(run.intended, run.ttft, ".", color="#86bce4", markersize=3, label="one request")
    middle, p50, p99 = _percentiles(run.intended, run.ttft, edges)
    axes.plot(middle, p50, color="#1f6fb5", label="p50")
    axes.plot(middle, p99, color="#0b3660", label=f"p99 of {COLUMN_S:g} s")
    axes.set_yscale("log")
    axes.set_ylabel("TTFT, s")
    axes.set_ylim(top=5 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper right", frameon=False, ncols=3)


def _percentiles(
    at: "np.ndarray[Any, Any]", values: "np.ndarray[Any, Any]", edges: "np.ndarray[Any, Any]"
) -> tuple[list[float], list[float], list[float]]:
    middle, p50, p99 = [], [], []
    for begin, end in itertools.pairwise(edges):
        inside = values[(at >= begin) & (at < end) & ~np.isnan(values)]
        if len(inside):
            middle.append((begin + end) / 2)
            p50.append(float(np.percentile(inside, 50)))
            p99.append(float(np.percentile(inside, 99)))
    return middle, p50, p99
