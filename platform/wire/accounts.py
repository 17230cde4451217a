"""What a tenant reads of its own requests: receipts, which say where, why and at what price each was answered, and
usage with its budget. Penstock's own pages, no part of OpenAI's API; /openapi.json has them too.

Not what is kept of them (`router.completions.receipts`, `tenancy.usage`). Money is in units, as configured.
"""

from typing import Literal

import msgspec

from penstock.wire.frames import Stairs


class ConsideredRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A place where a request might have been answered, as it looked when one was chosen."""

    tier: str
    places: list[str]
    """Pools, or a provider."""
    predicted_ttft_s: float | None
    obstacle: str | None
    predicted_cost: float | None = None
    """Predicted cost of the answer there, in the currency of the prices; null: the place has no price, or the tenant's
    tier policy does not go by it."""
    predicted_tpot_s: float | None = None
    """Predicted time per further token; null: it can't be predicted, or the policy does not go by it."""


class ComparedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as it was when one was chosen: all that its cost was computed from."""

    replica: str
    num_running: int
    """Sequences that decode there."""
    num_waiting: int
    """Sequences there, or on their way, that don't decode yet."""
    prefill_tokens: int
    """Prompt tokens of theirs that are not computed yet."""
    kv_tokens: int
    """Context tokens of the sequences that decode."""
    num_sampled: int
    """Sequences that decode and whose tokens take more than the largest logit."""
    max_batched_tokens: int
    """Most tokens of a step."""
    num_inflight: int
    """Sequences of the deciding gateway there."""
    cached_tokens: int
    """Leading tokens of the request that it held."""
    costs: dict[str, float]
    """Coefficients of the performance model, by name; of the pool's mean but for what this replica differs beyond
    noise."""
    stairs: Stairs | None
    """What recorded steps add to those; null: it records none."""
    start_wait_s: float | None = None
    """Time until the request could begin there: a row is free, and its adapter loaded. null: a version with other costs
    decided."""


class DecisionBasis(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice of a replica rested on, enough to make it again: `penstock receipt` does."""

    num_tokens: int
    """Tokens of the prompt, and of the answer so far."""
    expected_output_tokens: float
    scored_tokens: int
    """Tokens of the prompt whose log probabilities were asked for."""
    num_candidates: int
    """Replicas that could take the request."""
    num_tied: int
    """Candidates that cost as little as the cheapest, as far as can be told."""
    drawn: list[str] | None
    """The two drawn of those; null: there was one."""
    compared: list[ComparedReplica]
    """The candidates; of many the chosen one, those drawn, the cheapest, and those that hold most and least of the
    prompt."""
    mean_backlog_s: float | None = None
    """Seconds of prefill outstanding at a candidate, the mean of all of them: the delays of others count the more in
    the costs, the longer it is. null: a version with other costs decided."""


class EdgeAttemptReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at the edge of which nothing was shown."""

    pool: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: float | None = None
    """Cost at the prices of the moment; null: the pool has no price."""


class EscalationReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the answer's beginning at an edge pool that sends on what its model is unsure of."""

    outcome: Literal["kept", "escalated", "not_allowed", "no_cloud", "constraint"]
    escalated: bool
    """Whether another tier answered instead."""
    reason: str | None = None
    """Why no other tier did, where one was to; null: none was, or it did."""
    mean_logprob: float | None
    """Mean natural logarithm of the probabilities of the tokens that were held back; null: none was judged."""
    min_mean_logprob: float
    """The bound below which a request is sent on."""
    held_tokens: int
    """Tokens that were held back."""
    held_s: float
    """Time from the first of them to the decision."""
    edge: EdgeAttemptReceipt | None = None
    """The attempt at the edge, where the answer is another's: it counts as usage too. null: the answer is its own."""


class ChoiceReceipt(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tier: str
    tier_reason: str
    stay: str | None = None
    """Tier on which the request asked to stay; null: it did not."""
    pool: str
    """Name of the pool, or of the provider."""
    replica: str
    reason: str
    """Reason for that replica of the tier."""
    predicted_ttft_s: float | None
    predicted_cost: float | None = None
    """Predicted cost in the currency of the prices; null: as of `considered`."""
    predicted_cached_tokens: int
    cached_tokens: int
    queued_s: float
    attempts: int
    scores: dict[str, float]
    """Predicted time to first token, by replica and provider."""
    basis: DecisionBasis | None
    """What the choice of the replica rested on; null: a provider answered."""
    considered: list[ConsideredRoute]
    """Routes in the order of the tenant's tier policy, as far as they were examined; empty where there was only one."""
    step_s: float = 0.0
    """Seconds of steps that were this sequence's share, on every replica that computed it."""
    cost: float | None = None
    """Cost at the prices of the moment; null: a place that computed it has no price."""
    charge: float | None = None
    """Charge by the tariff of the moment; null: the model has none."""
    escalation: EscalationReceipt | None = None
    """null: no edge pool that escalates had the choice, or the prompt's first choice decided for it."""


class PlacePrices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of a pool or a provider, all in one currency."""

    place: str
    """Name of the pool, or of the provider."""
    per_hour: float | None = None
    """Price of an hour of a replica of the pool."""
    input: float | None = None
    """Price of a million prompt tokens of the provider."""
    cached: float | None = None
    """Price of a million prompt tokens of which the provider says that they were in its cache."""
    output: float | None = None
    """Price of a million output tokens of the provider."""


class TariffPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Charges per million tokens."""

    input: float
    cached: float
    output: float


class RequestPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices at the moment of a request."""

    places: list[PlacePrices] = []
    """Prices of the places that computed anything of it."""
    tariff: TariffPrices | None = None
    """Tariff of the model, or of the adapter; null: there is none."""


class TargetReceipt(msgspec.Struct, frozen=True, kw_only=True, rename={"service_class": "class"}):
    """The targets of a request's class, and whether it met them, as its gateway saw it. Seconds."""

    service_class: str
    ttft_target_s: float | None
    """Longest time to first token, from the request's arrival; null: the class has no such target."""
    tpot_target_s: float | None
    """Longest mean time per output token after the first; null: the class has no such target."""
    ttft_s: float | None
    """Time to the first token of any choice; null: there was none."""
    tpot_s: float | None
    """Mean time per output token after the first, of the choice where it was longest; null: none had two tokens, or all
    came at once."""
    outcome: Literal["met", "ttft", "tpot", "failed"] | None
    """What the request counts as: met, out of the target that is named, or failed; null: nothing, as its client
    left."""


class RequestReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was answered where it was; of sequences placed again, the last decision."""

    id: str
    object: Literal["receipt"] = "receipt"
    created: int
    model: str
    choices: list[ChoiceReceipt]
    cost: float | None = None
    """Cost of all choices together; null: no place that computed one of them has a price."""
    charge: float | None = None
    """Charge of the request; null: the model has no tariff."""
    prices: RequestPrices | None = None
    target: TargetReceipt | None = None
    """Whether the request met the targets of its class; null: it was not measured."""


class DayUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant used of a model on one day."""

    day: str
    """Date such as 2026-11-21, UTC."""
    model: str
    adapter: str | None
    requests: int
    """Requests that reached a replica or provider."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found in a cache."""
    completion_tokens: int
    cost: float = 0.0
    """Cost at the prices of the moments, for as much as was computed at places that have a price."""
    charge: float = 0.0
    """Charge by the tariffs of the moments."""


class TenantBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's budget in this calendar month, UTC."""

    month: str
    """Name such as 2026-11."""
    amount: float
    spent: float
    """Sum of charges of the month, and of what running requests have reserved."""
    left: float
    resets_at: int
    """Unix time at which the next month begins, seconds."""


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["usage"] = "usage"
    tenant: str
    data: list[DayUsage]
    """Usage of the last 31 days, oldest first."""
    budget: TenantBudget | None = None
    """Null: the tenant has none."""
