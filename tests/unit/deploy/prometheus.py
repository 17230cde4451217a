"""promtool of Debian's package `prometheus`, for tests of rules: syntax, and alerts on series that a test makes up.

A test that asks for it is skipped where there is none.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

MISSING = "there is no promtool here: Debian's package prometheus has it"


class Case(NamedTuple):
    """Series as promtool writes them (name with labels to values, a value each minute), and what fires at which time:
    alert to sets of labels that it fires with."""

    series: dict[str, str]
    firing: dict[str, dict[str, list[dict[str, str]]]]


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip(MISSING)
    return found


def check_rules(path: Path) -> str:
    """What `promtool check rules` says of the file; asserts that it has no fault."""
    done = subprocess.run(
        [promtool(), "check", "rules", "--lint=all", "--lint-fatal", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def try_rules(folder: Path, rules: dict[str, Any], cases: dict[str, Case]) -> None:
    """Assert that alerts of the rules fire in each case as it says; those that a time does not name must not fire
    then. Annotations are left out: they have values in them."""
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    for rule in alerts:
        del rule["annotations"]
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in alerts}
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    tests = [_test(name, case, severities) for name, case in cases.items()]
    file = folder / "cases.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}), encoding="utf-8"
    )
    done = subprocess.run(
        [promtool(), "test", "rules", str(file)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _test(name: str, case: Case, severities: dict[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {
                "eval_time": time,
                "alertname": alert,
                "exp_alerts": [{"exp_labels": {**labels, "severity": severity}} for labels in firing.get(alert, [])],
            }
            for time, firing in case.firing.items()
            for alert, severity in severities.items()
        ],
    }
