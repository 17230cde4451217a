from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.metrics import Metrics
from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.escalation import Escalation, Trial
from penstock.router.completions.escalation import Outcome as Trialled
from penstock.router.completions.goodput.recorder import Goodput, MeasuredRequest
from penstock.router.completions.text_assembly import TextAssembler
from penstock.router.config import EscalationConfig
from penstock.router.models.request_targets import RequestTargets
from penstock.router.routing.request import Receipt, Route
from penstock.router.transport.client import ClientGone
from penstock.tenancy.tenants import Limits, Settings
from penstock.wire.errors import EngineFault, InvalidRequest, Overloaded, RateLimited
from penstock.wire.targets import CLASSES, ClassTargets, Target
from tests.unit.router.fleet_fakes import generation
from tests.unit.router.http_fakes import MODEL, TOKENIZER, Script, running_gateway

TARGETS = ClassTargets(interactive=Target(ttft_s=0.5, tpot_s=0.05), standard=Target(ttft_s=2.0))
ERRORS = (None, Overloaded("x"), EngineFault("x"), InvalidRequest("x"), RateLimited("x"), ClientGone())


class Requests(NamedTuple):
    service_class: str
    ttft_s: float
    tpot_s: float
    error: BaseException | None
    tier: str


REQUESTS = st.builds(
    Requests,
    st.sampled_from([*CLASSES, "premium"]),
    st.floats(0, 4),
    st.floats(0, 0.1),
    st.sampled_from(ERRORS),
    st.sampled_from(["edge", "cloud"]),
)


def sum_of(metrics: Metrics, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and all(sample.labels[key] == value for key, value in labels.items())
    )


def answered(found: Requests, num_tokens: int = 3, predicted_ttft_s: float = 0.5) -> Completion:
    """A completion that began at 0 s and was placed at once."""
    receipt = Receipt("r", found.tier, predicted_ttft_s=predicted_ttft_s, placed_s=0.0)
    last_s = found.ttft_s + found.tpot_s * (num_tokens - 1)
    choice = Choice(0, generation([1]), TextAssembler(TOKENIZER), receipt, num_tokens, found.ttft_s, last_s)
    return Completion([[choice]], None, lambda: 0.0, None)  # type: ignore[arg-type]  # never run


@given(st.lists(REQUESTS, max_size=30))
def test_the_outcomes_of_each_class_add_up_to_its_requests(requests: list[Requests]) -> None:
    metrics = Metrics()
    goodput = Goodput(metrics, RequestTargets({"m": TARGETS}), {}, lambda: 9.0)
    counted = dict.fromkeys(CLASSES, 0)

    for number, found in enumerate(requests):
        asked = MeasuredRequest(f"t{number % 3}", found.service_class, "m", 0.0)
        receipt = goodput.record(asked, answered(found), found.error, is_admitted=True)
        assert (receipt.outcome == "met") == (
            found.error is None
            and (receipt.ttft_target_s is None or found.ttft_s <= receipt.ttft_target_s)
            and (receipt.tpot_target_s is None or receipt.tpot_s is None or receipt.tpot_s <= receipt.tpot_target_s)
        )
        counted[receipt.service_class] += receipt.outcome is not None

    def seen(name: str, service_class: str) -> float:
        return sum(
            sum_of(metrics, name, **{"class": service_class, "outcome": outcome})
            for outcome in ("met", "ttft", "tpot", "failed")
        )

    for service_class, count in counted.items():
        assert seen("penstock_slo_requests_total", service_class) == count
        assert seen("penstock_slo_tokens_total", service_class) == 3 * count
    assert sum_of(metrics, "penstock_tenant_slo_requests_total") == sum(counted.values())
    assert sum_of(metrics, "penstock_ttft_prediction_ratio_count") == len(requests)


def test_the_burn_rate_is_read_when_somebody_scrapes() -> None:
    metrics, now = Metrics(), [9.0]
    goodput = Goodput(metrics, RequestTargets({"m": TARGETS}, objective=0.9), {}, lambda: now[0])
    for ttft_s in (0.1, 0.1, 0.1, 3.0):
        goodput.record(
            MeasuredRequest("t", "standard", "m", 0.0),
            answered(Requests("", ttft_s, 0, None, "edge")),
            None,
            is_admitted=True,
        )
    labels = {"model": "m", "class": "standard", "tier": "edge"}

    def burn(window: str) -> float:
        return sum_of(metrics, "penstock_slo_burn_rate", **labels, window=window)

    assert burn("5m") == burn("1h") == burn("6h") == pytest.approx(2.5)
    now[0] += 400
    assert burn("5m") == 0.0
    assert burn("1h") == pytest.approx(2.5)


def test_a_request_that_no_tier_answered_counts_at_the_first_that_was_to() -> None:
    metrics = Metrics()
    goodput = Goodput(metrics, RequestTargets({}), {}, lambda: 9.0)
    made = replace(generation([1]), routes=(Route("edge", ("a",)), Route("cloud", ("b",))))
    waiting = Completion([[Choice(0, made, TextAssembler(TOKENIZER))]], None, lambda: 0.0, None)  # type: ignore[arg-type]  # never run

    goodput.record(MeasuredRequest("t", "batch", "m", 0.0), waiting, Overloaded("x"), is_admitted=True)
    goodput.record(MeasuredRequest("t", "batch", None, 0.0), None, Overloaded("x"), is_admitted=False)

    assert sum_of(metrics, "penstock_slo_requests_total", model="m", tier="edge", outcome="failed") == 1
    assert sum_of(metrics, "penstock_slo_requests_total", model="none", tier="none", outcome="failed") == 1


def test_the_ratio_is_of_the_time_since_a_sequence_was_placed() -> None:
    metrics = Metrics()
    goodput = Goodput(metrics, RequestTargets({}), {}, lambda: 9.0)
    goodput.record(
        MeasuredRequest("t", "standard", "m", -5.0),
        answered(Requests("", 0.6, 0, None, "edge"), predicted_ttft_s=0.5),
        None,
        is_admitted=True,
    )

    assert sum_of(metrics, "penstock_ttft_prediction_ratio_sum", tier="edge") == pytest.approx(1.2)


def test_a_token_that_was_held_back_came_when_the_gateway_had_it_and_met_its_target_when_it_was_shown() -> None:
    metrics = Metrics()
    goodput = Goodput(metrics, RequestTargets({"m": TARGETS}), {}, lambda: 9.0)
    shown = answered(Requests("", 2.5, 0, None, "edge"), predicted_ttft_s=0.5)
    rule = EscalationConfig(tokens=4, min_mean_logprob=-1.0)
    shown.prompts[0][0].trial = Trial(Escalation(rule, ()), outcome=Trialled.KEPT, held_s=1.9, first_token_s=0.6)

    receipt = goodput.record(MeasuredRequest("t", "standard", "m", 0.0), shown, None, is_admitted=True)

    assert sum_of(metrics, "penstock_ttft_prediction_ratio_sum", tier="edge") == pytest.approx(1.2)
    assert (receipt.outcome, receipt.ttft_s) == ("ttft", 2.5)


SOON, NEVER = Target(ttft_s=60.0), Target(ttft_s=1e-9)


@contextmanager
def expecting(metrics: Metrics, **counts: int) -> Iterator[None]:
    """Requests by outcome that come to be counted meanwhile."""

    def read() -> dict[str, float]:
        return {
            outcome: sum_of(metrics, "penstock_slo_requests_total", outcome=outcome, model=MODEL)
            for outcome in ("met", "ttft", "tpot", "failed")
        }

    before = read()
    yield
    assert {name: value - before[name] for name, value in read().items() if value != before[name]} == counts


@pytest.mark.parametrize(
    ("target", "outcome"),
    [(SOON, "met"), (NEVER, "ttft"), (Target(ttft_s=60.0, tpot_s=1e-9), "tpot")],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_counts_once_and_its_receipt_says_as_what(
    target: Target, outcome: str, is_stream: bool
) -> None:
    targets = RequestTargets({MODEL: ClassTargets(interactive=target)})
    settings = Settings(service_class="interactive")
    async with running_gateway(Script(), settings=settings, targets=targets) as world:
        with expecting(world.metrics, **{outcome: 1}):
            answer = await world.chat(stream=is_stream)
        receipt = (await world.client.get(f"/v1/receipts/{answer.headers['x-penstock-request-id']}")).json()

    found = receipt["target"]
    assert (found["class"], found["outcome"]) == ("interactive", outcome)
    assert (found["ttft_target_s"], found["tpot_target_s"]) == (target.ttft_s, target.tpot_s)
    assert found["ttft_s"] > 0
    assert found["tpot_s"] > 0


async def status_of(world_script: Script, settings: Settings | None = None) -> tuple[httpx.Response, Metrics]:
    async with running_gateway(world_script, settings=settings, targets=RequestTargets({})) as world:
        return await world.chat(), world.metrics


@pytest.mark.parametrize(
    "script",
    [Script(refusal=Overloaded("full")), Script(refusal=RateLimited("share")), Script(error=EngineFault("broken"))],
)
async def test_what_could_not_be_answered_counts_as_failed(script: Script) -> None:
    answer, metrics = await status_of(script)

    assert answer.status_code in (429, 500, 503)
    assert sum_of(metrics, "penstock_slo_requests_total", outcome="failed") == 1
    assert sum_of(metrics, "penstock_slo_requests_total") == 1


async def test_an_invalid_request_and_a_limit_of_ones_own_count_nowhere() -> None:
    settings = Settings(limits=Limits(requests_per_minute=1))
    async with running_gateway(Script(), settings=settings, targets=RequestTargets({}), num_gateways=1) as world:
        assert (await world.chat(temperature=-1)).status_code == 400
        refused = await world.chat()

        assert refused.status_code == 429
        assert sum_of(world.metrics, "penstock_slo_requests_total") == 0


def test_the_objective_is_told_before_the_first_request() -> None:
    metrics = Metrics()

    Goodput(metrics, RequestTargets({}, TARGETS, objective=0.95), {}, lambda: 0.0)

    assert metrics.registry.get_sample_value("penstock_slo_objective") == 0.95
