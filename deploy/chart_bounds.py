"""What penstock.yaml's structs refuse of a single field (their `__post_init__`), as JSON Schema; so that Helm refuses
it before anything is created.

Not what two fields can't be together: deploy/helm/templates/_config_checks.tpl has that, in sentences.
"""

from typing import Any

from penstock.adapters.config import HOST_PATTERN, MAX_DOWNLOAD_S, MAX_REDIRECTS
from penstock.router.config import EXTENSIONS, MAX_GRACE_MINUTES, MAX_HELD_TOKENS, ORIGIN_PATTERN
from penstock.tenancy.tariffs import MAX_PRICE
from penstock.wire.money import MAX_BUDGET
from penstock.workers.config import MAX_DRAFT_TOKENS, MAX_TENSOR_PARALLEL

Schema = dict[str, Any]

ABOVE_0: Schema = {"exclusiveMinimum": 0}
AT_LEAST_0: Schema = {"minimum": 0}
AT_LEAST_1: Schema = {"minimum": 1}
SHARE: Schema = {"minimum": 0, "maximum": 1}
CAP: Schema = {"exclusiveMinimum": 0, "maximum": MAX_BUDGET}
URL: Schema = {"pattern": "^https?://[^/ ]"}
SCHEDULED_TIME = "^([0-9]{4}-[0-9]{2}-[0-9]{2}[ T])?(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"
DASHED: Schema = {"pattern": "^[A-Za-z0-9]+(-[A-Za-z0-9]+)*$"}
VARIABLE: Schema = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}
PLACES: Schema = {"items": {"type": "string", "pattern": "^/?[^/]+(/[^/]+)*/?$"}}
DIFFERENT_WORDS: Schema = {"items": {"type": "string", "minLength": 1}, "uniqueItems": True}
TOGETHER = ("input_price", "output_price")


def each(bound: Schema, *names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, bound)


BOUNDS: dict[str, dict[str, Schema]] = {
    "TariffRule": each({"minimum": 0, "maximum": MAX_PRICE}, "input", "cached", "output"),
    "AdapterSlots": {"slots": AT_LEAST_0, "max_rank": AT_LEAST_1, "host_bytes": AT_LEAST_0},
    "S3Source": {
        "endpoint": URL,
        "region": {"pattern": "^[a-z0-9-]{1,64}$"},
        **each(VARIABLE, "access_key_env", "secret_key_env", "session_token_env"),
        "allow": PLACES,
    },
    "HubSource": {"endpoint": URL, "token_env": VARIABLE, "allow": PLACES},
    "SourcesConfig": {
        "hosts": {"items": {"type": "string", "pattern": HOST_PATTERN}},
        "max_redirects": {"minimum": 0, "maximum": MAX_REDIRECTS},
        **each({"exclusiveMinimum": 0, "maximum": MAX_DOWNLOAD_S}, "timeout_s", "stall_s"),
    },
    "AdaptersConfig": {**each(AT_LEAST_1, "max_bytes", "max_per_tenant"), "load_timeout_s": AT_LEAST_0},
    "BatchesConfig": {
        **each(AT_LEAST_1, "max_file_bytes", "max_lines", "max_tenant_bytes", "max_tenant_lines", "max_parallel"),
        "keep_days": {"exclusiveMinimum": 0, "maximum": 30},
    },
    "AutoscaleConfig": {
        "min_replicas": AT_LEAST_0,
        **each(AT_LEAST_0, "gpus", "standby"),
        "max_replicas": AT_LEAST_1,
        **each(ABOVE_0, "ttft_target_s", "tpot_target_s", "window_s", "start_s", "idle_s", "unplaced_s"),
        "target_utilisation": {"exclusiveMinimum": 0, "maximum": 1},
        "scale_down_margin": {"minimum": 0, "exclusiveMaximum": 1},
        "scale_down_delay_s": AT_LEAST_0,
    },
    "EngineConfig": {
        **each(AT_LEAST_1, "kv_memory_bytes", "max_num_seqs", "max_batched_tokens", "threads"),
        "memory_share": {"exclusiveMinimum": 0, "maximum": 1},
        "stream_interval_s": {"minimum": 0, "maximum": 0.04},
        "block_size": {"enum": [2**exponent for exponent in range(17)]},
        "tensor_parallel_size": {"minimum": 1, "maximum": MAX_TENSOR_PARALLEL},
    },
    "GatewayConfig": {
        "provider_cap": CAP,
        **each(
            AT_LEAST_1,
            "max_ongoing_requests",
            "max_connections",
            "max_connections_per_address",
            "max_body_bytes",
            "max_held_body_bytes",
            "max_queue",
            "max_held",
            "default_max_tokens",
            "max_answer_tokens",
            "max_buffered_deltas",
            "max_receipts",
        ),
        **each(ABOVE_0, "ttft_target_s", "request_timeout_s", "body_timeout_s", "head_timeout_s", "hold_timeout_s"),
        **each(AT_LEAST_0, "queue_timeout_s", "key_cache_s"),
        "max_queue_share": {"exclusiveMinimum": 0, "maximum": 1},
        "reserved_places": {"minimum": 0, "exclusiveMaximum": 1},
        "key_grace_minutes": {"minimum": 0, "maximum": MAX_GRACE_MINUTES},
        "pin_cores": {"items": {"type": "integer", "minimum": 0}, "uniqueItems": True},
        "cors_origins": {"items": {"type": "string", "pattern": ORIGIN_PATTERN}},
    },
    "PoolConfig": {"served_names": DIFFERENT_WORDS, "price_per_hour": AT_LEAST_0},
    "EscalationConfig": {
        "tokens": {"minimum": 1, "maximum": MAX_HELD_TOKENS},
        "min_mean_logprob": {"maximum": 0},
    },
    "ProviderConfig": {
        "name": DASHED,
        "base_url": URL,
        "served_names": {"minItems": 1},
        **each(ABOVE_0, "ttft_s", "timeout_s", "breaker_open_s"),
        **each(AT_LEAST_1, "max_concurrency", "breaker_failures"),
        "extra_fields": {"items": {"enum": sorted(EXTENSIONS)}},
        **each(AT_LEAST_0, "input_price", "output_price", "cached_price"),
        "cap": CAP,
        "prompt_margin": {"minimum": 0, "maximum": 10},
    },
    "ScheduleConfig": {
        **each({"pattern": SCHEDULED_TIME}, "start", "end"),
        **each(AT_LEAST_0, "min_replicas", "max_replicas"),
        "days": {"minItems": 1, "uniqueItems": True},
    },
    "SpeculationConfig": {"draft_layers": AT_LEAST_1, "max_draft_tokens": {"minimum": 1, "maximum": MAX_DRAFT_TOKENS}},
    "Target": each(ABOVE_0, "ttft_s", "tpot_s"),
    "TargetsConfig": {"objective": {"exclusiveMinimum": 0, "exclusiveMaximum": 1}},
    "TelemetryConfig": {"otlp_endpoint": URL, "sample_ratio": SHARE, "caller_samples_per_s": AT_LEAST_0},
    "TimedConfig": {"draft_acceptance": SHARE},
    "VllmConfig": {"start_timeout_s": ABOVE_0},
}
"""Bounds by struct and field. Waits that the structs let be anything are bounded too: a deadline of 0 s refuses every
request."""


def bounded(sections: dict[str, Schema]) -> dict[str, Schema]:
    """The sections with their bounds; a field that may be null stays so."""
    found = {
        name: {**section, "properties": _properties(section["properties"], BOUNDS.get(name, {}))}
        for name, section in sections.items()
    }
    found["ProviderConfig"]["dependencies"] = {
        **{name: [other] for name, other in (TOGETHER, TOGETHER[::-1])},
        **{name: list(TOGETHER) for name in ("cached_price", "cap")},
    }
    return found


def _properties(properties: dict[str, Schema], bounds: dict[str, Schema]) -> dict[str, Schema]:
    return properties | {name: _bounded(properties[name], bound) for name, bound in bounds.items()}


def _bounded(field: Schema, bound: Schema) -> Schema:
    """An `anyOf` of msgspec's is the value or null, and refused by the words of either; a list of types is refused by
    those that fit."""
    options = field.get("anyOf", [field])
    if len(options) > 1 and any("enum" in option for option in options):  # a number or a word
        return {"anyOf": [option if "enum" in option else {**option, **bound} for option in options]}
    types = [option["type"] for option in options]
    return {
        **{key: value for option in options for key, value in option.items()},
        "type": types if len(types) > 1 else types[0],
        **bound,
    }
