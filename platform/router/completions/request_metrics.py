"""Metrics of requests: a few notes when a request is over, none while it streams.

Invariant: a label is a served model's name or a constant, never what a caller sent.
"""

from collections.abc import Iterable

from penstock.base.metrics import Metrics
from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.goodput.outcome import tpot_of
from penstock.wire.unread import IgnoredField

NO_MODEL = "none"
"""Label of requests that failed before their model was known."""
CLIENT_GONE = "499"
"""Code of requests whose client hung up before the status was out."""
FIRST_CODES = ("200", "400", "500", "502", "503", "504")
"""Codes whose series are there from the beginning, at 0: Prometheus sees no increase in a series that begins at 1, and
alerts are of the codes from 500 on."""


class ModelMetrics:
    """The metrics of one model's requests, their labels looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._notes = metrics.notes
        self._codes = {code: metrics.requests.labels(model, code) for code in FIRST_CODES}
        self._request_s = metrics.request_s.labels(model)
        self._ttft_s = metrics.ttft_s.labels(model)
        self._tpot_s = metrics.tpot_s.labels(model)
        self._queue_s = metrics.queue_s.labels(model)
        self._prompt_tokens = metrics.tokens.labels(model, "prompt")
        self._output_tokens = metrics.tokens.labels(model, "output")
        self._lookup_tokens = metrics.prefix_lookup_tokens.labels(model)
        self._hit_tokens = metrics.prefix_hit_tokens.labels(model)
        self._predicted_tokens = metrics.prefix_predicted_tokens.labels(model)
        self._true_tokens = metrics.prefix_true_tokens.labels(model)
        self._disconnects = metrics.client_disconnects.labels(model)

    def record_response(self, code: str, seconds: float) -> None:
        """One request that is over. code: HTTP status, or CLIENT_GONE."""
        counter = self._codes.get(code)
        if counter is None:
            counter = self._codes[code] = self._metrics.requests.labels(self._model, code)
        self._notes.count(counter)
        self._notes.observe(self._request_s, seconds)

    def record_disconnect(self) -> None:
        self._disconnects.inc()

    def record_completion(self, completion: Completion, began_s: float | None) -> None:
        """Times and tokens of a request's sequences, also when the request was cut off. began_s: on the clock of
        `completion`; None: a line of a batch, for which nobody waits."""
        choices = [choice for prompt in completion.prompts for choice in prompt]
        firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
        if firsts and began_s is not None:
            self._notes.observe(self._ttft_s, min(firsts) - began_s)
        for choice in choices:
            self._record_sequence(choice, is_awaited=began_s is not None)
            if choice.trial is not None and choice.trial.outcome is not None:
                self._metrics.escalations.labels(self._model, choice.trial.outcome.value).inc()
        if all(choice.is_finished for choice in choices):
            usage = completion.usage()
            self._notes.count(self._prompt_tokens, usage.prompt_tokens)
            self._notes.count(self._output_tokens, usage.completion_tokens)

    def _record_sequence(self, choice: Choice, *, is_awaited: bool) -> None:
        receipt = choice.receipt
        if receipt is None or choice.first_token_s is None:
            return
        notes = self._notes
        if is_awaited:
            notes.observe(self._queue_s, receipt.queued_s)
        if not receipt.is_provided:
            own = receipt.num_prompt_tokens
            notes.count(self._lookup_tokens, choice.generation.num_prompt_tokens if own is None else own)
        if receipt.cached_tokens:
            notes.count(self._hit_tokens, receipt.cached_tokens)
        if receipt.predicted_cached_tokens:
            notes.count(self._predicted_tokens, receipt.predicted_cached_tokens)
            notes.count(self._true_tokens, min(receipt.predicted_cached_tokens, receipt.cached_tokens))
        tpot_s = tpot_of(choice)
        if tpot_s is not None:
            notes.observe(self._tpot_s, tpot_s)


class RequestMetrics:
    """The metrics of all requests, by model."""

    def __init__(self, metrics: Metrics, models: Iterable[str]) -> None:
        self._ignored_fields = metrics.ignored_fields
        self._none = ModelMetrics(metrics, NO_MODEL)
        self._models = {model: ModelMetrics(metrics, model) for model in models}

    def for_model(self, model: str | None) -> ModelMetrics:
        """Metrics of one model's requests. model: label of a served model, or None if the request failed before its
        model was known."""
        return self._none if model is None else self._models[model]

    def record_ignored(self, ignored: Iterable[IgnoredField]) -> None:
        """Fields of one request that change nothing."""
        for field in ignored:
            self._ignored_fields.labels(field.label).inc()
