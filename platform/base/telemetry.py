"""THE table of every span and attribute of a request's trace, and the settings of tracing.

Not what records them: see `penstock.base.tracing`. Names are OpenTelemetry's where its semantic conventions have one,
else `penstock.*`. A value is a number, an id, a name from the configuration or a word of a fixed set: never a prompt, a
key, a completion, or an error's sentence.
"""

from typing import Literal, NamedTuple

import msgspec

from penstock.base.errors import ConfigError

REQUEST_ID = "penstock.request_id"
TENANT = "penstock.tenant"
MODEL = "gen_ai.request.model"
PATH = "url.path"
STATUS = "http.response.status_code"
ERROR = "error.type"
IS_STREAM = "penstock.is_stream"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TTFT = "penstock.ttft_s"
SEQUENCE = "penstock.sequence"
ATTEMPT = "penstock.attempt"
POOL = "penstock.pool"
REPLICA = "penstock.replica"
TIER = "penstock.tier"
TIER_REASON = "penstock.tier_reason"
REASON = "penstock.reason"
PREDICTED_TTFT = "penstock.predicted_ttft_s"
PREDICTED_CACHED_TOKENS = "penstock.predicted_cached_tokens"
CACHED_TOKENS = "penstock.cached_tokens"
ENGINE_WAIT = "penstock.engine_wait_s"
PREEMPTIONS = "penstock.preemptions"
FINISH = "penstock.finish"


class Attribute(NamedTuple):
    """A row of the attributes' table."""

    name: str
    kind: Literal["string", "int", "double", "bool"]
    help: str


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(REQUEST_ID, "string", "As in the response's header x-penstock-request-id."),
    Attribute(TENANT, "string", "The tenant's id."),
    Attribute(MODEL, "string", "The served name."),
    Attribute(PATH, "string", "Of the endpoint."),
    Attribute(STATUS, "int", "Sent to the client; missing when it had hung up before."),
    Attribute(ERROR, "string", "What went wrong, by its class: never its sentence."),
    Attribute(IS_STREAM, "bool", "Answered with server-sent events."),
    Attribute(INPUT_TOKENS, "int", "Of the prompt; of all prompts, on the request."),
    Attribute(OUTPUT_TOKENS, "int", "That came: in this attempt, or, on the request, in all."),
    Attribute(TTFT, "double", "Request received to first token."),
    Attribute(SEQUENCE, "string", "The request's id, with the number of the choice behind all but the first."),
    Attribute(ATTEMPT, "int", "1, or more after a replica refused or was lost."),
    Attribute(POOL, "string", "That was chosen."),
    Attribute(REPLICA, "string", "That was chosen, or that computed."),
    Attribute(TIER, "string", "That was chosen."),
    Attribute(TIER_REASON, "string", "Why that tier."),
    Attribute(REASON, "string", "Why that replica; see the receipt."),
    Attribute(PREDICTED_TTFT, "double", "What the performance model promised."),
    Attribute(PREDICTED_CACHED_TOKENS, "int", "Tokens that the index said the replica held."),
    Attribute(CACHED_TOKENS, "int", "Tokens that it did hold."),
    Attribute(ENGINE_WAIT, "double", "In the replica, before the first step that computed it."),
    Attribute(PREEMPTIONS, "int", "How often it lost its KV to others and started over."),
    Attribute(
        FINISH, "string", "How it ended there: stop, length, refused, ...; abort when the gateway needed no more."
    ),
)


class SpanRow(NamedTuple):
    """A row of the spans' table."""

    name: str
    parent: str | None
    """Name of the span above; None: the client's span, where it sent one."""
    help: str
    attributes: tuple[str, ...]


REQUEST = "request"
QUEUE = "queue"
ROUTE = "route"
PREFILL = "prefill"
DECODE = "decode"
PROVIDER = "provider"

_PLACE = (SEQUENCE, ATTEMPT)
SPANS: tuple[SpanRow, ...] = (
    SpanRow(
        REQUEST,
        None,
        "The gateway: request received to last byte.",
        (REQUEST_ID, TENANT, MODEL, PATH, STATUS, IS_STREAM, INPUT_TOKENS, OUTPUT_TOKENS, TTFT, ERROR),
    ),
    SpanRow(QUEUE, REQUEST, "Waiting in the gateway for a replica, once for each attempt.", (*_PLACE, ERROR)),
    SpanRow(
        ROUTE,
        REQUEST,
        "Choosing the replica, and handing over.",
        (*_PLACE, POOL, REPLICA, TIER, TIER_REASON, REASON, PREDICTED_TTFT, PREDICTED_CACHED_TOKENS),
    ),
    SpanRow(
        PREFILL,
        REQUEST,
        "The engine, by its own clock: first step of the sequence to its first token.",
        (*_PLACE, REPLICA, INPUT_TOKENS, CACHED_TOKENS, ENGINE_WAIT),
    ),
    SpanRow(
        DECODE,
        REQUEST,
        "The engine, by its own clock: first token to last; none when there is but one.",
        (*_PLACE, REPLICA, OUTPUT_TOKENS, PREEMPTIONS, FINISH),
    ),
    SpanRow(
        PROVIDER,
        REQUEST,
        "An external provider: request sent to last token.",
        (*_PLACE, POOL, TIER, OUTPUT_TOKENS, FINISH, ERROR),
    ),
)

CALLER_RATE = 10.0
"""Default of `TelemetryConfig.caller_samples_per_s`."""


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `telemetry` of the configuration."""

    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP collector (its path /v1/traces gets the spans). None: what OTEL_EXPORTER_OTLP_ENDPOINT
    names; without either, no tracing."""
    sample_ratio: float = 0.1
    """Share of requests traced, of those whose caller sent no decision in `traceparent`."""
    caller_samples_per_s: float = CALLER_RATE
    """Requests of one tenant per second and gateway that are traced because their caller says so; of more such,
    sample_ratio are."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"telemetry.otlp_endpoint must begin with http:// or https://, not {self.otlp_endpoint!r}"
            )
        if not 0 <= self.sample_ratio <= 1:
            raise ConfigError(f"telemetry.sample_ratio is a share between 0 and 1, not {self.sample_ratio}")
        if not self.caller_samples_per_s >= 0:
            raise ConfigError(f"telemetry.caller_samples_per_s must be at least 0, not {self.caller_samples_per_s}")
