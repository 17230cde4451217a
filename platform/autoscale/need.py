"""What a pool needs by the performance model: replicas at full use for what arrives, and for what waits. Pure.

Demand is token work: arrivals a second over what one replica takes for good. Beside it stand the sequences that decode,
over the rows of a full replica, and never more than one replica for what one replica holds: where prompts bound a pool,
credits fill replicas with sequences that have not begun, and rows that wait are no rows that need a replica. They are
a backlog, work to be done by a time: sequences whose prompts are not computed, in gateways and in replicas.
"""

import math
from typing import NamedTuple

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import Sample, measure_rates
from penstock.autoscale.observation import Observation
from penstock.perf.capacity import Bounds, Shape, capacity_rps, rows_at
from penstock.perf.model import Work, predict_ttft_s
from penstock.wire.frames import Load, StepCosts


class Capacity(NamedTuple):
    """A replica that is full for good."""

    rps: float
    """Requests a second; infinite where all costs are zero."""
    rows: float
    """Sequences that it then has."""


class Need(NamedTuple):
    """What a pool needs, in replicas at full use."""

    demand: float = 0.0
    latest_demand: float = 0.0
    """Demand by the arrivals of the last moments, which is less sure."""
    capacity_rps: float = math.inf
    backlog_s: float = 0.0
    """Seconds for which what waits would keep one replica busy."""
    gust: float = 0.0
    """Replicas for what comes beyond the mean, so much as the target for the first token asks for (`gusts`)."""
    wait_s: float = 0.0
    """Seconds to the first token of a request that comes now, beyond what it takes alone."""


def measure_capacity(
    settings: AutoscaleConfig, costs: StepCosts, shape: Shape, observation: Observation, max_rows: int
) -> Capacity:
    """What one replica takes of requests of that shape. max_rows: sequences that a replica runs at once."""
    kv_tokens = min(
        (replica.load.total_blocks * replica.block_size for replica in observation.replicas), default=math.inf
    )
    rps = capacity_rps(costs, shape, Bounds(max_rows, kv_tokens, settings.tpot_target_s))
    return Capacity(rps, max(1.0, rows_at(costs, shape, rps)) if math.isfinite(rps) else math.inf)


def count_used(observation: Observation, shape: Shape, capacity: Capacity) -> float:
    """Replicas' worth of sequences that decode, each replica up to one."""
    return sum(min(1.0, _num_decoding(replica.load, shape) / capacity.rows) for replica in observation.replicas)


def estimate_need(
    costs: StepCosts,
    shape: Shape,
    capacity: Capacity,
    samples: tuple[Sample, ...],
    observation: Observation,
    gust: float,
    recent_s: float,
) -> Need:
    """The need of a pool whose samples span the window. recent_s: seconds of the latest arrivals."""
    if math.isinf(capacity.rps):
        return Need()
    rates = measure_rates(samples, recent_s)
    used = sum(sample.used for sample in samples) / len(samples)
    demand = max(rates.rate / capacity.rps, used)
    backlog_s = _count_backlog(observation, shape) / capacity.rps
    return Need(
        demand,
        max(demand, rates.latest_rate / capacity.rps),
        capacity.rps,
        backlog_s,
        gust,
        _predict_wait_s(costs, shape, observation, capacity),
    )


def prompt_token_s(costs: StepCosts, shape: Shape) -> float:
    """Seconds of steps that one prompt token of the average request takes, with what it reads."""
    return costs.prefill_token_s + costs.attention_s * (shape.cached_tokens + shape.prefill_tokens / 2)


def _num_unbegun(load: Load, shape: Shape) -> float:
    """Sequences on a replica whose prompts are not computed, by the tokens that are missing."""
    by_tokens = load.prefill_tokens_outstanding / max(1.0, shape.prefill_tokens)
    return max(load.num_waiting, min(by_tokens, load.num_running + load.num_waiting))


def _num_decoding(load: Load, shape: Shape) -> float:
    return load.num_running + load.num_waiting - _num_unbegun(load, shape)


def _count_backlog(observation: Observation, shape: Shape) -> float:
    """Requests that wait for their first token."""
    return observation.num_queued + sum(_num_unbegun(replica.load, shape) for replica in observation.replicas)


def _predict_wait_s(costs: StepCosts, shape: Shape, observation: Observation, capacity: Capacity) -> float:
    """The wait behind the queue at the pace of full replicas, then on the least busy one, seconds."""
    if not observation.num_serving:
        return math.inf if observation.num_queued else 0.0
    loads = [replica.load for replica in observation.replicas if not replica.load.is_draining]
    prefill, cached = round(shape.prefill_tokens), round(shape.cached_tokens)

    def ttft_s(work: Work, max_batched_tokens: int) -> float:
        return predict_ttft_s(costs, work, prefill, cached, max_batched_tokens)

    works: dict[int, list[Work]] = {}
    for load in loads:
        works.setdefault(load.max_batched_tokens, []).append(_work_of(load))
    least_s = min(
        min(ttft_s(work, tokens) for work in _least(found)) - ttft_s(Work(), tokens) for tokens, found in works.items()
    )
    queue_s = observation.num_waiting / (observation.num_serving * capacity.rps)
    return max(observation.oldest_wait_s, queue_s) + max(0.0, least_s)


def _least(works: list[Work]) -> list[Work]:
    """The works that no other one is below in everything: one of them has the soonest first token."""
    least: list[Work] = []
    for work in sorted(set(works)):
        running, waiting, prefill, kv_tokens, sampled = work
        if not any(
            known[0] <= running
            and known[1] <= waiting
            and known[2] <= prefill
            and known[3] <= kv_tokens
            and known[4] <= sampled
            for known in least
        ):
            least.append(work)
    return least


def _work_of(load: Load) -> Work:
    return Work(load.num_running, 0, load.prefill_tokens_outstanding, load.kv_tokens, load.num_sampled)
