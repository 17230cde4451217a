"""Why a pool's target is what it is, as the autoscaler last said it: numbers and reasons, no text of any tenant.

Travels with the targets (`scaling`), so whoever may read Redis can ask on any kind of platform: `penstock autoscale
explain` does. Unknown numbers are None, never a number that means unknown.
"""

import msgspec

KEPT_CHANGES = 50
"""Number of a pool's latest changes that travel with its explanation."""

KEPT_WINDOWS = 5
"""Number of windows of schedules, the next ones, that an explanation names."""


class Change(msgspec.Struct, frozen=True):
    """A decision that was to change a pool's target."""

    unix_s: float
    was: int
    target: int
    reason: str
    outcome: str
    """applied, refused (Serve's state had changed), failed or dry run."""


class ScheduledWindow(msgspec.Struct, frozen=True):
    """A window of a schedule that is not over. Unix seconds."""

    begin_s: float
    end_s: float
    floor_s: float
    """Time from which its floor holds."""
    least: int
    most: int | None


class ShortageExplanation(msgspec.Struct, frozen=True):
    """Replicas that the cluster does not place."""

    kind: str
    """unschedulable, quota or refused."""
    num_unplaced: int
    message: str
    """What the cluster says about it."""


class StartPhases(msgspec.Struct, frozen=True):
    """How long the phases of the latest replica's start took, seconds. None: not known, as where there are no pods."""

    schedule_s: float | None = None
    """Time from the pod's creation until it had a node."""
    image_s: float | None = None
    """Time from then until its container ran: image, volumes, what runs before."""
    weights_s: float | None = None
    """Time until the model was loaded; with vLLM the whole of its start."""
    warm_up_s: float | None = None
    """First steps, by which it knows its costs and has compiled what it needs."""


class PoolExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the latest decision about a pool rested on."""

    pool: str
    target: int
    """Number of replicas that the pool should have."""
    was: int
    """The target before that decision."""
    reason: str
    outcome: str
    """kept, or as of a `Change`."""
    is_dry_run: bool = False
    num_running: int
    """Replicas that Serve runs."""
    num_serving: int
    """Replicas to which gateways route."""
    num_starting: int
    num_stopping: int
    num_gateways: int
    """Gateways with a fresh report."""
    age_s: float | None
    """Seconds since the oldest report that was used; None: there is none."""
    num_queued: int
    """Requests that wait in gateways."""
    num_present: int
    """Sequences on replicas."""
    rate_rps: float | None = None
    """Arrivals a second over the window; None: not known yet."""
    prefill_tokens: float = 0.0
    """Prompt tokens of the average request that are computed."""
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    capacity_rps: float | None = None
    """Such requests a second that one replica takes for good; None: not known yet, or without a bound."""
    decoding: float = 0.0
    """Replicas' worth of sequences that decode, over the window."""
    demand: float | None = None
    """Replicas at full use: the larger of arrivals over capacity, and `decoding`; None: not known yet."""
    needed: int | None = None
    """Replicas for that demand, filled to `target_utilisation`."""
    standby: int = 0
    """Replicas beyond those, ready for a burst."""
    target_utilisation: float
    """Share that is planned for: less than the setting where prompts come in gusts."""
    predicted_wait_s: float | None
    """Seconds to the first token of a request that comes now; None: nobody can say."""
    ttft_target_s: float
    least: int
    """Fewest replicas that the pool may have now."""
    least_reason: str
    most: int
    most_reason: str
    burst_floor: int = 0
    """Replicas kept for a burst like the worst that is remembered; 0: none."""
    enough: int | None = None
    """The most replicas that were enough within the delay."""
    enough_ago_s: float | None = None
    """Seconds since they were last needed."""
    scale_down_delay_s: float
    start_s: float
    """Seconds that the next start is expected to take."""
    num_starts: int
    """Number of measured starts on which that rests, beside the configured first guess."""
    start_phases: StartPhases = StartPhases()
    idle_s: float | None = None
    """Seconds without a request after which the pool goes to zero; None: it does not."""
    windows: tuple[ScheduledWindow, ...] = ()
    """Windows of schedules that are not over, by their beginning."""
    shortage: ShortageExplanation | None = None
    """Replicas without a place; None: there are none, as far as is known."""
    retry_s: float | None = None
    """Seconds until more than have a place are tried again; None: nothing holds them back."""
    changes: tuple[Change, ...] = ()
    """Latest changes since the autoscaler's start, the oldest first."""
