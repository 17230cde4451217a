"""What a request's trace says of the request as a whole; the names are in `base.telemetry`.

Not the recording (`base.tracing`), and not its sequences (`dispatch.spans`). For a request that is not traced each of
these is at most a test whether it is.
"""

from penstock.base import telemetry as names
from penstock.base.tracing import NOT_TRACED, Started, Trace, Tracing
from penstock.router.completions.completion import Completion
from penstock.router.transport.exchange import Exchange


def begin(tracing: Tracing | None, exchange: Exchange, tenant: str) -> Started:
    """For a caller who is known: an unknown one must not fill the collector."""
    if tracing is None:
        return NOT_TRACED
    parents, states = (exchange.all_headers(name) for name in (b"traceparent", b"tracestate"))
    parent = parents[0].decode("latin-1") if len(parents) == 1 else None  # of several none is right
    started = tracing.begin(parent, exchange.began_s, b",".join(states).decode("latin-1"))
    if started.trace is not None:
        started.trace.note({names.REQUEST_ID: exchange.request_id, names.TENANT: tenant, names.PATH: exchange.path})
    return started


def generated(exchange: Exchange, completion: Completion) -> None:
    """What the request's sequences have come to, also when it was cut off."""
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


def ended(exchange: Exchange, trace: Trace) -> None:
    """The answer is out, or given up."""
    trace.note({names.MODEL: exchange.model, names.IS_STREAM: exchange.is_stream, names.STATUS: exchange.status})
    trace.end(exchange.failure)
