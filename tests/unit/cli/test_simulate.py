import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock_loadtest.report.folder import read_run
from penstock_loadtest.report.page import Pictures, render_run
from tests.unit.loadtest.report.pages import Page

ROOT = Path(__file__).parents[3]
CONFIG, LOAD = (ROOT / "examples" / "simulate" / name for name in ("penstock.yaml", "load.yaml"))


def simulate(out: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    result = CliRunner().invoke(app, ["simulate", str(LOAD), "--config", str(CONFIG), "--out", str(out), *arguments])
    return result.exit_code, result.output


def test_the_example_is_simulated_and_leaves_a_run_of_the_load_tester(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    status, output = simulate(tmp_path / "run", "--set", "duration_s=90", "--set", "arrivals.at_s=30", "--no-plots")

    assert status == 0, output
    assert "requests in" in output
    assert "replica-hours" in output
    assert "public figures, not measured by us" in output.replace("\n", " ")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"records.jsonl", "summary.json", "ledger.json", "scenario.json", "simulation.json"}
    facts = json.loads((tmp_path / "run" / "simulation.json").read_text())
    assert facts["replica_seconds"]["chat"] > 180
    assert facts["settings"]["start_jitter"] == 0.3


def test_the_report_of_a_simulation_says_so_and_how_to_play_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    status, output = simulate(tmp_path / "run", "--set", "duration_s=3", "--seed", "7", "--no-plots")

    assert status == 0, output
    page = Page(render_run(read_run(tmp_path / "run"), Pictures([], [], [])))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "This run was simulated. No server answered. chat: at most 2 modelled replicas" in page.text
    assert "public figures, not measured by us" in page.text
    assert "chat, simulated" in page.text
    assert "penstock simulate scenario.yaml --config penstock.yaml --out FOLDER --seed 7" in page.text
    assert "penstock-loadtest run" not in page.text
    assert page.row("good")[1] == str(summary["goodput"]["good"])
    assert page.alerts == 1


@pytest.mark.slow
def test_the_report_of_a_simulation_has_its_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    status, output = simulate(tmp_path / "run", "--set", "duration_s=3")

    assert status == 0, output
    page = Page((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert page.count("svg") == len(list((tmp_path / "run" / "plots").glob("*.png"))) >= 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model-error", "0"), "model_error is a factor above 0, not 0"),
        (("--tier-policy", "dearest"), "--tier-policy is one of"),
        (("--set", "loop=closed"), "loop is closed; the simulator plays open loops"),
        (("--set", "nonsense=1"), "nonsense"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(ROOT)

    status, output = simulate(tmp_path / "run", *arguments)

    assert status == 2
    assert sentence in output.replace("\n", " ")


def test_faults_are_read_from_a_file_and_stand_in_the_notes(tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("gateways: 2\nfaults: [{kind: reports_missing, at_s: 5, length_s: 20}]\n", encoding="utf-8")

    status, output = simulate(tmp_path / "run", "--set", "duration_s=20", "--no-plots", "--faults", str(faults))

    assert status == 0, output
    settings = json.loads((tmp_path / "run" / "simulation.json").read_text())["settings"]
    assert (settings["gateways"], settings["faults"][0]["kind"]) == (2, "reports_missing")
    assert "stale" in (tmp_path / "run" / "autoscale.jsonl").read_text()


def test_classes_of_tenants_stand_in_the_notes(tmp_path: Path) -> None:
    status, output = simulate(tmp_path / "run", "--set", "duration_s=5", "--no-plots", "--class", "default=batch")

    assert status == 0, output
    settings = json.loads((tmp_path / "run" / "simulation.json").read_text())["settings"]
    assert settings["classes"] == {"default": "batch"}


@pytest.mark.parametrize("given", ["acme", "acme=", "=batch", "acme=urgent"])
def test_what_is_no_class_of_a_tenant_is_refused(tmp_path: Path, given: str) -> None:
    status, output = simulate(tmp_path / "run", "--class", given)

    assert status == 2
    assert "class" in output


def test_a_fault_of_no_kind_is_refused_with_a_sentence(tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults: [{kind: report_missing, at_s: 5, length_s: 20}]\n", encoding="utf-8")

    status, output = simulate(tmp_path / "run", "--faults", str(faults))

    assert status != 0
    assert "report_missing" in output
