"""The metrics of targets: each request that is over, by model, class, tier and outcome.

Not the judgement (`outcome`) nor the arithmetic of windows (`burn_rate`). Lines of batches are not measured: nobody
waits for them. Invariants: a request counts once at most; a label is a served model's name, a class, a tier or one of
the busiest tenants' ids.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from penstock.base.metrics import Metrics
from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.goodput.burn_rate import WINDOWS_S, BurnRates
from penstock.router.completions.goodput.outcome import Outcome, judge, time_request
from penstock.router.completions.goodput.tenant_counts import TenantCounts
from penstock.router.models.request_targets import RequestTargets
from penstock.router.models.served_model import ServedModel
from penstock.wire.accounts import TargetReceipt
from penstock.wire.targets import known_class

NONE = "none"
"""Label of a request's model or tier where it was refused before they were known."""


class MeasuredRequest(NamedTuple):
    """What is known of a request beside its sequences."""

    tenant: str
    service_class: str
    model: str | None
    """Label of the served model; None: it was refused before it was known."""
    began_s: float
    """Time of its arrival, monotonic, seconds."""


class _Series:
    """The metrics of one model, class and tier."""

    def __init__(
        self, metrics: Metrics, labels: tuple[str, str, str], objective: float, clock: Callable[[], float]
    ) -> None:
        self.requests = {outcome: metrics.slo_requests.labels(*labels, outcome.value) for outcome in Outcome}
        self.tokens = {outcome: metrics.slo_tokens.labels(*labels, outcome.value) for outcome in Outcome}
        self.prediction_ratio = metrics.ttft_prediction_ratio.labels(*labels)
        self.burn_rates = BurnRates(objective)
        for window in WINDOWS_S:
            gauge = metrics.slo_burn_rate.labels(*labels, window)
            gauge.set_function(partial(_read, self.burn_rates, window, clock))  # when somebody scrapes


def _read(rates: BurnRates, window: str, clock: Callable[[], float]) -> float:
    return rates.rate(window, clock())


class Goodput:
    """Measures requests by the targets of their class. clock: monotonic, seconds."""

    def __init__(
        self,
        metrics: Metrics,
        targets: RequestTargets,
        models: Mapping[str, ServedModel],
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._notes = metrics.notes
        metrics.slo_objective.set(targets.objective)
        self._targets = targets
        self._models = models
        self._clock = clock
        self._series: dict[tuple[str, str, str], _Series] = {}
        self._tenants = TenantCounts(metrics.tenant_slo_requests)

    def record(
        self, asked: MeasuredRequest, completion: Completion | None, error: BaseException | None, *, is_admitted: bool
    ) -> TargetReceipt:
        """Count a request that is over; to be called once for each. completion: None where it has no sequences yet.
        error, is_admitted: those of `judge`. Returns what its receipt says of its target."""
        now = self._clock()
        service_class = known_class(asked.service_class)
        target = self._targets.find(asked.model, service_class)
        timing = time_request(completion, asked.began_s, now)
        outcome = judge(target, timing, error, is_admitted=is_admitted)
        if outcome is not None:
            series = self._series_of(asked.model or NONE, service_class, self._tier_of(asked.model, completion))
            self._notes.count(series.requests[outcome])
            series.burn_rates.add(now, is_missed=outcome is not Outcome.MET)
            if completion is not None:
                num_tokens = sum([choice.num_tokens for prompt in completion.prompts for choice in prompt])
                self._notes.count(series.tokens[outcome], num_tokens)
            self._tenants.record(asked.tenant, outcome, now)
        if completion is not None:
            self._record_predictions(asked.model or NONE, service_class, completion)
        return TargetReceipt(
            service_class=service_class,
            ttft_target_s=target.ttft_s,
            tpot_target_s=target.tpot_s,
            ttft_s=timing.ttft_s,
            tpot_s=timing.tpot_s,
            outcome=None if outcome is None else outcome.value,
        )

    def _record_predictions(self, model: str, service_class: str, completion: Completion) -> None:
        for prompt in completion.prompts:
            for choice in prompt:
                ratio = _prediction_ratio(choice)
                if ratio is not None and choice.receipt is not None:
                    series = self._series_of(model, service_class, choice.receipt.tier)
                    self._notes.observe(series.prediction_ratio, ratio)

    def _series_of(self, model: str, service_class: str, tier: str) -> _Series:
        labels = (model, service_class, tier)
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = _Series(self._metrics, labels, self._targets.objective, self._clock)
        return found

    def _tier_of(self, model: str | None, completion: Completion | None) -> str:
        """The tier that answered; where none did the first one that was to."""
        choices = [] if completion is None else [choice for prompt in completion.prompts for choice in prompt]
        answered = next((choice.receipt.tier for choice in choices if choice.receipt is not None), None)
        if answered:
            return answered
        routes = choices[0].generation.routes if choices else ()
        if not routes and model is not None:
            routes = self._models[model].routes
        return routes[0].tier if routes else NONE


def _prediction_ratio(choice: Choice) -> float | None:
    """Time to first token since the sequence was placed, as a part of what was predicted then; a token that was held
    back came when the gateway had it. Returns None where nothing was predicted, no token came, or the sequence was
    placed again after its first one."""
    receipt, first_s = choice.receipt, choice.first_token_s
    if choice.trial is not None and choice.trial.first_token_s is not None:
        first_s = choice.trial.first_token_s
    if receipt is None or receipt.placed_s is None or first_s is None or not receipt.predicted_ttft_s:
        return None
    real_s = first_s - receipt.placed_s
    return real_s / receipt.predicted_ttft_s if real_s >= 0 else None
