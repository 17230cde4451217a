"""How a run is made again: its scenario as YAML, only what is not the default, so that a reader finds what matters, and
the command."""

from pathlib import Path
from shlex import quote

import msgspec
import yaml

from penstock_loadtest.report.folder import Server
from penstock_loadtest.scenario import Scenario


def make_run_command(server: Server | None) -> str:
    """The command that plays scenario.yaml again."""
    if server is None:
        return "penstock-loadtest run scenario.yaml --url URL"
    target = f"--url {quote(server.url)} --model {quote(server.model)}"
    return server.command or f"penstock-loadtest run scenario.yaml {target}"


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
