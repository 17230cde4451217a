"""What a load does to a replica for good: rows, times, how full it is; and the most that it carries within targets.

Steady state by Little's law: a request is a row for as many steps as it has output tokens, and a step computes the
prompts that arrive while it runs, so rows and step time are each other's fixed point. A step that
computes a prompt is longer than others by much, and TPOT is the mean over both. Prompts are served one after the other:
their wait is that of M/G/1 with Poisson arrivals (Pollaczek and Khinchine), its 99th percentile by an
exponential tail. Not a simulation: bursts, caches and priorities are the simulator's. Times are seconds.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from penstock.perf.planning.roofline import StepTimes

TAIL = 0.01
"""Part of the requests that may be above the percentile."""
DEVIATIONS = 2.326
"""Standard deviations above the mean beyond which that part of a normal distribution lies."""
_ROUNDS = 200


class Load(NamedTuple):
    """Requests of average size, all of a pool."""

    rate_rps: float
    prompt_tokens: float
    """Prompt tokens that are computed."""
    output_tokens: float
    cached_tokens: float = 0.0
    """Prompt tokens whose keys and values are found."""
    prompt_spread: float = 0.0
    """Standard deviation of the prompts' lengths as a part of their mean."""

    @property
    def context_tokens(self) -> float:
        """Tokens that a row attends to, half way through its output."""
        return self.prompt_tokens + self.cached_tokens + self.output_tokens / 2


class Bounds(NamedTuple):
    """What limits a replica, whatever its speed."""

    max_rows: int
    kv_tokens: int
    max_batched_tokens: int

    def rows_for(self, load: Load) -> float:
        return max(1.0, min(self.max_rows, self.kv_tokens / max(1.0, load.context_tokens)))


class Targets(NamedTuple):
    """Times that are promised; infinite: nothing is."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


class Steady(NamedTuple):
    """A replica under a load that it can carry for good."""

    rate_rps: float
    rows: float
    """Sequences that decode at once, a mean."""
    step_s: float
    """Mean time of a step, and so the time per output token."""
    decode_s: float
    """Time of the same step without prompts."""
    ttft_s: float
    """Mean time to the first token."""
    ttft_p99_s: float
    tpot_p99_s: float
    """Time of a step where rows, and prompts beside them, are as many as in one of a hundred moments: those under way
    are Poisson distributed (M/G/infinity)."""
    prefill_share: float
    """Part of the time that prompts take."""
    busy_share: float
    """Part of the time that it computes at all; 1 where a row is always there."""

    @property
    def tpot_s(self) -> float:
        return self.step_s

    def meets(self, targets: Targets) -> bool:
        """Whether the targets hold for 99 of 100 requests."""
        return self.ttft_p99_s <= targets.ttft_s and self.tpot_p99_s <= targets.tpot_s


def settle(times: StepTimes, load: Load, bounds: Bounds) -> Steady | None:
    """The steady state; None where there is none: the replica can't keep up."""
    if load.rate_rps <= 0:
        return None

    def next_step_s(step_s: float) -> float | None:
        """Time of a step, if those before it took `step_s`; None beyond the bounds."""
        rows = load.rate_rps * load.output_tokens * step_s
        return None if rows > most_rows else _mean_step_s(times, load, bounds, rows, step_s)

    most_rows, context = bounds.rows_for(load), load.context_tokens
    step_s = _fixed_point(next_step_s, times(rows=1, prefill_tokens=0, query_context=0, kv_tokens=context))
    if step_s is None:
        return None
    return _describe(times, load, bounds, load.rate_rps * load.output_tokens * step_s, step_s)


def _fixed_point(function: Callable[[float], float | None], begin: float) -> float | None:
    """The least fixed point of a function that rises, from below. Each round goes on along the line through the last
    two points, which does not go too far where the function is convex; where it did, along the function itself."""
    low, value = begin, function(begin)
    slope = 0.0
    for _ in range(_ROUNDS):
        if value is None:
            return None
        if abs(value - low) <= 1e-8 * value:
            return value
        guess = (value - slope * low) / (1 - slope) if slope < 1 else value
        found = function(guess)
        if found is None or found < guess:
            guess, found = value, function(value)
        if found is not None and guess > low:
            slope = max(0.0, (found - value) / (guess - low))
        low, value = guess, found
    return None


def _describe(times: StepTimes, load: Load, bounds: Bounds, rows: float, step_s: float) -> Steady | None:
    kv_tokens = max(1.0, rows) * load.context_tokens
    decode_s = times(rows=max(1.0, rows), prefill_tokens=0, query_context=0, kv_tokens=kv_tokens)
    own_s = prefill_s(times, load, bounds, rows)
    steps = max(1.0, load.prompt_tokens / max(1.0, bounds.max_batched_tokens - rows))
    added_s = max(0.0, own_s - steps * (decode_s if rows >= 1 else 0.0))
    use = load.rate_rps * added_s
    if use >= 1:
        return None
    wait_s = use * added_s * (1 + load.prompt_spread**2) / (2 * (1 - use))
    tail_s = max(0.0, wait_s / use * math.log(use / TAIL)) if use > TAIL else 0.0
    is_running = min(1.0, rows)
    first_s = is_running * step_s / 2
    busy = 1.0 if rows >= 1 else min(1.0, load.rate_rps * (own_s + load.output_tokens * decode_s))
    return Steady(
        load.rate_rps,
        rows,
        step_s,
        decode_s,
        first_s + wait_s + own_s,
        is_running * step_s + tail_s + own_s,
        _crowded_step_s(times, load, bounds, rows, step_s),
        use if rows < 1 else (step_s - decode_s) / step_s,
        busy,
    )


def _mean_step_s(times: StepTimes, load: Load, bounds: Bounds, rows: float, step_s: float) -> float | None:
    """Mean time of a step with `rows` rows. A prompt is computed in as few steps as hold it, so most steps have none;
    where prompts come more often than such steps end, each step has several. None: more tokens than a step holds.

    step_s: mean time of the steps before.
    """
    at_least, context = max(1.0, rows), load.context_tokens
    budget = max(1.0, bounds.max_batched_tokens - rows)
    pieces = math.ceil(load.prompt_tokens / budget) if load.prompt_tokens else 0
    decode_s = times(rows=at_least, prefill_tokens=0, query_context=0, kv_tokens=at_least * context)
    if not pieces:
        return decode_s
    rate, tokens = load.rate_rps * pieces, load.prompt_tokens / pieces
    before = load.cached_tokens + load.prompt_tokens / 2

    def piece_s(count: float) -> float:
        computed = count * tokens
        return times(
            rows=at_least, prefill_tokens=computed, query_context=computed * before, kv_tokens=at_least * context
        )

    one_s = piece_s(1.0)
    if rate * one_s < 1:
        return 1 / (rate + (1 - rate * one_s) / decode_s)
    count = max(1.0, rate * step_s)
    return None if count * tokens > budget else piece_s(count)


def _crowded_step_s(times: StepTimes, load: Load, bounds: Bounds, rows: float, step_s: float) -> float:
    """Mean time of steps with DEVIATIONS more rows and prompts than the mean of `rows`; infinite where no step holds
    them."""
    crowd = (rows + DEVIATIONS * math.sqrt(rows)) / rows
    most = min(float(bounds.max_rows), crowd * rows)
    found = _mean_step_s(times, load._replace(rate_rps=crowd * load.rate_rps), bounds, most, step_s)
    return math.inf if found is None else found


def prefill_s(times: StepTimes, load: Load, bounds: Bounds, rows: float) -> float:
    """Seconds of the steps that compute a prompt beside `rows` rows that decode, none where they are less than one."""
    rows = rows if rows >= 1 else 0.0
    budget = max(1.0, bounds.max_batched_tokens - rows)
    seconds, done = 0.0, 0.0
    while done < load.prompt_tokens:
        piece = min(budget, load.prompt_tokens - done)
        pairs = piece * (load.cached_tokens + done + piece / 2)
        seconds += times(rows=rows, prefill_tokens=piece, query_context=pairs, kv_tokens=rows * load.context_tokens)
        done += piece
    return seconds


def most_rps(times: StepTimes, load: Load, bounds: Bounds, targets: Targets) -> Steady | None:
    """The steady state at the highest rate of such requests that a replica carries within the targets; None: not even
    at a thousandth of what it could otherwise."""

    def found(rate: float) -> Steady | None:
        steady = settle(times, load._replace(rate_rps=rate), bounds)
        return steady if steady is not None and steady.meets(targets) else None

    alone_s = prefill_s(times, load, bounds, 0) + load.output_tokens * times(
        rows=1, prefill_tokens=0, query_context=0, kv_tokens=load.context_tokens
    )
    low = 1e-3 / alone_s
    best = found(low)
    if best is None:
        return None
    high = 2 * low
    while (steady := found(high)) is not None and high < 1e9:
        low, best, high = high, steady, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        if (steady := found(middle)) is None:
            high = middle
        else:
            low, best = middle, steady
    return best


class Alone(NamedTuple):
    """So many equal sequences that decode, and nothing else."""

    rows: int
    context_tokens: int
    tpot_s: float
    tokens_s: float


def decode_alone(times: StepTimes, rows: int, context_tokens: int) -> Alone:
    step_s = times(rows=rows, prefill_tokens=0, query_context=0, kv_tokens=rows * context_tokens)
    return Alone(rows, context_tokens, step_s, rows / step_s)
