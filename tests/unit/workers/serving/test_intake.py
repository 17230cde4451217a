import math

import pytest

from penstock.wire.frames import SamplingParams, Submit, pack_token_ids
from penstock.wire.targets import ClassTargets, Target
from penstock.workers.serving.intake import make_sequence

NOW_S, UNIX_S = 50.0, 1_700_000_000.0
"""The replica's clocks."""


def submit(**changes: object) -> Submit:
    return Submit(1, "q", pack_token_ids([1, 2]), b"", b"c" * 16, SamplingParams(max_tokens=2), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead_s", [0.0, 5.0, -5.0, 3600.0, -3600.0])
def test_a_deadline_holds_however_far_the_clocks_are_apart(ahead_s: float) -> None:
    gateway_unix_s = UNIX_S + ahead_s
    op = submit(deadline=gateway_unix_s + 30.0, seconds_left=30.0)

    assert make_sequence(op, NOW_S, UNIX_S).deadline == NOW_S + 30.0


def test_the_deadline_of_a_gateway_that_sends_no_seconds_is_read_by_the_clock() -> None:
    assert make_sequence(submit(deadline=UNIX_S + 30.0), NOW_S, UNIX_S).deadline == NOW_S + 30.0


@pytest.mark.parametrize("changes", [{}, {"seconds_left": math.nan}])
def test_no_number_is_no_deadline(changes: dict[str, object]) -> None:
    assert make_sequence(submit(**changes), NOW_S, UNIX_S).deadline is None


@pytest.mark.parametrize(
    ("service_class", "is_batch"),
    [("batch", True), ("standard", False), ("interactive", False), ("of tomorrow", False)],
)
def test_rows_of_the_class_batch_are_told_apart(service_class: str, is_batch: bool) -> None:
    assert make_sequence(submit(service_class=service_class), NOW_S, UNIX_S).is_batch is is_batch


@pytest.mark.parametrize(("weight", "taken"), [(4.0, 4.0), (0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0)])
def test_a_weight_that_no_tenant_may_have_divides_no_rows(weight: float, taken: float) -> None:
    assert make_sequence(submit(weight=weight), NOW_S, UNIX_S).weight == taken


def test_the_part_of_a_tenants_cache_goes_with_the_sequence() -> None:
    assert make_sequence(submit(), NOW_S, UNIX_S).cache_scope == ""
    assert make_sequence(submit(cache_scope="0123"), NOW_S, UNIX_S).cache_scope == "0123"


@pytest.mark.parametrize(("service_class", "tpot_s"), [("interactive", 0.05), ("batch", None), ("of tomorrow", 0.1)])
def test_a_sequence_has_the_target_of_its_class(service_class: str, tpot_s: float | None) -> None:
    targets = ClassTargets(interactive=Target(tpot_s=0.05), standard=Target(tpot_s=0.1), batch=Target(ttft_s=9.0))

    assert make_sequence(submit(service_class=service_class), NOW_S, UNIX_S, targets).tpot_s == tpot_s
    assert make_sequence(submit(service_class=service_class), NOW_S, UNIX_S).tpot_s is None
