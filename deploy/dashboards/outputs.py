"""The generated files: which there are, and what stands in each.

Prometheus' rules and Grafana's dashboards lie in the chart (deploy/helm/files), which puts them into its objects; where
there is no Kubernetes, the same files are read as they are.
"""

from collections.abc import Mapping
from pathlib import Path

from deploy.dashboards import grafana, rules, runbooks
from deploy.dashboards.boards import boards

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "helm" / "files"
RULES = FILES / "rules.yaml"
DASHBOARDS = FILES / "dashboards"
RUNBOOKS = ROOT / "docs" / "alerts.md"


def written() -> Mapping[Path, str]:
    """Text of every generated file. Raises ValueError where docs/alerts.md lacks a runbook."""
    return {
        RULES: rules.render(),
        **{DASHBOARDS / f"{board.name}.json": grafana.render(board) for board in boards()},
        RUNBOOKS: runbooks.render(RUNBOOKS.read_text(encoding="utf-8")),
    }
