import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.completion import Choice, Completion
from penstock.router.completions.goodput.outcome import Outcome, Timing, judge, time_request
from penstock.router.completions.text_assembly import TextAssembler
from penstock.router.transport.client import ClientGone
from penstock.wire.errors import (
    BudgetSpent,
    CapReached,
    ContextTooLong,
    DeadlineExceeded,
    EngineFault,
    Forbidden,
    InvalidRequest,
    Overloaded,
    RateLimited,
    ReplicaLost,
)
from penstock.wire.frames import SamplingParams
from penstock.wire.targets import Target
from tests.unit.router.fleet_fakes import generation
from tests.unit.router.http_fakes import TOKENIZER

TARGET = Target(ttft_s=1.0, tpot_s=0.1)


def choice(first_s: float | None, last_s: float = 0.0, num_tokens: int = 0, num_beams: int = 0) -> Choice:
    made = replace(generation([1]), sampling=SamplingParams(max_tokens=9, num_beams=num_beams))
    return Choice(0, made, TextAssembler(TOKENIZER), num_tokens=num_tokens, first_token_s=first_s, last_token_s=last_s)


def timing(*choices: Choice, began_s: float = 10.0, now: float = 20.0) -> Timing:
    completion = Completion([choices], None, lambda: 0.0, None)  # type: ignore[arg-type]  # never run
    return time_request(completion, began_s, now)


def test_a_request_begins_with_the_first_token_of_any_choice_and_is_as_slow_as_its_slowest() -> None:
    found = timing(choice(12.0, 13.0, 11), choice(11.5, 15.5, 5), choice(None))

    assert found == Timing(waited_s=10.0, ttft_s=1.5, tpot_s=1.0)


def test_one_token_has_no_time_per_further_token_nor_have_beams() -> None:
    assert timing(choice(12.0, 12.0, 1)).tpot_s is None
    assert timing(choice(12.0, 13.0, 8, num_beams=2)).tpot_s is None
    assert time_request(None, 10.0, 10.5) == Timing(0.5)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "outcome"),
    [
        (1.0, 0.1, Outcome.MET),
        (1.01, 0.01, Outcome.TTFT),
        (1.01, 5.0, Outcome.TTFT),
        (0.5, 0.11, Outcome.TPOT),
        (0.5, None, Outcome.MET),
    ],
)
def test_the_first_target_that_is_missed_is_the_outcome(ttft_s: float, tpot_s: float | None, outcome: Outcome) -> None:
    assert judge(TARGET, Timing(9.0, ttft_s, tpot_s), None, is_admitted=True) is outcome


def test_where_a_class_names_no_target_there_is_none_to_miss() -> None:
    assert judge(Target(), Timing(9.0, 5.0, 5.0), None, is_admitted=True) is Outcome.MET


@pytest.mark.parametrize("error", [Overloaded, DeadlineExceeded, EngineFault, ReplicaLost])
def test_what_the_platform_could_not_do_has_failed(error: type[Exception]) -> None:
    for is_admitted in (False, True):
        assert judge(TARGET, Timing(0.1), error("x"), is_admitted=is_admitted) is Outcome.FAILED
    assert judge(TARGET, Timing(0.1), ValueError("a defect"), is_admitted=False) is Outcome.FAILED


def test_a_full_queue_is_a_failure_and_a_tenants_own_limit_is_none() -> None:
    assert judge(TARGET, Timing(0.1), RateLimited("x"), is_admitted=True) is Outcome.FAILED
    assert judge(TARGET, Timing(0.1), CapReached("x"), is_admitted=True) is Outcome.FAILED
    assert judge(TARGET, Timing(9.0), RateLimited("x"), is_admitted=False) is None
    assert judge(TARGET, Timing(9.0), BudgetSpent("x"), is_admitted=True) is None


@pytest.mark.parametrize("error", [InvalidRequest, ContextTooLong, Forbidden])
def test_what_a_caller_does_wrong_counts_nowhere(error: type[Exception]) -> None:
    for is_admitted in (False, True):
        assert judge(TARGET, Timing(9.0), error("x"), is_admitted=is_admitted) is None


@pytest.mark.parametrize("error", [ClientGone(), asyncio.CancelledError()])
def test_a_client_that_left_counts_only_if_it_had_waited_too_long(error: BaseException) -> None:
    assert judge(TARGET, Timing(0.9), error, is_admitted=True) is None
    assert judge(TARGET, Timing(30.0, 0.9, 0.5), error, is_admitted=True) is None
    assert judge(TARGET, Timing(1.1), error, is_admitted=True) is Outcome.TTFT
    assert judge(TARGET, Timing(30.0, 1.1), error, is_admitted=True) is Outcome.TTFT


@given(st.floats(0, 3), st.none() | st.floats(0, 0.3), st.sampled_from([None, Overloaded("x"), InvalidRequest("x")]))
def test_a_request_is_met_exactly_if_it_finished_and_missed_nothing(
    ttft_s: float, tpot_s: float | None, error: Exception | None
) -> None:
    outcome = judge(TARGET, Timing(ttft_s, ttft_s, tpot_s), error, is_admitted=True)

    is_met = error is None and ttft_s <= 1.0 and (tpot_s is None or tpot_s <= 0.1)
    assert (outcome is Outcome.MET) == is_met
    assert (outcome is None) == isinstance(error, InvalidRequest)
