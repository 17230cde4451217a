import pytest

from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.text_assembly import TextAssembler
from penstock.router.routing.request import Receipt, RouteAttempt
from penstock.wire.errors import NotFound
from tests.unit.router.fleet_fakes import generation
from tests.unit.router.http_fakes import TOKENIZER


def completion(*receipts: Receipt | None) -> Completion:
    choices = [
        Choice(index, generation([1]), TextAssembler(TOKENIZER), receipt) for index, receipt in enumerate(receipts)
    ]
    return Completion([choices], None, lambda: 0.0, None)  # type: ignore[arg-type]  # never run


def test_a_receipt_holds_the_decision_of_every_sequence_that_was_placed() -> None:
    receipts = Receipts(max_kept=4)
    placed = Receipt(
        "r1-0",
        "cloud",
        "tier_full",
        "up",
        "up",
        "provider",
        0.1,
        scores={"up": 0.1},
        considered=[RouteAttempt("edge", ("e",), None, "tier_full")],
    )
    receipts.keep("r1", "acme", "m", 5, completion(placed, None))

    found = receipts.find("r1", "acme")
    assert (found.id, found.model, found.created) == ("r1", "m", 5)
    (choice,) = found.choices
    assert (choice.tier, choice.tier_reason, choice.scores) == ("cloud", "tier_full", {"up": 0.1})
    assert (choice.considered[0].places, choice.considered[0].obstacle) == (["e"], "tier_full")
    assert receipts.find("chatcmpl-r1", "acme") == found


def test_another_tenants_receipt_is_not_there() -> None:
    receipts = Receipts(max_kept=4)
    receipts.keep("r1", "acme", "m", 5, completion(Receipt("r1")))

    with pytest.raises(NotFound):
        receipts.find("r1", "other")


def test_what_was_never_placed_leaves_none() -> None:
    receipts = Receipts(max_kept=4)
    receipts.keep("r1", "acme", "m", 5, completion(None))

    with pytest.raises(NotFound):
        receipts.find("r1", "acme")


def test_the_oldest_are_forgotten() -> None:
    receipts = Receipts(max_kept=2)
    for name in ("r1", "r2", "r3"):
        receipts.keep(name, "acme", "m", 5, completion(Receipt(name)))

    with pytest.raises(NotFound):
        receipts.find("r1", "acme")
    assert [receipts.find(name, "acme").id for name in ("r2", "r3")] == ["r2", "r3"]
