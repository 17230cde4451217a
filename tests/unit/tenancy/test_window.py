"""The limits' arithmetic against a model that remembers every request, and by examples."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tenancy.tenants import Limits
from penstock.tenancy.window import (
    PARALLEL_WAIT_MS,
    LimitLedger,
    LimitRequest,
    Settled,
    UnsettledUsage,
    Window,
    share_limits,
)

WINDOW = Window(bucket_ms=10, num_buckets=6, lease_ms=1_000_000)
WINDOW_MS = 60
START_MS = 1_000_003
LIMITS = Limits(requests_per_minute=4, tokens_per_minute=100)

Steps = st.lists(st.tuples(st.integers(0, 45), st.integers(1, 60), st.integers(0, 60), st.integers(0, 6)), max_size=60)
"""Pause, tokens wanted, tokens used at most, and how many requests later it is settled."""


class Admitted:
    """A request as the model remembers it."""

    def __init__(self, at_ms: int, tokens: int) -> None:
        self.at_ms = at_ms
        self.tokens = tokens


def limit_request(name: str, tokens: int = 1, limits: Limits = LIMITS) -> LimitRequest:
    return LimitRequest(id=name, tokens=tokens, limits=limits)


@given(Steps)
@settings(max_examples=300, deadline=None)
def test_no_window_holds_more_than_the_limit_and_nothing_is_refused_that_fits_a_window_and_a_bucket(
    steps: list[tuple[int, int, int, int]],
) -> None:
    ledger, now_ms = LimitLedger(WINDOW), START_MS
    admitted: list[Admitted] = []
    running: list[tuple[int, str, Admitted, int]] = []

    def within(span_ms: int) -> tuple[int, int]:
        found = [request for request in admitted if now_ms - request.at_ms < span_ms]
        return len(found), sum(request.tokens for request in found)

    for number, (pause_ms, wanted, used, delay) in enumerate(steps):
        now_ms += pause_ms
        for due in [entry for entry in running if entry[0] <= number]:
            running.remove(due)
            _, name, request, tokens = due
            request.tokens = tokens
            ledger.apply(LimitRequest(settled=[Settled(name, tokens)]), now_ms)
        verdict = ledger.apply(limit_request(f"r{number}", wanted), now_ms)
        long_requests, long_tokens = within(WINDOW_MS + WINDOW.bucket_ms)
        if verdict.is_admitted:
            request = Admitted(now_ms, wanted)
            admitted.append(request)
            running.append((number + delay, f"r{number}", request, min(used, wanted)))
        else:
            assert long_requests + 1 > 4 or long_tokens + wanted > 100
        requests, tokens = within(WINDOW_MS)
        assert requests <= 4
        assert tokens <= 100


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), min_size=1, max_size=30))
@settings(max_examples=300, deadline=None)
def test_a_refused_request_fits_when_its_wait_is_over_and_not_a_millisecond_before(
    steps: list[tuple[int, int]],
) -> None:
    ledger, now_ms = LimitLedger(WINDOW), START_MS
    for number, (pause_ms, wanted) in enumerate(steps):
        now_ms += pause_ms
        verdict = ledger.apply(limit_request(f"r{number}", wanted), now_ms)
        if not verdict.is_admitted:
            assert verdict.wait_ms is not None
            assert 0 < verdict.wait_ms <= WINDOW_MS + WINDOW.bucket_ms
            assert not ledger.apply(limit_request("early", wanted), now_ms + verdict.wait_ms - 1).is_admitted
            now_ms += verdict.wait_ms
            assert ledger.apply(limit_request(f"again{number}", wanted), now_ms).is_admitted


def test_what_was_not_used_may_be_used_by_others_at_once() -> None:
    ledger = LimitLedger(WINDOW)
    assert ledger.apply(limit_request("a", 90), START_MS).is_admitted
    assert ledger.apply(limit_request("b", 20), START_MS).limit == "tokens"

    verdict = ledger.apply(LimitRequest(settled=[Settled("a", 80)], id="b", tokens=20, limits=LIMITS), START_MS)
    assert verdict.is_admitted
    assert verdict.tokens == 100


def test_settling_twice_or_what_is_unknown_changes_nothing() -> None:
    ledger = LimitLedger(WINDOW)
    ledger.apply(limit_request("a", 90), START_MS)
    for name in ("a", "a", "never"):
        settled = LimitRequest(settled=[Settled(name, 50)], limits=Limits(max_parallel=9))
        verdict = ledger.apply(settled, START_MS)

    assert (verdict.requests, verdict.tokens, verdict.parallel) == (1, 50, 0)


def test_asking_again_for_an_admitted_request_charges_it_once() -> None:
    ledger = LimitLedger(WINDOW)
    verdicts = [ledger.apply(limit_request("a", 90), START_MS) for _ in range(3)]

    assert [verdict.is_admitted for verdict in verdicts] == [True] * 3
    assert (verdicts[-1].requests, verdicts[-1].tokens) == (1, 90)


def test_a_refused_request_leaves_nothing_behind() -> None:
    ledger = LimitLedger(WINDOW)
    before = ledger.apply(limit_request("a", 90), START_MS)
    assert not ledger.apply(limit_request("b", 90), START_MS).is_admitted

    assert ledger.apply(LimitRequest(), START_MS)[3:] == before[3:]


def test_every_sequence_of_a_request_counts_among_those_at_once() -> None:
    ledger, limits = LimitLedger(WINDOW), Limits(max_parallel=5)
    big = LimitRequest(id="big", sequences=4, limits=limits)
    assert ledger.apply(big, START_MS).parallel == 4
    refused = ledger.apply(LimitRequest(id="two", sequences=2, limits=limits), START_MS)
    one = ledger.apply(LimitRequest(id="one", limits=limits), START_MS)

    assert (refused.is_admitted, refused.limit, refused.parallel) == (False, "parallel", 4)
    assert (one.is_admitted, one.parallel) == (True, 5)
    ledger.apply(LimitRequest(settled=[Settled("big", 9)]), START_MS)
    assert ledger.apply(LimitRequest(id="four", sequences=4, limits=limits), START_MS).parallel == 5


def test_a_request_that_generates_nothing_is_counted_and_is_none_of_those_at_once() -> None:
    ledger, limits = LimitLedger(WINDOW), Limits(max_parallel=1, requests_per_minute=3)
    read = ledger.apply(LimitRequest(id="read", sequences=0, limits=limits), START_MS)
    chat = ledger.apply(LimitRequest(id="chat", limits=limits), START_MS)
    refused = ledger.apply(LimitRequest(id="another", limits=limits), START_MS)

    assert (read.is_admitted, read.requests, read.parallel) == (True, 1, 0)
    assert (chat.is_admitted, chat.requests, chat.parallel) == (True, 2, 1)
    assert refused.limit == "parallel"


def test_requests_at_once_are_counted_until_they_are_settled_or_their_lease_is_over() -> None:
    window = Window(bucket_ms=10, num_buckets=6, lease_ms=100)
    ledger, limits = LimitLedger(window), Limits(max_parallel=2)
    ledger.apply(limit_request("a", limits=limits), START_MS)
    ledger.apply(limit_request("b", limits=limits), START_MS)
    refused = ledger.apply(limit_request("c", limits=limits), START_MS)
    assert (refused.is_admitted, refused.limit, refused.wait_ms) == (False, "parallel", PARALLEL_WAIT_MS)

    ledger.apply(LimitRequest(renewed=["a"]), START_MS + 60)
    assert not ledger.apply(limit_request("c", limits=limits), START_MS + 99).is_admitted
    assert ledger.apply(limit_request("c", limits=limits), START_MS + 100).is_admitted, "the lease of b is over"
    assert not ledger.apply(limit_request("d", limits=limits), START_MS + 100).is_admitted


def test_what_was_admitted_elsewhere_is_charged_at_its_age() -> None:
    ledger = LimitLedger(WINDOW)
    verdict = ledger.apply(
        LimitRequest(
            unsettled=[
                UnsettledUsage("", 40, 2, 50, False),
                UnsettledUsage("a", 10, 1, 30, True),
                UnsettledUsage("", 100, 1, 99, False),
            ],
            limits=Limits(max_parallel=9),
        ),
        START_MS,
    )
    assert (verdict.requests, verdict.tokens, verdict.parallel) == (3, 80, 1)

    later = ledger.apply(LimitRequest(settled=[Settled("a", 10)]), START_MS + 35)
    assert (later.requests, later.tokens) == (1, 10)


def test_more_than_the_whole_limit_never_fits() -> None:
    verdict = LimitLedger(WINDOW).apply(limit_request("a", 101), START_MS)

    assert not verdict.is_admitted
    assert verdict.wait_ms is None


def test_an_empty_book_says_so() -> None:
    ledger = LimitLedger(WINDOW)
    assert ledger.is_empty
    ledger.apply(limit_request("a"), START_MS)
    assert not ledger.is_empty
    ledger.apply(LimitRequest(settled=[Settled("a", 1)]), START_MS + 70)

    assert ledger.is_empty


def test_a_share_is_rounded_down_and_no_limit_stays_none() -> None:
    assert share_limits(Limits(requests_per_minute=7, tokens_per_minute=1), 2) == Limits(
        requests_per_minute=3, tokens_per_minute=0
    )
