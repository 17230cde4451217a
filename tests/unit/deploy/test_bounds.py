"""What penstock.yaml's structs refuse of one field, values.schema.json refuses too, for every number and some words."""

from collections.abc import Iterator
from typing import Any, get_args

import jsonschema
import msgspec
import pytest

from deploy.chart_schema import CHART_OWNED, SECTIONS, schema
from penstock.adapters.config import AdaptersConfig, HubSource, S3Source, SourcesConfig
from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.schedule_config import ScheduleConfig
from penstock.base.errors import ConfigError
from penstock.cli.config import PoolConfig
from penstock.router.config import EscalationConfig, ProviderConfig
from penstock.tenancy.tariffs import TariffRule
from penstock.wire.targets import ClassTargets, Target
from penstock.workers.config import AdapterSlots, EngineConfig, SpeculationConfig, TimedConfig, VllmConfig

Struct = type[msgspec.Struct]

STRUCTS: tuple[Struct, ...] = (
    *SECTIONS,
    SourcesConfig,
    S3Source,
    HubSource,
    AutoscaleConfig,
    ScheduleConfig,
    EngineConfig,
    SpeculationConfig,
    AdapterSlots,
    TimedConfig,
    VllmConfig,
    ClassTargets,
    Target,
    EscalationConfig,
)
NEEDED: dict[Struct, dict[str, Any]] = {
    PoolConfig: {"name": "a"},
    EscalationConfig: {"min_mean_logprob": -1.0},
    TariffRule: {"model": "m", "input": 1.0, "output": 1.0},
    ScheduleConfig: {"start": "08:00", "end": "24:00", "min_replicas": 0},
    ProviderConfig: {
        "name": "up",
        "base_url": "http://x",
        "model": "m",
        "served_names": ["demo"],
        "input_price": 1.0,
        "output_price": 1.0,
    },
}
"""Fields set beside the one that is tried: what is required, and what belongs together."""
NUMBERS = (-1, 0, 1.5)
WORDS = {
    "base_url": "x",
    "endpoint": "x",
    "region": "x y",
    "hosts": ["x y"],
    "allow": ["/"],
    "start": "8:00",
    "end": "24:30",
    "days": ["mon", "mon"],
    "otlp_endpoint": "x",
    "name": "a b",
    "served_names": [""],
    "extra_fields": ["x"],
    "cors_origins": ["x"],
    "pin_cores": [-1],
    "block_size": 24,
    "max_draft_tokens": 17,
    "ttft_s": "x",
    "interactive": {"ttft_s": "x"},
}


def refused(struct: Struct, document: dict[str, Any]) -> bool:
    try:
        msgspec.convert(document, struct)
    except (ConfigError, msgspec.ValidationError):
        return True
    return False


def tries(struct: Struct) -> Iterator[dict[str, Any]]:
    for field in msgspec.structs.fields(struct):
        is_number = {int, float} & {field.type, *get_args(field.type)} and field.type is not bool
        values = [*(NUMBERS if is_number else ()), *([WORDS[field.name]] if field.name in WORDS else ())]
        yield from (
            NEEDED.get(struct, {}) | {field.name: value}
            for value in values
            if field.name not in CHART_OWNED.get(struct.__name__, ())
        )


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_what_a_struct_refuses_of_one_field_the_schema_refuses_too(struct: Struct) -> None:
    found = schema()
    validator = jsonschema.Draft7Validator({"$ref": f"#/$defs/{struct.__name__}", "$defs": found["$defs"]})
    all_tries = list(tries(struct))

    assert validator.is_valid(NEEDED.get(struct, {}))
    assert [document for document in all_tries if refused(struct, document) and validator.is_valid(document)] == []
    assert any(refused(struct, document) for document in all_tries)


def test_every_struct_of_the_sections_is_tried() -> None:
    assert {struct.__name__ for struct in STRUCTS} == set(schema()["$defs"])
    assert refused(AdaptersConfig, {"max_bytes": 0})
