"""What a request's trace records of its sequences: waits, routes, and what came of each attempt; the names are in
`base.telemetry`.

Not the recording (`base.tracing`). A sequence that is not traced has no StreamTrace. Times that come in are of the
gateway's monotonic clock, but for the engine's own.
"""

from penstock.base import telemetry as names
from penstock.base.tracing import Attributes, Trace
from penstock.router.routing.request import Generation, Receipt
from penstock.wire.frames import Delta, Finish, Timing


class StreamTrace:
    """The spans of one sequence: attempt by attempt, each a wait, a route, and what came of it."""

    def __init__(self, trace: Trace, generation: Generation, receipt: Receipt) -> None:
        self._trace = trace
        self._generation = generation
        self._receipt = receipt
        self._routed_s: float | None = None
        self._timing: Timing | None = None
        self._finish: Finish | None = None
        self._num_before = 0
        """Output tokens of the attempts before."""

    def record_route(self, began_s: float, ended_s: float) -> None:
        """Record the choice of a place; the receipt holds which, and why."""
        receipt, trace = self._receipt, self._trace
        self._routed_s = began_s
        decision: Attributes = {
            names.POOL: receipt.pool,
            names.REPLICA: receipt.replica,
            names.TIER: receipt.tier,
            names.TIER_REASON: receipt.tier_reason,
            names.REASON: receipt.reason,
            names.PREDICTED_TTFT: receipt.predicted_ttft_s,
            names.PREDICTED_CACHED_TOKENS: receipt.predicted_cached_tokens,
        }
        trace.add(names.ROUTE, trace.unix_s(began_s), trace.unix_s(ended_s), {**self._attempt, **decision})

    def record_wait(self, began_s: float, ended_s: float, error: BaseException | None) -> None:
        """The wait for a place is over: with one, and then it ended where routing began, or with an error."""
        failure = None if error is None else type(error).__name__
        if failure is None and self._routed_s is not None:
            ended_s = self._routed_s
        self._trace.add(names.QUEUE, self._trace.unix_s(began_s), self._trace.unix_s(ended_s), self._attempt, failure)

    def record_delta(self, delta: Delta) -> None:
        """Note timing and finish of a delta, for the spans at the attempt's end."""
        if delta.timing is not None:
            self._timing = delta.timing
        if delta.finish is not None:
            self._finish = delta.finish

    def end_attempt(
        self, num_prompt_tokens: int, num_output_tokens: int, is_text: bool, error: BaseException | None = None
    ) -> None:
        """Record what came of an attempt; does nothing when called again. num_output_tokens: of all attempts so far.
        is_text: it was a provider's. error: the provider's."""
        finish = Finish.ABORT if self._finish is None else self._finish
        num_tokens = num_output_tokens - self._num_before
        if is_text and self._routed_s is not None:
            self._add_provider_span(self._routed_s, num_tokens, finish, error)
        elif self._timing is not None:
            self._add_engine_spans(self._timing, num_prompt_tokens, num_tokens, finish)
        self._routed_s, self._timing, self._finish, self._num_before = None, None, None, num_output_tokens

    def _add_engine_spans(self, timing: Timing, num_prompt_tokens: int, num_tokens: int, finish: Finish) -> None:
        receipt, trace = self._receipt, self._trace
        place: Attributes = {**self._attempt, names.REPLICA: receipt.replica}
        prefill: Attributes = {
            names.INPUT_TOKENS: num_prompt_tokens,
            names.CACHED_TOKENS: receipt.cached_tokens,
            names.ENGINE_WAIT: timing.wait_s,
        }
        trace.add(names.PREFILL, timing.admitted_s, timing.first_token_s, {**place, **prefill})
        if num_tokens > 1:
            ended_s = max(timing.last_token_s, trace.now_s()) if self._finish is None else timing.last_token_s
            decode: Attributes = {
                names.OUTPUT_TOKENS: num_tokens,
                names.PREEMPTIONS: timing.num_preemptions,
                names.FINISH: finish.value,
            }
            trace.add(names.DECODE, timing.first_token_s, ended_s, {**place, **decode})

    def _add_provider_span(self, began_s: float, num_tokens: int, finish: Finish, error: BaseException | None) -> None:
        receipt, trace = self._receipt, self._trace
        answer: Attributes = {
            names.POOL: receipt.pool,
            names.TIER: receipt.tier,
            names.OUTPUT_TOKENS: num_tokens,
            names.FINISH: finish.value if error is None else None,
        }
        trace.add(
            names.PROVIDER,
            trace.unix_s(began_s),
            trace.now_s(),
            {**self._attempt, **answer},
            None if error is None else type(error).__name__,
        )

    @property
    def _attempt(self) -> Attributes:
        return {names.SEQUENCE: self._generation.request_id, names.ATTEMPT: self._receipt.attempts}


def make_stream_trace(generation: Generation, receipt: Receipt) -> StreamTrace | None:
    """Start to trace the sequences of a request. Returns None if the request is not traced."""
    return None if generation.traced.trace is None else StreamTrace(generation.traced.trace, generation, receipt)
