from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.admission import Admission
from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.escalation import EdgeAttempt, Escalation, Outcome, Trial
from penstock.router.completions.receipts import Charge, Receipts
from penstock.router.completions.text_assembly import TextAssembler
from penstock.router.config import EscalationConfig
from penstock.router.routing.request import Receipt, RouteAttempt
from penstock.router.routing.spending import Spending
from penstock.tenancy.tariffs import Tariff, TariffRule, Tariffs
from penstock.wire.accounts import PlacePrices, RequestPrices, TariffPrices
from penstock.wire.errors import NotFound
from penstock.wire.money import NANO
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
        predicted_cost_nano=1_250_000,
        considered=[
            RouteAttempt("edge", ("e",), None, "tier_full"),
            RouteAttempt("cloud", ("up",), 0.1, None, 1_250_000, 0.02),
        ],
    )
    receipts.keep("r1", "acme", "m", 5, completion(placed, None))

    found = receipts.find("r1", "acme")
    assert (found.id, found.model, found.created) == ("r1", "m", 5)
    (choice,) = found.choices
    assert (choice.tier, choice.tier_reason, choice.scores) == ("cloud", "tier_full", {"up": 0.1})
    full, chosen = choice.considered
    assert (full.places, full.obstacle, full.predicted_cost) == (["e"], "tier_full", None)
    assert (chosen.predicted_cost, chosen.predicted_tpot_s, choice.predicted_cost) == (0.00125, 0.02, 0.00125)
    assert receipts.find("chatcmpl-r1", "acme") == found


def test_a_receipt_tells_time_cost_and_charge_with_the_prices_of_the_moment() -> None:
    receipts = Receipts(max_kept=4)
    first, second = Receipt("r1-0", cached_tokens=3), Receipt("r1-1")
    pool, up = PlacePrices(place="pool", per_hour=3600.0), PlacePrices(place="up", input=1.0, cached=0.5, output=2.0)
    first.spendings = [Spending(pool, 0.5), Spending(pool, 0.25, is_settled=True)]
    second.spendings = [Spending(up, provided_nano=40_000, is_settled=True)]
    answers = completion(first, second)
    answers.prompts[0][0].num_tokens, answers.prompts[0][1].num_tokens = 2, 5
    charge = Charge(7_100, Tariff(NANO, NANO // 10, NANO))
    receipts.keep("r1", "acme", "m", 5, answers, charge=charge)

    found = receipts.find("r1", "acme")

    assert [(choice.step_s, choice.cost, choice.charge) for choice in found.choices] == [
        (0.75, 0.75, 2.1e-6),
        (0.0, 4e-5, 5e-6),
    ]
    assert (found.cost, found.charge) == (0.75004, 7.1e-6)
    assert found.prices == RequestPrices(places=[pool, up], tariff=TariffPrices(input=1.0, cached=0.1, output=1.0))


SHARED = Tariffs([TariffRule(input=0.7, cached=0.3, output=1.3)])
SEQUENCES = st.tuples(st.booleans(), st.booleans(), st.integers(0, 30), st.integers(0, 30), st.integers(0, 8))


@given(st.lists(st.lists(SEQUENCES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_charges_of_the_choices_make_the_requests(prompts: list[list[tuple[bool, bool, int, int, int]]]) -> None:
    unused: Any = None
    made = []
    for sequences in prompts:
        choices = list[Choice]()
        for has_receipt, is_taken, num_tokens, num_prompt_tokens, num_held in sequences:
            receipt = Receipt("r", is_taken=is_taken, num_prompt_tokens=num_prompt_tokens, cached_tokens=3)
            is_placed = has_receipt and (not choices or choices[0].receipt is not None)
            choice = Choice(0, generation([1] * 9, max_tokens=16), TextAssembler(TOKENIZER))
            if is_placed:  # a provider may tell of more tokens than there were to be
                choice.receipt, choice.num_tokens = receipt, num_tokens
            if is_placed and not choices:
                choice.trial = Trial(
                    Escalation(EscalationConfig(tokens=8, min_mean_logprob=-1.0), ()), num_held=num_held
                )
            choices.append(choice)
        made.append(choices)
    answered = Completion(made, unused, unused, unused)
    charged_nano = Admission(unused, unused, unused, tariffs=SHARED).count("m", "", answered).charge_nano
    receipts = Receipts(max_kept=100)
    receipts.keep("r1", "acme", "m", 5, answered, charge=Charge(charged_nano, SHARED.find("m")))

    if any(choice.receipt is not None for choices in made for choice in choices):
        charges = [choice.charge or 0.0 for choice in receipts.find("r1", "acme").choices]
        assert all(charge >= 0 for charge in charges)
        assert sum(round(charge * NANO) for charge in charges) == charged_nano
    else:
        assert charged_nano == 0


def test_what_was_computed_at_the_edge_for_nothing_is_the_first_choices() -> None:
    answers = completion(Receipt("r1-0", is_taken=True), Receipt("r1-1", is_taken=True))
    first, second = answers.prompts[0]
    first.num_tokens, second.num_tokens = 2, 5
    rule = EscalationConfig(tokens=4, min_mean_logprob=-1.0)
    first.trial = Trial(Escalation(rule, ()), Outcome.ESCALATED, edge=EdgeAttempt(Receipt("e"), 1, 4))
    receipts = Receipts(max_kept=4)
    receipts.keep("r1", "acme", "m", 5, answers, charge=Charge(13_000, Tariff(NANO, NANO, NANO)))

    assert [choice.charge for choice in receipts.find("r1", "acme").choices] == [8e-6, 5e-6]


def test_a_prompt_that_nobody_took_is_charged_to_nobody() -> None:
    receipts = Receipts(max_kept=4)
    receipts.keep("r1", "acme", "m", 5, completion(Receipt("r1")), charge=Charge(0, Tariff(NANO, NANO, NANO)))

    found = receipts.find("r1", "acme")

    assert (found.choices[0].charge, found.charge) == (0.0, 0.0)


def test_a_receipt_grows_with_what_is_told_after_the_answer_s_end() -> None:
    receipts = Receipts(max_kept=4)
    placed = Receipt("r1", spendings=[Spending(PlacePrices(place="pool", per_hour=3600.0), 0.5)])
    receipts.keep("r1", "acme", "m", 5, completion(placed))
    placed.spendings[0].step_s = 0.75

    assert receipts.find("r1", "acme").cost == 0.75


def test_no_money_is_shown_where_a_place_has_no_price() -> None:
    receipts = Receipts(max_kept=4)
    priced, free = Spending(PlacePrices(place="pool", per_hour=3600.0), 0.5), Spending(PlacePrices(place="free"), 0.5)
    receipts.keep("r1", "acme", "m", 5, completion(Receipt("r1-0", spendings=[priced, free])))

    found = receipts.find("r1", "acme")

    assert (found.choices[0].step_s, found.choices[0].cost, found.cost, found.charge) == (1.0, None, None, None)


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


def test_a_request_counts_with_all_its_choices() -> None:
    receipts = Receipts(max_kept=4)
    receipts.keep("r1", "acme", "m", 5, completion(Receipt("r1")))
    receipts.keep("r2", "acme", "m", 5, completion(*[Receipt("r2")] * 4))

    assert len(receipts.find("r2", "acme").choices) == 4
    with pytest.raises(NotFound):
        receipts.find("r1", "acme")
    receipts.keep("r3", "acme", "m", 5, completion(*[Receipt("r3")] * 128))
    assert len(receipts.find("r3", "acme").choices) == 4, "no more than are kept at all"


def test_nobody_drives_out_what_others_have_of_their_even_share() -> None:
    receipts = Receipts(max_kept=8)
    for number in range(3):
        receipts.keep(f"light{number}", "light", "m", 5, completion(Receipt("l")))
    for number in range(100):
        receipts.keep(f"heavy{number}", "heavy", "m", 5, completion(Receipt("h")))
    receipts.keep("new0", "new", "m", 5, completion(*[Receipt("n")] * 2))

    assert all(receipts.find(f"light{number}", "light") for number in range(3))
    assert len(receipts.find("new0", "new").choices) == 2
    assert [number for number in range(100) if is_there(receipts, f"heavy{number}", "heavy")] == [97, 98, 99]


def is_there(receipts: Receipts, request_id: str, tenant: str) -> bool:
    try:
        receipts.find(request_id, tenant)
    except NotFound:
        return False
    return True


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=60))
def test_no_more_are_kept_than_allowed_and_each_tenant_has_the_latest_of_its_own(
    arrivals: list[tuple[str, int]],
) -> None:
    receipts = Receipts(max_kept=12)
    kept: dict[str, list[int]] = {}
    for number, (tenant, num_choices) in enumerate(arrivals):
        receipts.keep(str(number), tenant, "m", 5, completion(*[Receipt("r")] * num_choices))
        kept.setdefault(tenant, []).append(number)
        found = {name: [one for one in own if is_there(receipts, str(one), name)] for name, own in kept.items()}

        assert sum(arrivals[one][1] for own in found.values() for one in own) <= 12
        assert all(own == kept[name][len(kept[name]) - len(own) :] for name, own in found.items())
        assert found[tenant][-1:] == [number], "the newest is there"
