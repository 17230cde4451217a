import io
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.explain import choose, recent, show, span_s
from penstock.cli.main import app
from penstock.wire.explanation import Change
from tests.unit.autoscale.test_sentences import FOUND

CHANGES = (Change(1000.0, 1, 3, "deadline", "applied"), Change(2000.0, 3, 4, "demand", "applied"))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400)])
def test_a_span_is_a_number_and_its_unit(text: str, seconds: int) -> None:
    assert span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "h", "-1h", "1.5h", "1 h"])
def test_another_span_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="like 90s, 10m, 2h or 1d"):
        span_s(text)


def test_older_changes_are_left_out() -> None:
    found = structs.replace(FOUND, changes=CHANGES)

    assert recent(found, 1500.0).changes == CHANGES[1:]


def test_a_pool_is_chosen_by_its_name_and_an_unknown_one_refused() -> None:
    other = structs.replace(FOUND, pool="b")

    assert choose([FOUND, other], None) == [FOUND, other]
    assert choose([FOUND, other], "b") == [other]
    with pytest.raises(ConfigError, match="no pool 'c' is scaled; these are: a, b"):
        choose([FOUND, other], "c")
    with pytest.raises(ConfigError, match="no autoscaler has spoken for 10 s"):
        choose([], None)


def test_sentences_figures_and_changes_are_printed() -> None:
    out = io.StringIO()

    show(structs.replace(FOUND, changes=CHANGES), Console(file=out, width=200))

    assert "The target is 4:" in out.getvalue()
    assert "4 (cooling)" in out.getvalue()
    assert "1970-01-01 00:16:40" in out.getvalue()
    assert "deadline" in out.getvalue()


def test_the_autoscaler_itself_still_asks_for_its_options() -> None:
    refused = CliRunner().invoke(app, ["autoscale"])

    assert refused.exit_code == 2
    assert "--namespace and --lease must be given" in refused.stderr


def test_nothing_that_runs_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    monkeypatch.delenv("PENSTOCK_REDIS_URL_OPERATOR", raising=False)

    refused = CliRunner().invoke(app, ["autoscale", "explain", "--state", str(tmp_path / "none")])

    assert refused.exit_code == 2
    assert "nothing runs with the state folder" in refused.stderr
