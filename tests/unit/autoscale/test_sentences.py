"""What an explanation says in words: each fact once, where it holds, and nowhere else."""

from pathlib import Path

import pytest
from msgspec import structs

from penstock.autoscale.policy import Reason
from penstock.autoscale.sentences import REASONS, tell
from penstock.wire.explanation import PoolExplanation, ScheduledWindow, ShortageExplanation, StartPhases

FOUND = PoolExplanation(
    pool="a",
    target=4,
    was=4,
    reason="cooling",
    outcome="kept",
    num_running=4,
    num_serving=4,
    num_starting=0,
    num_stopping=0,
    num_gateways=1,
    age_s=0.2,
    num_queued=7,
    num_present=9,
    rate_rps=3.0,
    prefill_tokens=200.0,
    output_tokens=20.0,
    capacity_rps=2.0,
    decoding=1.0,
    demand=1.5,
    needed=3,
    target_utilisation=0.5,
    predicted_wait_s=0.25,
    ttft_target_s=1.0,
    least=1,
    least_reason="bounds",
    most=8,
    most_reason="bounds",
    enough=4,
    enough_ago_s=30.0,
    scale_down_delay_s=60.0,
    start_s=40.0,
    num_starts=3,
)


def told(**changes: object) -> str:
    return "\n".join(tell(structs.replace(FOUND, **changes)))


def test_demand_the_bound_that_decides_and_the_delay_are_told() -> None:
    text = told()

    assert "The target is 4: fewer would be enough, but not for long enough yet." in text
    assert "3.00 requests a second, with 200 prompt tokens to compute" in text
    assert "arrivals would fill 1.50 replicas and the sequences that decode fill 1.00: arrivals decide" in text
    assert "at 50% use that needs 3" in text
    assert "it can go down in 30 s" in text
    assert "more than 4.00 such requests a second" in text


def test_what_only_a_rush_asked_for_is_not_said_to_stay_for_the_delay() -> None:
    text = told(target=9)

    assert "4 were needed 30 s ago, and no more within the delay" in text
    assert "can go down in" not in text


def test_sequences_that_decode_are_named_where_they_decide() -> None:
    assert "the sequences that decode decide" in told(decoding=2.5, demand=2.5)


def test_a_wait_above_the_target_is_too_late() -> None:
    assert "which is in time" in told()
    assert "which is too late" in told(predicted_wait_s=1.5)


def test_replicas_on_their_way_and_burst_floors_are_told_where_there_are_some() -> None:
    assert "starting and" not in told()
    assert "2 are starting and 1 are stopping" in told(num_starting=2, num_stopping=1)
    assert "A burst like the worst" not in told()
    assert "A burst like the worst that is remembered needs 3" in told(burst_floor=3)


def test_the_phases_of_a_start_are_told_as_far_as_they_are_known() -> None:
    assert "The latest start took" not in told()
    assert "The latest start took 12.0 s to load the model, 3.5 s to warm up;" in told(
        start_phases=StartPhases(weights_s=12.0, warm_up_s=3.5)
    )
    assert "took 40.0 s to get a node, 90.0 s for image" in told(start_phases=StartPhases(40.0, 90.0))


def test_standbys_windows_and_shortages_are_told_where_there_are_some() -> None:
    window = ScheduledWindow(1000.0, 2000.0, 940.0, 3, 5)
    short = ShortageExplanation("quota", 2, "exceeded quota: gpus")

    assert "stand by" not in told()
    assert "Beyond that, 1 stand by" in told(standby=1)
    assert "at least 3 and at most 5 from 1970-01-01 00:16:40 UTC to 1970-01-01 00:33:20 UTC" in told(windows=(window,))
    assert "2 replicas have no place (quota); the cluster says: exceeded quota: gpus" in told(shortage=short)
    assert "tried again in 30 s" in told(retry_s=30.0)
    assert "to 5 (by the budget of GPUs)" in told(most=5, most_reason="budget")


def test_stale_reports_and_none_are_told() -> None:
    blind = {"capacity_rps": None, "demand": None, "needed": None, "predicted_wait_s": None, "rate_rps": None}

    assert "The latest reports are 7.0 s old." in told(reason="stale", age_s=7.0, **blind)
    assert "No gateway reports" in told(reason="stale", age_s=None, **blind)


def test_a_pool_that_may_go_to_zero_says_when() -> None:
    assert "to zero when nobody has asked for 90 s" in told(idle_s=90.0, least=0)
    assert "The first request starts a replica." in told(idle_s=90.0, least=0, target=0, reason="unused")


def test_what_was_not_done_is_told() -> None:
    assert "The change was failed by Serve" in told(was=3, outcome="failed")
    assert "dry run" in told(is_dry_run=True)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_words_here_and_in_the_documentation(reason: Reason) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "autoscaling.md").read_text(encoding="utf-8")

    assert reason.value in REASONS
    assert f"| `{reason.value}` |" in page
