import io
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.main import FAILED, REFUSED, app
from penstock.cli.receipt import explain_receipt, read_receipt
from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.text_assembly import TextAssembler
from penstock.router.routing.native_search import open_search
from penstock.router.routing.recorded import read_basis
from penstock.router.routing.request import Receipt
from penstock.router.routing.search import Search, search
from penstock.wire.accounts import RequestReceipt
from tests.unit.router.fleet_fakes import generation
from tests.unit.router.http_fakes import TOKENIZER
from tests.unit.router.routing.test_search import draw_case, make_queries


def decided(seed: int, searching: Search) -> Receipt | None:
    views, request = draw_case(seed)
    decision = searching(make_queries(views), request, Random(seed))
    if decision.replica_id is None:
        return None
    return Receipt(
        f"r{seed}",
        replica=decision.replica_id,
        reason=decision.reason,
        predicted_ttft_s=decision.predicted_ttft_s,
        scores=decision.scores,
        basis=decision.basis,
    )


def shown(*receipts: Receipt) -> RequestReceipt:
    """The receipts as GET /v1/receipts/{id} gives them."""
    kept = Receipts(max_kept=4)
    choices = [Choice(0, generation([1]), TextAssembler(TOKENIZER), receipt) for receipt in receipts]
    kept.keep("r", "acme", "m", 5, Completion([choices], None, lambda: 0.0, None))  # type: ignore[arg-type]  # never run
    return msgspec.json.decode(msgspec.json.encode(kept.find("r", "acme")), type=RequestReceipt)


@pytest.mark.parametrize("open_one", [lambda: search, lambda: open_search().search], ids=["arrays", "C++"])
def test_a_receipts_decision_is_made_again(open_one: Callable[[], Search]) -> None:
    searching, num_drawn = open_one(), 0
    for seed in range(60):
        receipt = decided(seed, searching)
        if receipt is None:
            continue
        told = io.StringIO()

        is_same = explain_receipt(shown(receipt), Console(file=told, width=200))

        assert is_same, told.getvalue()
        assert f"{receipt.replica}, {receipt.reason}, as the receipt says" in told.getvalue()
        assert all(replica_id in told.getvalue() for replica_id in receipt.scores)
        num_drawn += "drawn" in told.getvalue()
    assert num_drawn > 5


@pytest.mark.parametrize("lacking", ["mean_backlog_s", "start_wait_s"])
def test_a_decision_of_a_version_with_other_costs_is_not_made_again(lacking: str) -> None:
    receipt = decided(0, search)
    assert receipt is not None
    basis = shown(receipt).choices[0].basis
    assert basis is not None
    assert read_basis(basis).compared
    if lacking == "mean_backlog_s":
        basis = msgspec.structs.replace(basis, mean_backlog_s=None)
    else:
        basis = msgspec.structs.replace(basis, compared=[msgspec.structs.replace(basis.compared[0], start_wait_s=None)])

    with pytest.raises(ValueError, match="an older version"):
        read_basis(basis)


def write(path: Path, receipt: RequestReceipt) -> str:
    path.write_bytes(msgspec.json.encode(receipt))
    return str(path)


def test_the_command_tells_a_decision_that_is_not_the_receipts(tmp_path: Path) -> None:
    receipt = decided(0, search)
    assert receipt is not None
    real = shown(receipt)
    (choice,) = real.choices
    other = msgspec.structs.replace(real, choices=[msgspec.structs.replace(choice, replica="another")])

    same, different = (
        CliRunner().invoke(app, ["receipt", write(tmp_path / "receipt", each)]) for each in (real, other)
    )
    piped = CliRunner().invoke(app, ["receipt"], input=msgspec.json.encode(real))

    assert same.exit_code == piped.exit_code == 0, same.output
    assert different.exit_code == FAILED
    assert "the receipt says another" in different.output


def test_a_providers_answer_rests_on_no_replicas(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["receipt", write(tmp_path / "receipt", shown(Receipt("r1", pool="up", replica="up", reason="provider")))]
    )

    assert result.exit_code == 0
    assert "answered by the provider up" in result.output


def test_what_is_no_receipt_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "page").write_text('{"error": {"message": "no"}}')
    receipt = decided(0, search)
    assert receipt is not None
    (choice,) = shown(receipt).choices
    assert choice.basis is not None
    bases = {
        "compares no replicas": msgspec.structs.replace(choice.basis, compared=[]),
        "are not two of the replicas": msgspec.structs.replace(choice.basis, drawn=["x", "y"]),
        "no coefficient speed": msgspec.structs.replace(
            choice.basis, compared=[msgspec.structs.replace(choice.basis.compared[0], costs={"speed": 1.0})]
        ),
    }

    with pytest.raises(ConfigError, match="is no receipt"):
        read_receipt(tmp_path / "page")
    with pytest.raises(ConfigError, match="No such file"):
        read_receipt(tmp_path / "nothing")
    for message, basis in bases.items():
        broken = msgspec.structs.replace(shown(receipt), choices=[msgspec.structs.replace(choice, basis=basis)])
        result = CliRunner().invoke(app, ["receipt", write(tmp_path / "broken", broken)])
        assert result.exit_code == REFUSED
        assert message in result.output
