"""Faults about a live autoscaler, alone and in pairs, beside the same load without them: `make bench-autoscale-faults`.

    python -m bench.autoscale_faults [--only NAME ...] [--calm 3]

For each a platform of its own: real Redis, Ray Serve, gateway and autoscaler over timed replicas; requests at 1 a
second, at 6 from the eighth to the 33rd second, and at 1 again. Reports, refused changes and the clock are meddled with
in the autoscaler's process (`bench.support.scaling_faults`); autoscaler and controller are killed and stopped; another
job takes the cluster's processors. Asked for (`bench.support.scaling_bounds`): at most 1.2 times the highest target of
the undisturbed runs, at most 4 changes of direction, the last safe target held while nothing is known, no request lost;
and that each fault was felt. The exit status is 1 where that does not hold.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from bench.autoscale_demo import read_lines
from bench.support.faulty_start import started_with_faults
from bench.support.more_gateways import ray_address, ray_environment
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from bench.support.scaling_bounds import Turn, count_changes, wrongs
from bench.support.scaling_faults import VARIABLE, FaultFile
from penstock.autoscale.policy import Reason
from penstock.cli.cluster import RAY_FOLDER
from penstock.cli.state import StateDir
from penstock.sim.faults.fault import Fault
from penstock_loadtest.scenario import Arrivals, Kind, Lengths, Prompts, Scenario
from penstock_loadtest.workload.plan import draw_plan

CONFIG = """
gateway: {{port: {port}, queue_timeout_s: 120.0}}
pools:
- name: played
  served_names: [played]
  autoscale: {{max_replicas: 12, window_s: 4.0, start_s: 5.0, scale_down_delay_s: 8.0, ttft_target_s: 1.0}}
  engine: {{runner: timed, max_num_seqs: 4, timed: {{base_s: 0.03, prefill_token_s: 0.0001, num_blocks: 512}}}}
"""
BODY = {"model": "played", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
"""1.2 seconds of a row: a replica has 3.3 such answers a second."""
END_S = 50.0
LOAD = Scenario(
    duration_s=END_S,
    arrivals=Arrivals(process="spike", rate=1.0, to_rate=6.0, at_s=8.0, length_s=25.0),
    kinds=[Kind(prompts=Prompts(tokens=Lengths(constant=4)), output_tokens=Lengths(constant=40))],
)
WITHIN_S = 120.0
TICK_S = 0.1
IN_PROCESS = ("reports_missing", "reports_frozen", "reports_late", "changes_fail", "changes_hang", "clock_off")
FAULTS: dict[str, Fault] = {
    "reports missing": Fault(kind="reports_missing", at_s=12.0, length_s=14.0),
    "reports frozen": Fault(kind="reports_frozen", at_s=12.0, length_s=9.0),
    "reports late": Fault(kind="reports_late", at_s=7.0, length_s=20.0, by_s=4.0),
    "changes fail": Fault(kind="changes_fail", at_s=9.0, length_s=10.0),
    "changes hang": Fault(kind="changes_hang", at_s=8.0, length_s=15.0),
    "controller away": Fault(kind="controller_away", at_s=10.0, length_s=8.0),
    "killed in mid-scale": Fault(kind="autoscaler_down", at_s=8.0, length_s=5.0),
    "clock ahead": Fault(kind="clock_off", at_s=0.0, length_s=40.0, by_s=5.0),
    "clock behind": Fault(kind="clock_off", at_s=0.0, length_s=40.0, by_s=-5.0),
    "no GPUs": Fault(kind="no_gpus", at_s=0.0, length_s=28.0, replicas=2, is_told=False),
}
"""The autoscaler is killed when a change of its is under way. A clock counts where a record is read that another
process wrote: it is off until that one is killed, and only beside it. Nobody tells of GPUs that lack: on a cluster
Kubernetes does (`tests/e2e/test_shortages.py`)."""
PAIRS = [
    ("killed in mid-scale", "clock ahead"),
    ("killed in mid-scale", "clock behind"),
    ("controller away", "killed in mid-scale"),
    ("reports late", "killed in mid-scale"),
    ("reports late", "no GPUs"),
    ("changes hang", "no GPUs"),
    ("reports missing", "changes fail"),
    ("reports frozen", "changes hang"),
]
CASES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FAULTS if not name.startswith("clock")},
    **{" and ".join(pair): pair for pair in PAIRS},
}


class Run(NamedTuple):
    turns: list[Turn]
    running: list[int]
    """Replicas that ran at each turn."""
    statuses: list[int]
    """Status of each answer; 0: none came."""
    autoscalers: tuple[list[int], list[int]]
    """Processes of autoscalers, at the load's beginning and at its end."""

    @property
    def most(self) -> int:
        return max(turn.target for turn in self.turns)

    @property
    def changes(self) -> int:
        return count_changes(turn.before for turn in self.turns)

    @property
    def num_lost(self) -> int:
        return sum(status != 200 for status in self.statuses)

    def wrongs(self, undisturbed: int, faults: Sequence[Fault] = ()) -> list[str]:
        lost = [f"{self.num_lost} of {len(self.statuses)} requests failed"] if self.num_lost else []
        unfelt = [f"{fault.kind} was not felt" for fault in faults if not self.is_felt(fault)]
        return [*wrongs(self.turns, undisturbed), *lost, *unfelt]

    def is_felt(self, fault: Fault) -> bool:
        """Whether the run shows that the fault was there."""
        during = [turn for turn in self.turns if fault.is_on(turn.at_s)]
        if fault.kind.startswith("reports_"):
            return any(turn.reason == Reason.STALE for turn in during)
        if fault.kind.startswith("changes_"):
            return any(turn.outcome == "failed" for turn in during)
        if fault.kind == "controller_away":
            # a call that was made before may come to its end within CALL_S
            return not any(fault.at_s + 1 < turn.at_s < fault.end_s - 1 and turn.outcome != "failed" for turn in during)
        if fault.kind == "autoscaler_down":
            return not set(self.autoscalers[0]) & set(self.autoscalers[1])
        if fault.kind == "no_gpus":
            counts = [count for turn, count in zip(self.turns, self.running, strict=True) if fault.is_on(turn.at_s)]
            return max((turn.target for turn in during), default=0) > fault.replicas >= max(counts, default=0)
        return True  # a clock: the time of its turns says so, and no decision needs to


def play(faults: Sequence[Fault], seed: int = 1) -> Run:
    """The load on a platform of its own, with these faults."""
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as name, ExitStack() as stack:
        folder = Path(name)
        file = FaultFile(folder / "faults.json")
        stack.enter_context(started_with_faults({VARIABLE: str(folder / "faults.json")}))
        platform = stack.enter_context(running_platform(folder, CONFIG))
        before = platform.autoscalers
        with ExitStack() as outside:
            director = Director(platform, faults, file, outside)
            began_unix_s = time.time()
            statuses = asyncio.run(_play(platform, director, arrivals(seed)))
        after = platform.autoscalers
        lines = read_lines(platform.state / "autoscale.jsonl")
    turns = [
        Turn(line["unix_s"] - began_unix_s, line["was"], line["target"], Reason(line["reason"]), line["outcome"])
        for line in lines
    ]
    return Run(turns, [len(line["running"]) for line in lines], statuses, (before, after))


def arrivals(seed: int) -> list[float]:
    """Seconds at which requests are sent, at Poisson times."""
    return [planned.at_s for planned in draw_plan(msgspec.structs.replace(LOAD, seed=seed))]


async def _play(platform: PlatformProcess, director: "Director", due: Sequence[float]) -> list[int]:
    headers = {"authorization": f"Bearer {platform.key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=platform.url, headers=headers, timeout=WITHIN_S, limits=limits, trust_env=False
    ) as client:
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def ask(at_s: float) -> int:
            await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
            try:
                return (await client.post("/v1/completions", json=BODY)).status_code
            except httpx.HTTPError:
                return 0

        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(ask(at_s)) for at_s in due]
            tasks.create_task(asyncio.to_thread(director.run))
    return [answer.result() for answer in answers]


class Director:
    """Lets each fault begin and end in its time; those that begin with the load have begun before it."""

    def __init__(self, platform: PlatformProcess, faults: Sequence[Fault], file: FaultFile, stack: ExitStack) -> None:
        """stack: ends what has begun and was not ended."""
        self._platform = platform
        self._file = file
        self._stack = stack
        self._in_process = [fault for fault in faults if fault.kind in IN_PROCESS]
        self._waiting = [fault for fault in faults if fault.kind in OUTSIDE]
        self._going: list[tuple[Fault, ExitStack]] = []
        self._written: dict[str, float] = {}
        self._direct(0.0)

    def run(self) -> None:
        began_s = time.monotonic()
        while (now := time.monotonic() - began_s) < END_S:
            self._direct(now)
            time.sleep(TICK_S)

    def _direct(self, now: float) -> None:
        on: dict[str, float] = {fault.kind: fault.by_s for fault in self._in_process if fault.is_on(now)}
        if on != self._written:
            self._file.write(on)
            self._written = on
        for fault in [fault for fault in self._waiting if fault.at_s <= now and self._is_due(fault)]:
            self._waiting.remove(fault)
            if fault.kind == "autoscaler_down":
                self._in_process = [fault for fault in self._in_process if fault.kind != "clock_off"]
            own = self._stack.enter_context(ExitStack())
            own.enter_context(OUTSIDE[fault.kind](self._platform, fault))
            self._going.append((fault, own))
        for fault, own in [each for each in self._going if each[0].end_s <= now]:
            self._going.remove((fault, own))
            own.close()

    def _is_due(self, fault: Fault) -> bool:
        """Whether it may begin once its time has come: a kill in mid-scale only while replicas are on their way."""
        if fault.kind != "autoscaler_down":
            return True
        lines = read_lines(self._platform.state / "autoscale.jsonl")
        return bool(lines) and lines[-1]["target"] > len(lines[-1]["running"])


@contextmanager
def _controller_away(platform: PlatformProcess, _: Fault) -> Iterator[None]:
    (controller,) = platform.controllers
    os.kill(controller, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(controller, signal.SIGCONT)


@contextmanager
def _autoscaler_down(platform: PlatformProcess, _: Fault) -> Iterator[None]:
    """Serve starts another one when it notices: how long that takes is its affair."""
    (autoscaler,) = platform.autoscalers
    os.kill(autoscaler, signal.SIGKILL)
    yield


@contextmanager
def _no_gpus(platform: PlatformProcess, fault: Fault) -> Iterator[None]:
    """Another job has the cluster, but for the replicas of the fault; what runs already stays."""
    run = StateDir(platform.state).read()
    assert run is not None
    left = max(0, fault.replicas - len(platform.replicas))
    folder = str(Path(run.temp_dir) / RAY_FOLDER)
    command = [sys.executable, "-m", "bench.support.cpu_holder", ray_address(platform), folder, str(left)]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ray_environment(platform), text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline().strip() != "held":
            raise RuntimeError("the other job did not get the processors")
        yield
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()


OUTSIDE: Mapping[str, Callable[[PlatformProcess, Fault], AbstractContextManager[None]]] = {
    "controller_away": _controller_away,
    "autoscaler_down": _autoscaler_down,
    "no_gpus": _no_gpus,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", default=list(CASES), help=", ".join(CASES))
    parser.add_argument(
        "--calm", type=int, default=3, help="runs without a fault, beside whose highest target all stand"
    )
    options = parser.parse_args()
    if options.calm < 1:
        parser.error("--calm: all stand beside an undisturbed run, so there must be one")
    rows, missed, highest = [], 0, 0
    for number in range(options.calm):
        calm = play([])
        highest = max(highest, calm.most)
        found = calm.wrongs(calm.most)
        _tell(f"undisturbed, {number + 1}", calm, found)
        missed += bool(found)
    rows.append(Row("undisturbed: highest target", highest, None, "replicas"))
    for name in options.only:
        faults = [FAULTS[each] for each in CASES[name]]
        run = play(faults)
        found = run.wrongs(highest, faults)
        _tell(name, run, found)
        missed += bool(found)
        rows += [
            Row(f"{name}: highest target", run.most, highest, "replicas"),
            Row(f"{name}: changes of direction", run.changes, None, ""),
            Row(f"{name}: requests that failed, of {len(run.statuses)}", run.num_lost, None, ""),
        ]
    write_report("autoscale-faults", rows)
    return 1 if missed else 0


def _tell(name: str, run: Run, found: Sequence[str]) -> None:
    course = " ".join(
        f"{turn.at_s:.0f}s:{turn.before}->{turn.target}({turn.reason}, {turn.outcome})"
        for turn in run.turns
        if turn.before != turn.target
    )
    print(f"{name}: at most {run.most}, {run.changes} changes, {run.num_lost} of {len(run.statuses)} failed; {course}")
    for sentence in found:
        print(f"  WRONG: {sentence}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
