from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.base.telemetry import ATTRIBUTES, REQUEST, SPANS, TelemetryConfig

CLIENTS = "the client's"


def test_every_attribute_of_a_span_is_in_the_table_and_every_row_is_used() -> None:
    used = {name for row in SPANS for name in row.attributes}

    assert used == {attribute.name for attribute in ATTRIBUTES}
    assert len({row.name for row in SPANS}) == len(SPANS)


def test_the_request_is_the_parent_of_every_other_span() -> None:
    assert {row.parent for row in SPANS if row.name != REQUEST} == {REQUEST}
    assert next(row for row in SPANS if row.name == REQUEST).parent is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"otlp_endpoint": "collector:4318"}, "otlp_endpoint must begin with http"),
        ({"sample_ratio": 1.5}, "between 0 and 1, not 1.5"),
        ({"sample_ratio": -0.1}, "between 0 and 1, not -0.1"),
        ({"caller_samples_per_s": -1.0}, "at least 0, not -1"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TelemetryConfig(**settings)  # type: ignore[arg-type]


def test_the_documentation_has_every_span_and_attribute_as_the_tables_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8").splitlines()

    rows = [line for line in page if line.startswith("| `")]
    spans = [
        f"| `{row.name}` | {row.parent or CLIENTS} | {row.help} | {', '.join(f'`{name}`' for name in row.attributes)} |"
        for row in SPANS
    ]
    assert rows == [*spans, *[f"| `{row.name}` | {row.kind} | {row.help} |" for row in ATTRIBUTES]]
