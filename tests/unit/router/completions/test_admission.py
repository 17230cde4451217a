"""What a request reserves and has used, and how the HTTP surface refuses one. The limits themselves:
tests/integration/test_limits."""

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.metrics import Metrics
from penstock.router.completions.admission import LATE_S, Admission, count_usage, default_max_tokens, limit_headers
from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.escalation import EdgeAttempt, Escalation, Outcome, Trial
from penstock.router.completions.text_assembly import TextAssembler
from penstock.router.config import EscalationConfig
from penstock.router.routing.request import Generation, Receipt
from penstock.router.routing.spending import Spending
from penstock.tenancy.tariffs import TariffRule, Tariffs
from penstock.tenancy.tenants import Limits, Settings
from penstock.tenancy.usage import Used
from penstock.tenancy.window import Verdict
from penstock.wire.accounts import PlacePrices
from penstock.wire.errors import InvalidRequest, RateLimited
from penstock.wire.frames import SamplingParams, pack_token_ids
from tests.unit.router.http_fakes import MODEL, TOKENIZER, FakeDispatcher, Script, running_gateway

ESCALATION = Escalation(EscalationConfig(tokens=4, min_mean_logprob=-1.0), ())
FORTY_TOKENS = Settings(limits=Limits(tokens_per_minute=40))


def choice(index: int, num_prompt_tokens: int, num_tokens: int, receipt: Receipt | None) -> Choice:
    ids = [1] * num_prompt_tokens
    generation = Generation(
        f"r-{index}", ("pool-a",), pack_token_ids(ids), len(ids), SamplingParams(10), "tenant-1", b"salt", 0.0
    )
    return Choice(index, generation, TextAssembler(TOKENIZER), receipt, num_tokens)


def completion(*prompts: list[Choice]) -> Completion:
    fake: Any = None
    return Completion(prompts, FakeDispatcher(Script()), lambda: 0.0, fake)


def receipt(cached_tokens: int = 0, num_prompt_tokens: int | None = None) -> Receipt:
    return Receipt("r", cached_tokens=cached_tokens, num_prompt_tokens=num_prompt_tokens, is_taken=True)


def test_a_prompt_counts_once_whatever_its_choices_and_not_at_all_where_it_never_began() -> None:
    answered = [choice(0, 10, 5, receipt(cached_tokens=8)), choice(1, 10, 7, receipt(cached_tokens=9))]
    never = [choice(2, 100, 0, None), choice(3, 100, 0, None)]

    assert count_usage(completion(answered, never)) == Used(1, 10, 8, 12)
    assert count_usage(completion(never)) == Used()


def test_what_failed_before_its_first_token_has_used_nothing_and_what_was_cut_there_its_prompt() -> None:
    lost = receipt()
    lost.is_taken = False

    assert count_usage(completion([choice(0, 10, 0, lost)])) == Used()
    assert count_usage(completion([choice(0, 10, 3, lost)])) == Used(1, 10, 0, 3)
    assert count_usage(completion([choice(0, 10, 0, receipt())])) == Used(1, 10, 0, 0)


class Noting:
    """A limiter that keeps what running requests have come to."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def note(self, tenant_id: str, request_id: str, charged_nano: int) -> None:
        self.noted.append(charged_nano)


class Written:
    """A usage log that keeps the sums."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str, str], Used] = {}
        self.num_adds = 0

    def add(self, tenant_id: str, model: str, adapter: str, used: Used) -> None:
        key = tenant_id, model, adapter
        self.sums[key] = self.sums.get(key, Used()).plus(used)
        self.num_adds += 1


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.integers(0, 12))
def test_what_running_answers_use_is_written_while_they_run_and_the_rest_at_their_end(
    progress: list[tuple[int, bool]], num_before_kill: int
) -> None:
    unused: Any = None
    written: Any = Written()
    admission = Admission(unused, written, unused)
    answer, other = choice(0, 10, 0, receipt(cached_tokens=8)), choice(0, 7, 3, receipt())
    running, beside = completion([answer]), completion([other])
    admission.watch("t", "r", "m", running, "a")
    admission.watch("t", "other", "m", beside)
    at_last_addition = Used()
    for number, (num_tokens, is_added) in enumerate(progress):
        answer.num_tokens += num_tokens
        if is_added:
            admission.add_running_usage()
            at_last_addition = count_usage(running) if answer.num_tokens else Used()
        if number == num_before_kill:  # nothing is lost but what came since
            assert written.sums.get(("t", "m", "a"), Used()) == at_last_addition
    admission.settle("t", None, "r", "m", running, "a")
    admission.settle("t", None, "other", "m", beside)

    assert written.sums == {("t", "m", "a"): count_usage(running), ("t", "m", ""): count_usage(beside)}
    num_adds = written.num_adds
    admission.add_running_usage()
    assert written.num_adds == num_adds


def test_what_a_provider_counts_in_the_end_replaces_what_was_written_meanwhile() -> None:
    unused: Any = None
    written: Any = Written()
    admission = Admission(unused, written, unused)
    answer = choice(0, 10, 9, receipt())
    running = completion([answer])
    admission.watch("t", "r", "m", running)
    admission.add_running_usage()
    answer.num_tokens = 6
    answer.receipt = receipt(num_prompt_tokens=12)
    admission.settle("t", None, "r", "m", running)

    assert written.sums == {("t", "m", ""): Used(1, 12, 0, 6)}


def spent(seconds: float, *, is_settled: bool = True) -> Spending:
    """A spending at a unit per second."""
    return Spending(PlacePrices(place="pool-a", per_hour=3600.0), seconds, is_settled=is_settled)


def test_cost_counts_every_attempt_and_a_search_once_and_also_what_was_lost_unused() -> None:
    lost, search = receipt(), receipt()
    lost.is_taken = False
    lost.spendings = [spent(1.0), spent(0.5)]
    search.spendings = [spent(2.0)]

    assert count_usage(completion([choice(0, 10, 0, lost)])) == Used(cost_nano=1_500_000_000)
    assert count_usage(completion([choice(0, 10, 2, search), choice(1, 10, 2, search)])).cost_nano == 2_000_000_000


def test_what_an_answer_that_was_broken_off_costs_in_the_end_is_written_when_it_is_told() -> None:
    unused: Any = None
    written: Any = Written()
    admission = Admission(unused, written, unused)
    told = receipt()
    told.spendings = [spent(1.0, is_settled=False)]
    running = completion([choice(0, 10, 3, told)])
    admission.watch("t", "r", "m", running)
    admission.settle("t", None, "r", "m", running)

    assert written.sums["t", "m", ""].cost_nano == 1_000_000_000

    told.spendings[0].step_s, told.spendings[0].is_settled = 1.25, True
    admission.add_running_usage()
    admission.add_running_usage()

    assert written.sums["t", "m", ""] == Used(1, 10, 0, 3, 1_250_000_000)
    assert admission._late == []


def test_what_is_never_told_is_waited_for_a_while() -> None:
    now = 100.0
    unused: Any = None
    written: Any = Written()
    admission = Admission(unused, written, unused, clock=lambda: now)
    silent = receipt()
    silent.spendings = [spent(1.0, is_settled=False)]
    admission.follow_cost("t", "m", "", completion([choice(0, 10, 3, silent)]), Used(1, 10, 0, 3, 1_000_000_000))
    admission.add_running_usage()

    assert len(admission._late) == 1

    now += LATE_S
    admission.add_running_usage()

    assert admission._late == []
    assert written.sums == {}


def test_what_is_charged_counts_by_model() -> None:
    unused: Any = None
    written: Any = Written()
    metrics = Metrics()
    admission = Admission(unused, written, metrics)
    admission.add_usage("t", "m", "a", Used(1, 10, 0, 3, 0, 1_500_000_000))
    admission.add_usage("t", "m", "", Used(0, 0, 0, 3, 0, 500_000_000))

    assert metrics.registry.get_sample_value("penstock_charge_total", {"model": "m"}) == 2.0
    assert written.sums["t", "m", "a"].charge_nano == 1_500_000_000


def test_a_request_that_is_corrected_downward_counts_what_it_is_charged_in_the_end() -> None:
    written: Any = Written()
    metrics = Metrics()
    limiter: Any = Noting()
    admission = Admission(limiter, written, metrics, tariffs=Tariffs([TariffRule(input=0.0, output=1_000_000.0)]))
    answer = choice(0, 10, 9, receipt())
    running = completion([answer])
    admission.watch("t", "r", "m", running)
    admission.add_running_usage()
    answer.num_tokens = 6
    admission.settle("t", None, "r", "m", running)

    assert limiter.noted == [9_000_000_000]
    assert metrics.registry.get_sample_value("penstock_charge_total", {"model": "m"}) == 6.0
    assert written.sums["t", "m", ""].charge_nano == 6_000_000_000


async def test_requests_leave_nothing_behind_to_be_counted_again() -> None:
    async with running_gateway() as world:
        admission = world.admission
        assert (await world.chat()).status_code == 200
        assert (await world.chat(stream=True)).status_code == 200
        await world.chat(model="another")

        assert admission._running == {}


def test_tokens_are_counted_as_whoever_answered_counts() -> None:
    assert count_usage(completion([choice(0, 10, 5, receipt(num_prompt_tokens=13))])) == Used(1, 13, 0, 5)


@pytest.mark.parametrize(
    ("limit", "prompt", "sequences", "expected"),
    [(None, 10, 1, 1024), (2000, 10, 1, 1024), (100, 20, 1, 80), (100, 20, 4, 20), (10, 20, 1, 1)],
)
def test_an_answer_without_max_tokens_is_bounded_so_that_it_fits(
    limit: int | None, prompt: int, sequences: int, expected: int
) -> None:
    assert default_max_tokens(Limits(tokens_per_minute=limit), 1024, prompt, sequences) == expected


def test_headers_tell_of_the_limits_that_there_are() -> None:
    verdict = Verdict(True, requests=3, tokens=120, reset_requests_ms=950, reset_tokens_ms=60_500)

    both = dict(limit_headers(Limits(requests_per_minute=10, tokens_per_minute=100), verdict))
    assert both == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"7",
        b"x-ratelimit-reset-requests": b"950ms",
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"60.5s",
    }
    assert limit_headers(Limits(max_parallel=1), verdict) == []


async def test_a_model_that_the_tenant_may_not_use_is_forbidden_and_not_listed() -> None:
    async with running_gateway(settings=Settings(models=("another",))) as world:
        refused = await world.chat()
        listed = await world.client.get("/v1/models")
        page = await world.client.get(f"/v1/models/{MODEL}")

        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert listed.json()["data"] == []
        assert page.status_code == 403
        assert world.dispatcher.generations == []


async def test_what_can_never_fit_and_what_nobody_can_check_is_refused_before_anything_is_asked() -> None:
    async with running_gateway(settings=FORTY_TOKENS) as world:
        never = await world.chat(max_tokens=40)
        unknown = await world.complete(max_tokens=1)

        assert never.status_code == 400
        assert "can never fit" in never.json()["error"]["message"]
        assert unknown.status_code == 503, "its Redis is nowhere"
        assert unknown.headers["retry-after"] == "1"
        assert world.dispatcher.generations == []


class Refusing:
    """A limiter that refuses everything for `wait_ms`, and keeps what it was asked."""

    def __init__(self, wait_ms: int) -> None:
        self.verdict = Verdict(False, "parallel", wait_ms, parallel=3)
        self.asked: list[tuple[int, int]] = []

    async def reserve(
        self, tenant_id: str, limits: Limits, request_id: str, tokens: int, sequences: int = 1, nano: int = 0
    ) -> Verdict:
        self.asked.append((tokens, sequences))
        return self.verdict


async def test_every_choice_of_every_prompt_counts_among_those_at_once() -> None:
    limiter: Any = Refusing(wait_ms=1000)
    unused: Any = None
    prompts = [[choice(0, 10, 0, None), choice(1, 10, 0, None)], [choice(2, 5, 0, None), choice(3, 5, 0, None)]]
    admission = Admission(limiter, unused, Metrics(), Random(0))
    with pytest.raises(RateLimited, match=r"limit of 5 sequences at once .* 3 are under way, .* has 4") as refused:
        await admission.admit("acme", Limits(max_parallel=5), "r", prompts)
    with pytest.raises(InvalidRequest, match=r"4 sequences.* never fit into the limit of 3"):
        await admission.admit("acme", Limits(max_parallel=3), "r", prompts)

    assert limiter.asked == [(10 + 5 + 4 * 10, 4)]
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1.0


async def test_those_who_were_refused_together_do_not_come_back_together() -> None:
    limiter: Any = Refusing(wait_ms=20_000)
    unused: Any = None
    admission, waits = Admission(limiter, unused, Metrics(), Random(0)), set()
    for _ in range(50):
        with pytest.raises(RateLimited) as refused:
            await admission.admit("acme", Limits(max_parallel=5), "r", [[choice(0, 10, 0, None)]])
        waits.add(math.ceil(refused.value.retry_after_s or 0.0))

    assert min(waits) >= 20
    assert max(waits) <= 25
    assert len(waits) >= 4


async def test_usage_can_not_be_read_without_redis() -> None:
    async with running_gateway() as world:
        assert (await world.chat()).status_code == 200
        assert (await world.client.get("/v1/usage")).status_code == 503


async def test_an_attempt_at_the_edge_is_reserved_beside_the_answer() -> None:
    def prompts(obstacle: Outcome | None) -> list[list[Choice]]:
        tried = choice(0, 10, 0, None)
        rule = EscalationConfig(tokens=4, min_mean_logprob=-1.0)
        tried.trial = Trial(Escalation(rule, (), obstacle=obstacle))
        return [[tried, choice(1, 10, 0, None)]]

    async with running_gateway(num_gateways=1) as world:

        async def can_never_fit(limit: int, obstacle: Outcome | None = None) -> bool:
            try:
                await world.admission.admit("tenant-1", Limits(tokens_per_minute=limit), "r", prompts(obstacle))
            except InvalidRequest:
                return True
            return False

        assert await can_never_fit(10 + 4 + 10 + 20 - 1)
        assert not await can_never_fit(10 + 4 + 10 + 20)
        assert not await can_never_fit(10 + 20, Outcome.NOT_ALLOWED)


def test_what_was_held_in_vain_counts_beside_the_answer_and_what_is_shown_counts_once() -> None:
    answered = choice(0, 10, 5, receipt(cached_tokens=8, num_prompt_tokens=12))
    answered.trial = Trial(ESCALATION, num_held=4)

    assert count_usage(completion([answered])) == Used(1, 12, 8, 5 + 4)  # not decided
    answered.trial.outcome = Outcome.KEPT
    assert count_usage(completion([answered])) == Used(1, 12, 8, 5)
    answered.trial.outcome, answered.trial.edge = Outcome.ESCALATED, EdgeAttempt(receipt(cached_tokens=6), 10, 4)
    assert count_usage(completion([answered])) == Used(1, 12 + 10, 8 + 6, 5 + 4)


def test_what_was_sent_on_and_nobody_has_taken_counts_where_it_was_computed_and_not_where_it_was_sent() -> None:
    waiting = receipt(num_prompt_tokens=12)
    waiting.is_taken = False
    sent = choice(0, 10, 0, waiting)
    sent.trial = Trial(ESCALATION, num_held=4, edge=EdgeAttempt(receipt(cached_tokens=6), 10, 4))

    assert count_usage(completion([sent])) == Used(1, 10, 6, 4)
    waiting.is_taken = True
    assert count_usage(completion([sent])) == Used(1, 10 + 12, 6, 4)


def test_what_is_held_of_a_replica_that_was_lost_counts_with_its_prompt_until_another_takes_it_up() -> None:
    lost = receipt(cached_tokens=6)
    lost.is_taken = False
    held = choice(0, 10, 0, lost)
    held.trial = Trial(ESCALATION, num_held=2)

    assert count_usage(completion([held])) == Used(1, 10, 6, 2)
    held.trial.num_held = 0
    assert count_usage(completion([held])) == Used()


def test_a_failure_of_the_platforms_drops_what_is_not_decided_and_nothing_else() -> None:
    edge = EdgeAttempt(receipt(), 10, 4)
    sent, decided = choice(0, 10, 0, receipt()), choice(1, 10, 0, receipt())
    sent.trial = Trial(ESCALATION, num_held=4, edge=edge)
    decided.trial = Trial(ESCALATION, Outcome.ESCALATED, num_held=4, edge=edge)
    failed = completion([sent], [decided], [choice(2, 10, 0, None)])
    failed.drop_held()

    assert count_usage(failed) == Used(1, 10 + (10 + 10), 0, 4)
