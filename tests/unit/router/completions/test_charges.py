"""Charges and budgets as requests meet them: what is reserved, settled and refused. The ledger itself:
tests/integration/test_budgets."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.metrics import Metrics
from penstock.router.completions.admission import SHOWN, Admission, count_most_nano, default_max_tokens
from penstock.tenancy.tariffs import TariffRule, Tariffs, most_nano
from penstock.tenancy.tenants import Limits
from penstock.tenancy.usage import Used
from penstock.tenancy.window import PARALLEL_WAIT_MS, Verdict
from penstock.wire.errors import BudgetSpent, InvalidRequest, error_body, http_error
from penstock.wire.money import MAX_BUDGET, NANO
from tests.unit.router.completions.test_admission import Written, choice, completion, receipt

TARIFFS = Tariffs([TariffRule(model="m", adapter="", input=1, cached=0.25, output=2), TariffRule(input=3, output=3)])
BUDGET = Limits(budget=1.5)
MONTH_MS = 20 * 86_400_000


class FakeLimiter:
    """A limiter that answers as it is told, and keeps what it was asked."""

    def __init__(self, verdict: Verdict | None = None) -> None:
        self.verdict = verdict or Verdict(True)
        self.reserved: list[int] = []
        self.settled: dict[str, tuple[int, int]] = {}
        self.noted: dict[str, int] = {}

    async def reserve(
        self, tenant_id: str, limits: Limits, request_id: str, tokens: int, sequences: int = 1, nano: int = 0
    ) -> Verdict:
        self.reserved.append(nano)
        return self.verdict

    def settle(self, tenant_id: str, request_id: str, used_tokens: int, charged_nano: int = 0) -> None:
        self.settled[request_id] = used_tokens, charged_nano

    def list_budgets(self) -> list[tuple[str, int, int]]:
        return [("*providers", 9, 10), *((f"t{number}", number, 100) for number in range(30))]

    def note(self, tenant_id: str, request_id: str, charged_nano: int) -> None:
        self.noted[request_id] = charged_nano


def admission_of(limiter: FakeLimiter, written: Written | None = None) -> tuple[Admission, Metrics]:
    limited: Any = limiter
    log: Any = written or Written()
    metrics = Metrics()
    return Admission(limited, log, metrics, Random(0), tariffs=TARIFFS), metrics


async def test_prompt_and_bound_of_all_choices_are_reserved_and_what_was_used_is_charged() -> None:
    limiter, written = FakeLimiter(), Written()
    admission, _ = admission_of(limiter, written)
    answered = completion([choice(0, 10, 5, receipt(cached_tokens=8)), choice(1, 10, 7, receipt())])

    await admission.admit("t", BUDGET, "r", answered.prompts, admission.find_tariff("m"))
    admission.watch("t", "r", "m", answered)
    admission.add_running_usage()
    admission.settle("t", BUDGET, "r", "m", answered)

    assert limiter.reserved == [10 * 1000 + 2 * 10 * 2000]
    charged = 2 * 1000 + 8 * 250 + 12 * 2000
    assert limiter.noted == {"r": charged}
    assert limiter.settled == {"r": (22, charged)}
    assert written.sums == {("t", "m", ""): Used(1, 10, 8, 12, 0, charged)}


async def test_the_adapters_own_tariff_counts() -> None:
    limiter = FakeLimiter()
    admission, _ = admission_of(limiter)

    assert admission.count("m", "lora", completion([choice(0, 10, 5, receipt())])).charge_nano == 15 * 3000


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_whatever_a_provider_reports_no_more_is_charged_than_was_reserved(
    prompt: int, cached: int, output: int
) -> None:
    admission, _ = admission_of(FakeLimiter())
    answered = completion([choice(0, 10, output, receipt(cached, prompt))])

    charged = admission.count("m", "", answered).charge_nano

    assert charged <= count_most_nano(admission.find_tariff("m"), answered.prompts) == 10 * 1000 + 10 * 2000


async def test_a_spent_budget_is_a_429_until_the_month_ends() -> None:
    spent = Verdict(False, "budget", MONTH_MS, spent_nano=1_499_990_000)
    admission, metrics = admission_of(FakeLimiter(spent))

    with pytest.raises(BudgetSpent) as caught:
        await admission.admit("t", BUDGET, "r", completion([choice(0, 10, 0, None)]).prompts, TARIFFS.find("m"))

    error = error_body(caught.value)["error"]
    assert http_error(caught.value).status == 429
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert error["message"] == (
        "The budget of 1.5 a month is spent: 1.49999 are spent or reserved this month, and this request may come to"
        " 3e-05."
    )
    assert caught.value.retry_after_s is not None
    assert MONTH_MS / 1000 <= caught.value.retry_after_s <= MONTH_MS / 1000 + 300
    assert b'penstock_budget_refusals_total{kind="tenant"} 1.0' in metrics.render()


async def test_the_fullest_budgets_are_among_the_metrics_and_caps_are_not() -> None:
    admission, metrics = admission_of(FakeLimiter())
    admission.refresh_metrics()
    admission.refresh_metrics()

    page = metrics.render().decode()
    assert 'penstock_budget_used_ratio{tenant="t29"} 0.29' in page
    assert page.count("penstock_budget_used_ratio{") == SHOWN
    assert "*providers" not in page


async def test_a_budget_that_running_requests_hold_says_so() -> None:
    reserved = Verdict(False, "budget", PARALLEL_WAIT_MS, spent_nano=1_499_990_000)
    admission, _ = admission_of(FakeLimiter(reserved))

    with pytest.raises(BudgetSpent, match="is reserved by requests that run") as caught:
        await admission.admit("t", BUDGET, "r", completion([choice(0, 10, 0, None)]).prompts, TARIFFS.find("m"))

    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 2


async def test_what_the_budget_of_a_month_can_never_hold_is_the_callers_mistake() -> None:
    limiter = FakeLimiter()
    admission, _ = admission_of(limiter)

    with pytest.raises(InvalidRequest, match="may come to 3e-05") as caught:
        await admission.admit(
            "t", Limits(budget=0.000029), "r", completion([choice(0, 10, 0, None)]).prompts, TARIFFS.find("m")
        )
    assert caught.value.param == "max_tokens"
    assert limiter.reserved == []


@given(
    st.floats(1e-9, 1e6),
    st.integers(1, 10**5),
    st.integers(1, 64),
    st.sampled_from([TARIFFS.find("m"), TARIFFS.find("x")]),
)
def test_an_output_bound_that_nobody_named_fits_into_the_budget_unless_the_prompt_does_not(
    budget: float, num_prompt_tokens: int, num_sequences: int, tariff: Any
) -> None:
    limits = Limits(budget=budget)
    bound = default_max_tokens(limits, 1024, num_prompt_tokens, num_sequences, tariff)
    nano = most_nano(tariff, num_prompt_tokens, bound * num_sequences)

    assert 1 <= bound <= 1024
    assert bound == 1 or nano <= (limits.budget_nano or 0)
    if bound < 1024:
        more_nano = most_nano(tariff, num_prompt_tokens, (bound + 1) * num_sequences)
        assert more_nano + 1 >= (limits.budget_nano or 0), "and it is as long as fits"


@pytest.mark.parametrize("budget", [-1.0, 0.0, float("nan"), float("inf"), 2 * MAX_BUDGET])
def test_a_budget_that_is_none_is_refused(budget: float) -> None:
    with pytest.raises(InvalidRequest, match="the budget must lie above 0"):
        Limits(budget=budget).check()


def test_a_budget_is_exact_in_whole_numbers_and_keeps_its_form() -> None:
    limits = Limits(budget=12.34)

    assert limits.budget_nano == 12_340_000_000
    assert limits.budget_nano == 12 * NANO + 340_000_000
    assert not limits.are_none
    assert msgspec.json.decode(msgspec.json.encode(limits), type=Limits) == limits
