"""The span of a request as a whole; the names of its attributes are in `base.telemetry`.

Not the recording (`base.tracing`), and not the sequences of the request (`dispatch.spans`). For a request that is not
traced each function here costs one test.
"""

from penstock.base import telemetry as names
from penstock.base.tracing import NOT_TRACED, StartedTrace, Trace, Tracing
from penstock.router.completions.completion import Completion
from penstock.router.transport.exchange import Exchange


def begin(tracing: Tracing | None, exchange: Exchange, tenant: str) -> StartedTrace:
    """Begin the trace of an authenticated request: an unknown caller must not fill the collector."""
    if tracing is None:
        return NOT_TRACED
    parents, states = (exchange.all_headers(name) for name in (b"traceparent", b"tracestate"))
    parent = parents[0].decode("latin-1") if len(parents) == 1 else None  # of several none is right
    started = tracing.begin(parent, exchange.began_s, b",".join(states).decode("latin-1"), tenant)
    if started.trace is not None:
        started.trace.note({names.REQUEST_ID: exchange.request_id, names.TENANT: tenant, names.PATH: exchange.path})
    return started


def record_completion(exchange: Exchange, completion: Completion) -> None:
    """Note tokens and TTFT of the request's sequences, also when the request was cut off."""
    trace = exchange.traced.trace
    if trace is None:
        return
    usage = completion.usage()
    firsts = [
        choice.first_token_s for prompt in completion.prompts for choice in prompt if choice.first_token_s is not None
    ]
    trace.note(
        {
            names.INPUT_TOKENS: usage.prompt_tokens,
            names.OUTPUT_TOKENS: usage.completion_tokens,
            names.TTFT: min(firsts) - exchange.began_s if firsts else None,
        }
    )


def end(exchange: Exchange, trace: Trace) -> None:
    """End the request's span: the answer is sent, or given up."""
    trace.note({names.MODEL: exchange.model, names.IS_STREAM: exchange.is_stream, names.STATUS: exchange.status})
    trace.end(exchange.failure)
