"""A run's scenario as the YAML that makes it again: only what is not the default, so that a reader finds what
matters."""

from pathlib import Path

import msgspec
import yaml

from penstock_loadtest.scenario import Scenario


def dump_scenario(scenario: Scenario) -> str:
    """The scenario as YAML; `load_scenario` reads it back as the same scenario."""
    return yaml.safe_dump(
        _list_changes(scenario), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110
    )


def _list_changes(part: object) -> object:
    """Part of a scenario as plain values; for a struct the fields that are not at their default."""
    if isinstance(part, msgspec.Struct):
        fields = {field.name: (getattr(part, field.name), field) for field in msgspec.structs.fields(part)}
        return {name: _list_changes(value) for name, (value, field) in fields.items() if value != _default(field)}
    if isinstance(part, list | tuple):
        return [_list_changes(item) for item in part]
    return str(part) if isinstance(part, Path) else part


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
