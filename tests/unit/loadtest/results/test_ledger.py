"""Every way an account can fail to balance is found, and nothing else is."""

import math

import msgspec
import pytest

from penstock_loadtest.results import ledger as entries
from penstock_loadtest.results.ledger import Repeat, bound_metered_tokens, check_ledger
from penstock_loadtest.results.records import Record


def answered(index: int = 0, tokens: int = 8, **changes: object) -> Record:
    """A request that went well, but for the changes."""
    record = Record(
        index=index,
        intended_s=float(index),
        sent_s=float(index),
        first_s=index + 0.1,
        end_s=index + 0.2,
        outcome="finished",
        status=200,
        finish_reason="length",
        prompt_tokens=100,
        cached_tokens=64,
        tokens=tokens,
        tokens_from="ids",
        metered_tokens=tokens,
        wanted_tokens=tokens,
        answer_digest="aa",
        request_id=f"r{index}",
    )
    return msgspec.structs.replace(record, **changes)


def kinds(
    *records: Record,
    repeats: list[Repeat] | None = None,
    exact: bool | None = None,
    metered: dict[str, int] | None = None,
) -> dict[str, int]:
    found = check_ledger(records, repeats or [], exact=exact, metered=metered)
    assert found.is_balanced == (not found.violations)
    return {violation.kind: violation.count for violation in found.violations}


def test_a_run_that_went_well_balances() -> None:
    found = check_ledger([answered(index) for index in range(3)], exact=True)

    assert found.is_balanced
    assert (found.requests, found.accepted, found.ends) == (3, 3, {"finished": 3})
    assert found.tokens == entries.Tokens(verified=24, matched=24)
    assert found.sentences == [
        "The ledger balances: each of 3 accepted requests ended in exactly one way.",
        "24 delivered tokens were counted by their ids; 24 of them equal their request's usage exactly.",
    ]


def test_a_run_without_requests_balances() -> None:
    assert check_ledger([], exact=None).is_balanced


def test_what_the_client_saw_against_the_protocol_becomes_a_kind_of_its_own() -> None:
    assert kinds(answered(0, violations=["two ends"]), answered(1, violations=["two ends", "no [DONE]"])) == {
        "two ends": 2,
        "no [DONE]": 1,
    }


def test_the_same_violation_twice_in_one_answer_counts_once() -> None:
    assert kinds(answered(violations=["two ends", "two ends"])) == {"two ends": 1}


def test_the_first_five_requests_of_a_kind_are_named() -> None:
    found = check_ledger([answered(index, violations=["two ends"]) for index in range(9)], exact=None)

    assert found.violations[0].count == 9
    assert [(example.index, example.request_id) for example in found.violations[0].examples] == [
        (i, f"r{i}") for i in range(5)
    ]
    assert found.sentences[:2] == [
        "The ledger does not balance: 9 violations in 9 accepted requests.",
        "9 x two ends: request 0 (r0), 1 (r1), 2 (r2), 3 (r3), 4 (r4), ....",
    ]


def test_one_token_more_metered_than_delivered_is_found() -> None:
    assert kinds(answered(metered_tokens=9)) == {entries.TOKENS_DIFFER: 1}


def test_one_token_less_metered_than_delivered_is_found() -> None:
    assert kinds(answered(metered_tokens=7)) == {entries.TOKENS_DIFFER: 1}


@pytest.mark.parametrize("source", ["usage", "chunks"])
def test_tokens_without_ids_are_unverified_and_never_compared(source: str) -> None:
    found = check_ledger([answered(tokens=8, tokens_from=source, metered_tokens=99)], exact=True)

    assert found.is_balanced
    assert found.tokens.verified == 0
    assert found.tokens.by_usage + found.tokens.by_chunks == 8
    assert any("8 delivered tokens are unverified" in sentence for sentence in found.sentences)


def test_an_answer_whose_usage_never_came_is_counted_as_unmetered() -> None:
    found = check_ledger([answered(metered_tokens=None)], exact=None)

    assert found.is_balanced
    assert (found.tokens.verified, found.tokens.matched, found.tokens.unmetered) == (8, 0, 8)


def test_a_cancelled_request_may_be_metered_for_more_than_reached_us() -> None:
    cancelled = answered(outcome="cancelled", finish_reason=None, wanted_tokens=64)

    assert kinds(msgspec.structs.replace(cancelled, metered_tokens=20)) == {}
    assert kinds(msgspec.structs.replace(cancelled, metered_tokens=7)) == {entries.METERED_LESS: 1}


def test_more_tokens_than_asked_for_are_found() -> None:
    assert kinds(answered(tokens=9, wanted_tokens=8)) == {entries.TOO_MANY: 1}
    assert kinds(answered(tokens=9, wanted_tokens=8, tokens_from="chunks")) == {}


def test_a_finish_without_a_reason_is_found() -> None:
    assert kinds(answered(finish_reason=None)) == {entries.NO_FINISH_REASON: 1}


def test_an_accepted_request_that_never_ended_is_found_unless_the_run_ended_first() -> None:
    open_one = answered(outcome="unfinished", finish_reason=None, metered_tokens=None, wanted_tokens=64)

    assert kinds(open_one) == {entries.NOT_ENDED: 1}
    found = check_ledger([msgspec.structs.replace(open_one, is_cut=True)], exact=None)
    assert found.is_balanced
    assert found.sentences[0] == (
        "The ledger balances: each of 1 accepted requests ended in exactly one way, but 1 that were still open "
        "when the run ended."
    )


def test_an_error_is_an_end() -> None:
    assert (
        kinds(
            answered(outcome="failed", finish_reason=None, metered_tokens=None, error="engine_fault", wanted_tokens=64)
        )
        == {}
    )


def test_what_was_not_accepted_owes_nothing() -> None:
    shed = answered(
        0, outcome="shed", status=503, tokens=0, tokens_from="chunks", finish_reason=None, metered_tokens=None
    )
    refused = answered(
        1,
        outcome="unfinished",
        status=None,
        tokens=0,
        finish_reason=None,
        metered_tokens=None,
        violations=["no [DONE]"],
    )
    found = check_ledger([shed, refused], exact=None)

    assert found.is_balanced
    assert (found.requests, found.accepted) == (2, 0)


def test_a_request_recorded_twice_is_found() -> None:
    assert kinds(answered(4), answered(4)) == {entries.RECORDED_TWICE: 1}


def repeat(index: int, first: str | None, second: str | None) -> Repeat:
    return Repeat(answered(index, answer_digest=first), answered(index + 100, answer_digest=second))


def test_a_repeat_that_differs_fails_an_exact_server() -> None:
    assert kinds(repeats=[repeat(0, "a", "a"), repeat(1, "a", "b")], exact=True) == {entries.ANSWERS_DIFFER: 1}


@pytest.mark.parametrize("exact", [False, None])
def test_a_repeat_that_differs_is_a_share_on_any_other_server(exact: bool | None) -> None:
    found = check_ledger([], [repeat(0, "a", "a"), repeat(1, "a", "b"), repeat(2, "a", None)], exact=exact)

    assert found.is_balanced
    assert found.repeats == entries.Repeats(compared=2, different=1, not_compared=1, share=0.5, is_fatal=False)
    assert found.sentences[-1] == (
        "1 of 2 repeated requests had the same answer (50.0% differ; the server does not claim to be exact); 1 "
        "could not be compared."
    )


def test_a_repeat_that_did_not_finish_is_not_compared() -> None:
    broken = Repeat(answered(0, answer_digest="a"), answered(1, outcome="failed", answer_digest="b"))
    found = check_ledger([], [broken], exact=True)

    assert found.is_balanced
    assert found.sentences[-1] == "None of 1 repeated requests could be compared."


def test_a_tenants_meter_must_show_what_its_finished_requests_got() -> None:
    records = [answered(0, tenant="a"), answered(1, tenant="b"), answered(2, tenant="a")]

    assert kinds(*records, metered={"a": 16, "b": 8}) == {}
    assert kinds(*records, metered={"a": 15, "b": 8}) == {f"{entries.TENANT_DIFFERS}: a": 1}
    assert kinds(*records, metered={"a": 16}) == {f"{entries.TENANT_DIFFERS}: b": 1}


def test_a_tenants_meter_may_show_more_only_for_requests_that_were_cut_short() -> None:
    records = [answered(0), answered(1, outcome="cancelled", finish_reason=None, metered_tokens=None, wanted_tokens=64)]

    assert kinds(*records, metered={"default": 16}) == {}
    assert kinds(*records, metered={"default": 72}) == {}
    assert kinds(*records, metered={"default": 15}) == {f"{entries.TENANT_DIFFERS}: default": 1}
    assert kinds(*records, metered={"default": 73}) == {f"{entries.TENANT_DIFFERS}: default": 1}
    assert check_ledger(records, exact=None, metered={"default": 20}).sentences[-1] == (
        "The meter of tenant default shows 20 completion tokens and agrees with the 16 to 72 expected."
    )


@pytest.mark.parametrize(
    ("record", "bounds"),
    [
        (answered(), (8, 8)),
        (answered(tokens_from="usage"), (8, 8)),
        (answered(tokens=6, tokens_from="chunks", metered_tokens=8), (8, 8)),
        (answered(tokens=6, tokens_from="chunks", metered_tokens=None, wanted_tokens=64), (0, 64)),
        (answered(outcome="failed", wanted_tokens=64), (8, 64)),
        (answered(outcome="failed", wanted_tokens=None), (8, None)),
        (answered(outcome="failed", status=500, tokens=0), (0, 0)),
        (answered(outcome="shed", status=429, tokens=0), (0, 0)),
        (answered(outcome="unfinished", status=None, sent_s=None, tokens=0), (0, 0)),
        (answered(outcome="failed", status=None, tokens=0, wanted_tokens=64), (0, 64)),
    ],
)
def test_what_a_meter_may_show_for_one_request(record: Record, bounds: tuple[int, int | None]) -> None:
    assert bound_metered_tokens(record) == bounds


def test_totals_are_per_tenant() -> None:
    declined = answered(
        2, tenant="b", outcome="shed", status=429, tokens=0, prompt_tokens=None, cached_tokens=None, metered_tokens=None
    )
    a, b = check_ledger([answered(0, tenant="b"), answered(1, tenant="a"), declined], exact=None).tenants

    assert (a.tenant, b.tenant) == ("a", "b")
    assert (b.requests, b.accepted, b.prompt_tokens, b.cached_tokens, b.completion_tokens, b.usage_tokens) == (
        2,
        1,
        100,
        64,
        8,
        8,
    )


def test_the_ledger_survives_json() -> None:
    found = check_ledger(
        [answered(0, violations=["two ends"])], [repeat(0, "a", "b")], exact=False, metered={"default": 8}
    )

    assert msgspec.convert(msgspec.to_builtins(found), entries.Ledger) == found
    assert math.isclose(found.repeats.share or 0, 1.0)
