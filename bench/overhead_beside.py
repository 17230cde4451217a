"""What a change costs: the platforms of this checkout and of another one, side by side under the load of
`bench-overhead`.

    git worktree add ../before COMMIT
    make bench-overhead-beside ARGS=../before

Both platforms run at the same time, over timed replicas; each level is measured in slices, in turn, the other checkout
first in every second one. So whatever else the machine does meets both. Printed for each level: CPU of an answer
(median of the slices), the ratio of the medians, the lowest and highest ratio of a pair of slices, TTFT and inter-token
times. The other checkout runs with this Python and its packages.
"""

import argparse
import asyncio
import statistics
import tempfile
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

    def describe(self, level: Level) -> str:
        here, beside = self.medians_ms
        ratios = [a.cpu_ms / b.cpu_ms for a, b in zip(self.here, self.beside, strict=True)]
        ttft = [[1e3 * seconds for slice in side for seconds in slice.ttft_s] for side in self]
        gaps = [[1e3 * seconds for slice in side for seconds in slice.gaps_s] for side in self]
        return (
            f"{level.name}: CPU of an answer {here:.2f} ms beside {beside:.2f}, ratio {here / beside:.3f}"
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


def run(here: Bench, beside: Bench, num_slices: int) -> float:
    """Measure and print every level. Returns the ratio of the sums of the levels' medians."""
    sums = [0.0, 0.0]
    for number, level in enumerate(levels(quick=True)):
        pairs = measure_pairs(here, beside, level, num_slices, 1000 * number)
        print(pairs.describe(level), flush=True)
        sums = [total + median for total, median in zip(sums, pairs.medians_ms, strict=True)]
    return sums[0] / sums[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("--slices", type=int, default=6, help="slices of a level")
    args = parser.parse_args()
    if not (args.checkout / ".src" / "penstock").exists():
        parser.error(f"{args.checkout} is no checkout of Penstock: it has no .src/penstock")
    with (
        tempfile.TemporaryDirectory(prefix="penstock-here-") as here_folder,
        tempfile.TemporaryDirectory(prefix="penstock-beside-") as beside_folder,
        running_platform(Path(beside_folder), make_config(), checkout=args.checkout.resolve()) as other,
        running_platform(Path(here_folder), make_config()) as own,
        asyncio.Runner() as loop,
    ):
        here, beside = Bench(own, None, loop), Bench(other, None, loop)
        ratio = run(here, beside, args.slices)
        here.close()
        beside.close()
    print(f"sum of the levels: ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
