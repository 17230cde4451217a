"""What a real gateway reported to the autoscaler while its pool was loaded (record_reports makes it), and many such
gateways before one large pool.

Pure: no clock, no Redis. Every gateway reports the recorded flow and queue as its own. The recorded pool is there once
for each gateway, with PIECES replicas; the replicas that are really there report in turn what those reported, so that
all of them together have what all gateways let in.
"""

import bisect
import gzip
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import sum_flows
from penstock.wire.scaling import GatewayReport, PoolFlow, PoolReport, ReplicaReport

RECORDING = Path(__file__).with_name("reports.jsonl.gz")
BEGIN_S = 40.0
"""Seconds from the beginning of the load to that of the step: from 0.3 requests a second to 7, of which a recorded
replica takes about three."""
LENGTH_S = 60.0
DURATION_S = 180.0
ONSET_S = 10.0
"""Seconds in which the step's queue came and went."""
ENDING_S = 15.0
"""Seconds after the step in which what it had left came to its end."""
NUM_GATEWAYS = 14
"""Number of gateways that suits the recorded demand. The calm keeps a tenth of a replica busy, 14 times that is 1.4; 4
replicas carry 2.24 when the fifth may go (0.7 of them, less the margin). The step keeps 2.4 busy, 14 times that is 34,
of which 40 replicas carry 28: from 12 gateways on it wants them all. test_e2e_recorded has both, and passes with 13 to
24 gateways."""
PIECES = 3
"""Replicas that the recorded pool had at most."""
MAX_ROWS = 8
"""Sequences that a recorded replica runs at once."""
SETTINGS = AutoscaleConfig(
    min_replicas=4, max_replicas=40, target_utilisation=0.7, window_s=8.0, start_s=30.0, scale_down_delay_s=2.0
)
"""Settings that fit: the window of examples/autoscale, a start as long as the pods' in test_actuator; short only in the
way down, which has 36 steps."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One report of one gateway, of the pool that is scaled."""

    at_s: float
    """Seconds since the load began."""
    pool: PoolReport
    replicas: list[ReplicaReport]
    """The replicas, with the ids 0, 1, ... in the order in which they came."""


class Frame(NamedTuple):
    """A line, so that it can follow any other."""

    gain: PoolFlow
    """Gains since the line before."""
    num_waiting: int
    oldest_wait_s: float
    replicas: tuple[ReplicaReport, ...]
    """PIECES; one that was not there has nothing to do."""


class Stretches(NamedTuple):
    """The recording in parts."""

    calm: tuple[Frame, ...]
    """Frames before the step, and after its ending."""
    onset: tuple[Frame, ...]
    busy: tuple[Frame, ...]
    """The step from then on."""
    ending: tuple[Frame, ...]


def recording() -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for line in gzip.decompress(RECORDING.read_bytes()).splitlines()]


def stretches(lines: Sequence[Line]) -> Stretches:
    """Stretches begin, in the load's time, at 0 (calm), BEGIN_S, and so on; the last is calm again."""
    begins = [BEGIN_S, BEGIN_S + ONSET_S, BEGIN_S + LENGTH_S, BEGIN_S + LENGTH_S + ENDING_S]
    frames = [_frame(before, line) for before, line in itertools.pairwise([lines[0], *lines])]
    places = [bisect.bisect_right([line.at_s for line in lines], begin_s) for begin_s in begins]
    calm, onset, busy, ending, after = (
        tuple(frames[begin:end]) for begin, end in itertools.pairwise([0, *places, len(frames)])
    )
    return Stretches(calm + after, onset, busy, ending)


def _frame(before: Line, line: Line) -> Frame:
    there = {row.replica_id: row for row in line.replicas}
    idle = msgspec.structs.replace(
        line.replicas[0].load, num_running=0, num_waiting=0, prefill_tokens_outstanding=0, kv_tokens=0
    )
    absent = msgspec.structs.replace(line.replicas[0], load=idle, cached_blocks=0, hit_tokens=0)
    columns = zip(msgspec.structs.astuple(before.pool.flow), msgspec.structs.astuple(line.pool.flow), strict=True)
    gain = PoolFlow(*(after - before for before, after in columns))
    return Frame(
        gain,
        line.pool.num_waiting,
        line.pool.oldest_wait_s,
        tuple(there.get(str(piece), absent) for piece in range(PIECES)),
    )


@dataclass
class Player:
    """One gateway."""

    name: str
    coming: Iterator[Frame]
    flow: PoolFlow = field(default_factory=PoolFlow)

    def go_on(self) -> Frame:
        frame = next(self.coming)
        self.flow = sum_flows((self.flow, frame.gain))
        return frame


@dataclass
class Players:
    """All of them. The step begins and ends for all at once. In the calm, and while the step goes on, each is somewhere
    else in what was recorded, as gateways are that know nothing of each other: in step, one request seen often would
    pass for many that are alike, and the average request would jump."""

    pool: str
    recorded: Stretches = field(default_factory=lambda: stretches(recording()))
    num_played: int = 0
    """Reports."""

    def __post_init__(self) -> None:
        self._players = [Player(f"g{place}", _around(self.recorded.calm, place)) for place in range(NUM_GATEWAYS)]

    def press(self) -> None:
        for place, player in enumerate(self._players):
            player.coming = chain(self.recorded.onset, _around(self.recorded.busy, place))

    def release(self) -> None:
        for place, player in enumerate(self._players):
            player.coming = chain(self.recorded.ending, _around(self.recorded.calm, place))

    def reports(self, running: Iterable[int]) -> list[GatewayReport]:
        """The next of every gateway. running: the numbers, from 1, of the replicas that are there."""
        frames = [player.go_on() for player in self._players]
        rows = [self._row(number, frames[(number - 1) // PIECES % NUM_GATEWAYS]) for number in running]
        self.num_played += NUM_GATEWAYS
        return [
            GatewayReport(
                player.name,
                self.num_played,
                [PoolReport(self.pool, player.flow, frame.num_waiting, frame.oldest_wait_s)],
                rows,
            )
            for player, frame in zip(self._players, frames, strict=True)
        ]

    def _row(self, number: int, frame: Frame) -> ReplicaReport:
        return msgspec.structs.replace(frame.replicas[(number - 1) % PIECES], replica_id=f"r{number}", pool=self.pool)


def _around(frames: tuple[Frame, ...], place: int) -> Iterator[Frame]:
    """The frames over and over, from another one for every gateway."""
    begin = place * len(frames) // NUM_GATEWAYS
    return cycle(frames[begin:] + frames[:begin])
