"""A pool's explanation in plain sentences: why its target is what it is, and what would change it. Pure text."""

from collections.abc import Iterator
from datetime import UTC, datetime

from penstock.wire.explanation import PoolExplanation

REASONS = {
    "steady": "what there is, is right",
    "demand": "there is more work than fewer replicas should carry",
    "deadline": "first tokens would come too late with fewer",
    "starting": "more are needed and on their way; what was asked for is not ready yet, or has had no time to help",
    "full": "more are needed than it may have",
    "idle": "fewer have been enough for the whole delay",
    "cooling": "fewer would be enough, but not for long enough yet",
    "floor": "fewer would be enough, but not for a burst like the worst that is remembered",
    "bounds": "the target lay outside of autoscale.min_replicas and autoscale.max_replicas",
    "arrival": "a request came while it had no replica",
    "unused": "nobody has asked for long enough, and autoscale.min_replicas is 0",
    "schedule": "the bounds of a schedule's window say so",
    "budget": "pools that come first have the rest of the budget of GPUs",
    "shortage": "the cluster has no room for more",
    "restored": "the autoscaler before this one had decided on it, and Serve has less",
    "stale": "no gateway has reported lately, so nothing changes",
    "unknown": "the load, or how quick replicas are, is not known for long enough; only a deadline changes anything",
}
"""What each reason means, as the end of a sentence; docs/autoscaling.md has the same."""
LIMITS = {
    "bounds": "its configuration",
    "schedule": "a schedule",
    "budget": "the budget of GPUs",
    "shortage": "what the cluster has room for",
    "restored": "what the autoscaler before this one had decided on",
}
"""What may set the least or the most a pool may have, by the reason that it gives; the rest stands for itself."""


def tell(found: PoolExplanation) -> list[str]:
    """The sentences, the most important first."""
    return [*_target(found), *_replicas(found), *_need(found), *_range(found), *_held(found), *_outlook(found)]


def _target(found: PoolExplanation) -> Iterator[str]:
    change = "" if found.was == found.target else f" (it was {found.was})"
    yield f"The target is {found.target}{change}: {REASONS.get(found.reason, found.reason)}."
    if found.outcome in ("failed", "refused"):
        yield f"The change was {found.outcome} by Serve, and is tried again at the next turn."
    if found.is_dry_run:
        yield "This is a dry run: nothing is changed."


def _replicas(found: PoolExplanation) -> Iterator[str]:
    if found.num_starting or found.num_stopping:
        yield f"Of its replicas {found.num_starting} are starting and {found.num_stopping} are stopping."
    if found.num_running != found.num_serving:
        yield f"Serve runs {found.num_running} replicas, and gateways know {found.num_serving}."
    if found.age_s is None:
        yield "No gateway reports: the load is not known."
    elif found.reason == "stale":
        yield f"The latest reports are {found.age_s:.1f} s old."


def _need(found: PoolExplanation) -> Iterator[str]:
    if found.rate_rps is not None:
        yield (
            f"There come {found.rate_rps:.2f} requests a second, with {found.prefill_tokens:.0f} prompt tokens to "
            f"compute, {found.cached_tokens:.0f} in caches and {found.output_tokens:.0f} of output on average; "
            f"{found.num_queued} wait in gateways and {found.num_present} are on replicas."
        )
    if found.demand is None or found.needed is None:
        return
    if found.capacity_rps is not None and found.rate_rps is not None:
        by_rate = found.rate_rps / found.capacity_rps
        which = "arrivals" if by_rate >= found.decoding else "the sequences that decode"
        yield (
            f"One replica takes {found.capacity_rps:.2f} of them a second, so arrivals would fill {by_rate:.2f}"
            f" replicas and the sequences that decode fill {found.decoding:.2f}: {which} decide, and at "
            f"{found.target_utilisation:.0%} use that needs {found.needed}."
        )
    if found.standby:
        yield f"Beyond that, {found.standby} stand by for a burst that is quicker than a start."
    if found.predicted_wait_s is not None:
        verdict = "too late" if found.predicted_wait_s > found.ttft_target_s else "in time"
        yield (
            f"The first token of a request that comes now is expected {found.predicted_wait_s:.2f} s later than on an "
            f"idle replica, which is {verdict} (ttft_target_s is {found.ttft_target_s:g})."
        )


def _range(found: PoolExplanation) -> Iterator[str]:
    least, most = (LIMITS.get(reason, reason) for reason in (found.least_reason, found.most_reason))
    yield f"It may have {found.least} (by {least}) to {found.most} (by {most})."
    for window in found.windows:
        most = "" if window.most is None else f" and at most {window.most}"
        yield (
            f"A schedule has at least {window.least}{most} from {_moment(window.begin_s)} to {_moment(window.end_s)}; "
            f"they are asked for from {_moment(window.floor_s)} on."
        )
    if found.shortage is not None:
        yield (
            f"{found.shortage.num_unplaced} replicas have no place ({found.shortage.kind}); the cluster says: "
            f"{found.shortage.message}"
        )
    if found.retry_s is not None:
        yield f"More than have a place are tried again in {found.retry_s:.0f} s."
    if found.burst_floor:
        yield f"A burst like the worst that is remembered needs {found.burst_floor}; the pool keeps that many."


def _held(found: PoolExplanation) -> Iterator[str]:
    if found.enough is None or found.enough_ago_s is None or found.needed is None:
        return
    if found.needed < found.target and found.reason == "cooling":
        if found.enough < found.target:
            yield (
                f"{found.enough} were needed {found.enough_ago_s:.0f} s ago, and no more within the delay; the others "
                "go once the load has been known for as long, and three start-up times after first tokens were last "
                "about to be late."
            )
            return
        left_s = max(0.0, found.scale_down_delay_s - found.enough_ago_s)
        yield (
            f"{found.enough} were needed {found.enough_ago_s:.0f} s ago; fewer must be enough for "
            f"{found.scale_down_delay_s:g} s, so it can go down in {left_s:.0f} s."
        )


def _outlook(found: PoolExplanation) -> Iterator[str]:
    if found.target < found.most and found.target and found.capacity_rps is not None:
        most_rps = max(1, found.target - found.standby) * found.target_utilisation * found.capacity_rps
        yield (
            f"It goes up when more than {most_rps:.2f} such requests a second come, or when first tokens would be more "
            f"than {found.ttft_target_s:g} s late; a start takes about {found.start_s:.0f} s "
            f"({f'by {found.num_starts} starts' if found.num_starts else 'as configured'})."
        )
    yield from _phases(found)
    if found.target > found.least and found.reason != "cooling":
        yield f"It goes down once fewer have been enough for {found.scale_down_delay_s:g} s."
    if found.idle_s is not None and found.target:
        yield f"It goes to zero when nobody has asked for {found.idle_s:g} s."
    if not found.target:
        yield "The first request starts a replica."


def _phases(found: PoolExplanation) -> Iterator[str]:
    phases = found.start_phases
    parts = [
        (phases.schedule_s, "to get a node"),
        (phases.image_s, "for image and container"),
        (phases.weights_s, "to load the model"),
        (phases.warm_up_s, "to warm up"),
    ]
    told = [f"{seconds:.1f} s {what}" for seconds, what in parts if seconds is not None]
    if told:
        yield f"The latest start took {', '.join(told)}; the rest of its time is Ray's and the processes' own."


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
