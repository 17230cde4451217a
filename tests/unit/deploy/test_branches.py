"""The presets and branches.py together render the inside of every condition and loop of the templates.

A copy of the chart says by a mark which ones were taken. Left out are the checks, whose insides refuse
(test_wrong_values.py), and templates whose result is read as a number, YAML or JSON, which a mark would spoil.
"""

import re
import shutil
from itertools import count
from pathlib import Path

from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import APIS, CHART, IMAGE, PRESETS, RELEASE, template

TAG = re.compile(r"\{\{-? *(?:if|with|range|else)\b[^{}]*\}\}")
DEFINE = re.compile(r'\{\{-? define "penstock\.(\w+)"')
READ = {
    "pod",
    "requestSeconds",
    "gatewayDrainSeconds",
    "providerPorts",
    "adapterSources",
    "adapterSourceEnv",
    "adapterSourcePorts",
    "portOf",
    "kept",
    "fullname",
    "ownHubFolder",
    "tenantsStay",
    "keysStay",
    "testTenant",
    "defaults",
}
READ |= {"tlsCertificates", "tlsData", "tlsOfGateway", "stream"}
READ |= {"rayEnv", "workerEnv", "hubFolder", "poolResources", "secretName"}
"""What is read by another template."""
CHECKS = {"_checks.tpl", "_config_checks.tpl"}


def marked(folder: Path) -> dict[str, str]:
    """The chart's copy with marks: mark to file and tag."""
    known: dict[str, str] = {}
    numbers = count()
    for path in sorted((folder / "templates").rglob("*.*")):
        if path.suffix not in (".yaml", ".tpl") or path.name in CHECKS:
            continue
        parts = re.split(r"(?=\{\{-? define )", path.read_text(encoding="utf-8"))
        path.write_text("".join(_marked(part, path.name, numbers, known) for part in parts), encoding="utf-8")
    return known


def _marked(text: str, file: str, numbers: "count[int]", known: dict[str, str]) -> str:
    name = DEFINE.match(text)
    if name is not None and name[1] in READ:
        return text

    def with_mark(tag: re.Match[str]) -> str:
        mark = f"@@{next(numbers)}@@"
        known[mark] = f"{file}: {tag[0]}"
        return f"{tag[0]}{mark}"

    return TAG.sub(with_mark, text)


def test_every_branch_is_taken_by_some_preset_or_branch(tmp_path: Path) -> None:
    chart = Path(shutil.copytree(CHART, tmp_path / "penstock"))
    known = marked(chart)
    cases = [*((preset, "") for preset in PRESETS), *(("", values) for values in BRANCHES.values())]
    shown = [template(preset, values, APIS, IMAGE, RELEASE, chart, "--debug").stdout for preset, values in cases]
    taken = {mark for text in shown for mark in re.findall(r"@@\d+@@", text)}

    assert len(known) > 80
    assert sorted(known[mark] for mark in known.keys() - taken) == []
