"""What a change costs: the platforms of this checkout and of another one, side by side under the load of
`bench-overhead`.

    git worktree add ../before COMMIT
    make bench-overhead-beside ARGS=../before

Both platforms run at the same time, over timed replicas; each level is measured in slices, in turn, the other checkout
first in every second one. So whatever else the machine does meets both. Two platforms of the same code may differ for
as long as they live, so both are started more than once, another one first each time. Slices a few seconds apart differ
by a third on some machines: it is the mean of many pairs that tells. Printed for each level: CPU of an answer (median
of the slices), the ratio (geometric mean of the pairs of slices), the lowest and highest pair, TTFT and inter-token
times; at the end the geometric mean of all pairs of all levels, with its 95 % interval as if pairs were independent.
The other checkout runs with this Python and its packages.
"""

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.overhead import Bench, Level, Measured, levels, make_config, measure, quantile
from bench.support.platform_process import running_platform

SLICE_REQUESTS = {1: 8, 16: 96, 64: 192}
"""Requests of a slice, by the number of streams."""


class Pairs(NamedTuple):
    """Slices of one level, a Measured a slice."""

    here: list[Measured]
    beside: list[Measured]

    @property
    def medians_ms(self) -> tuple[float, float]:
        """CPU of an answer, ms: of this checkout and the other one."""
        here, beside = (statistics.median(slice.cpu_ms for slice in side) for side in self)
        return here, beside

    @property
    def ratios(self) -> list[float]:
        """CPU of an answer of this checkout beside the other one's, for each pair of slices."""
        return [a.cpu_ms / b.cpu_ms for a, b in zip(self.here, self.beside, strict=True)]

    def describe(self, level: Level) -> str:
        here, beside = self.medians_ms
        ratios = self.ratios
        ttft = [[1e3 * seconds for slice in side for seconds in slice.ttft_s] for side in self]
        gaps = [[1e3 * seconds for slice in side for seconds in slice.gaps_s] for side in self]
        return (
            f"{level.name}: CPU of an answer {here:.2f} ms beside {beside:.2f},"
            f" ratio {statistics.geometric_mean(ratios):.3f}"
            f" (slices {min(ratios):.2f} to {max(ratios):.2f});"
            f" TTFT p50 {quantile(ttft[0], 0.5):.1f} beside {quantile(ttft[1], 0.5):.1f} ms,"
            f" inter-token p99 {quantile(gaps[0], 0.99):.1f} beside {quantile(gaps[1], 0.99):.1f} ms"
        )


def measure_pairs(here: Bench, beside: Bench, level: Level, num_slices: int, seed: int) -> Pairs:
    """Measure one level on both platforms in turn; each slice has prompts of its own."""
    share = level._replace(requests=SLICE_REQUESTS[level.streams])
    pairs = Pairs([], [])
    for number in range(num_slices):
        sides = [(here, pairs.here), (beside, pairs.beside)]
        for bench, measured in sides if number % 2 else reversed(sides):
            seed += 1
            measured.append(measure(bench.client, share, seed, bench.cpu_seconds, bench.idle, bench.loop))
    return pairs


def run(here: Bench, beside: Bench, num_slices: int, start: int) -> list[Pairs]:
    """Measure every level at platforms that have started; each is shown when it is done."""
    measured = []
    for number, level in enumerate(levels(quick=True)):
        measured.append(measure_pairs(here, beside, level, num_slices, 100_000 * start + 1000 * number))
        print(measured[-1].describe(level), file=sys.stderr, flush=True)
    return measured


def mean_ratio(measured: Sequence[Pairs]) -> tuple[float, float, float]:
    """The geometric mean of all pairs of all levels, and the bounds of its 95 % interval."""
    logs = [math.log(ratio) for pairs in measured for ratio in pairs.ratios]
    mean, wide = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - wide), math.exp(mean + wide)


@contextmanager
def started(checkout: Path, loop: asyncio.Runner, *, is_here_first: bool) -> Iterator[tuple[Bench, Bench]]:
    """The platforms of this checkout and of the other one."""
    places: list[Path | None] = [None, checkout] if is_here_first else [checkout, None]
    with ExitStack() as stack:
        benches = []
        for place in places:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-beside-")))
            platform = stack.enter_context(running_platform(folder, make_config(), checkout=place))
            benches.append(Bench(platform, None, loop))
            stack.callback(benches[-1].close)
        here, beside = benches if is_here_first else reversed(benches)
        yield here, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("--starts", type=int, default=2, help="times that both platforms are started")
    parser.add_argument("--slices", type=int, default=3, help="slices of a level after each start")
    args = parser.parse_args()
    if not (args.checkout / ".src" / "penstock").exists():
        parser.error(f"{args.checkout} is no checkout of Penstock: it has no .src/penstock")
    measured = [Pairs([], []) for _ in levels(quick=True)]
    with asyncio.Runner() as loop:
        for start in range(args.starts):
            with started(args.checkout.resolve(), loop, is_here_first=start % 2 == 1) as (here, beside):
                found = run(here, beside, args.slices, start)
            for whole, pairs in zip(measured, found, strict=True):
                whole.here.extend(pairs.here)
                whole.beside.extend(pairs.beside)
            print(f"start {start + 1} of {args.starts}: all levels, ratio {mean_ratio(found)[0]:.3f}", flush=True)
    for level, pairs in zip(levels(quick=True), measured, strict=True):
        print(pairs.describe(level))
    mean, low, high = mean_ratio(measured)
    print(f"all levels: ratio {mean:.3f} (95 % interval {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
