"""What a terminal shows, and what a log gets instead."""

import asyncio
import io

import pytest
from rich.console import Console

from penstock_loadtest.run import live
from penstock_loadtest.run.live import line, panel, show
from penstock_loadtest.run.progress import Percentiles, Progress, Snapshot
from penstock_loadtest.scenario import Scenario

NOW = Snapshot(
    elapsed_s=75.0,
    total_s=120.0,
    sent=1500,
    in_flight=17,
    offered_per_s=20.0,
    achieved_per_s=19.5,
    tokens_per_s=1234.0,
    ttft_s=Percentiles(0.05, 0.2),
    tpot_s=Percentiles(0.01, 0.02),
    lateness_p99_s=0.0004,
    outcomes={"finished": 1480, "shed": 3},
    is_sending=True,
)


def drawn(snapshot: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(panel(snapshot))
    return console.export_text()


def test_the_panel_has_every_figure() -> None:
    text = drawn(NOW)

    for figure in (
        "1:15 of 2:00, 0:45 left",
        "20.0/s offered",
        "19.5/s finished",
        "1,234 tokens/s",
        "1,500 sent",
        "17 in flight",
        "p50 50.0 ms, p99 200.0 ms",
    ):
        assert figure in text
    for figure in ("p50 10.0 ms, p99 20.0 ms", "1,480 finished, 3 shed", "p99 0.4 ms"):
        assert figure in text


def test_the_line_has_every_figure() -> None:
    text = line(NOW)

    for figure in (
        "1:15 of 2:00, 0:45 left",
        "sent 1,500 (20.0/s)",
        "in flight 17",
        "TTFT p50 50.0 ms",
        "TPOT p50 10.0 ms",
        "1,480 finished, 3 shed",
    ):
        assert figure in text
    assert "\n" not in text
    assert "LATE" not in text


def test_lateness_is_a_warning_in_both() -> None:
    late = NOW._replace(lateness_p99_s=0.025)

    assert "can't keep up" in line(late)
    assert "p99 25.0 ms, over 10 ms" in drawn(late)


def test_a_run_without_an_end_has_no_bar_and_one_that_drains_says_so() -> None:
    assert "1:15" in drawn(NOW._replace(total_s=None))
    assert "waiting for answers" in drawn(NOW._replace(is_sending=False))


def test_before_anything_has_ended_there_are_dashes() -> None:
    empty = NOW._replace(ttft_s=None, tpot_s=None, lateness_p99_s=None, outcomes={})

    assert "TTFT -" in line(empty)
    assert "none ended" in line(empty)
    assert "TTFT" in drawn(empty)


def test_where_there_is_no_terminal_plain_lines_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LINE_S", 0.0)
    file = io.StringIO()
    written = asyncio.Event()

    class Console_(Console):  # noqa: N801
        def print(self, *values: object, **options: object) -> None:
            super().print(*values, **options)
            loop.call_soon_threadsafe(written.set)

    async def main() -> None:
        task = asyncio.create_task(show(Progress(Scenario()), lambda: 3.0, Console_(file=file, force_terminal=False)))
        await asyncio.wait_for(written.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop = asyncio.new_event_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())

    assert file.getvalue().splitlines()[0].startswith("0:03 of 1:00")
    assert "\x1b" not in file.getvalue()
