"""The ladder's decisions, against servers whose knee is known."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.results.knee import Done, Ladder, Next, Rules, Step, choose_next_step, find_bracket, make_ladder

RULES = Rules(start_rate=1.0, max_rate=1000.0)


def step(rate: float, goodput: float | None, *, number: int = 1, is_dead: bool = False) -> Step:
    return Step(
        number=number,
        rate=rate,
        purpose="raise",
        reason="",
        folder=f"step-{number}",
        goodput=goodput,
        judged=100,
        goodput_per_s=None,
        offered_rate=rate,
        achieved_rate=rate,
        output_tokens_per_s=None,
        ttft_p50_s=None,
        ttft_p99_s=None,
        tpot_p50_s=None,
        tpot_p99_s=None,
        shed=0,
        failed=0,
        unfinished=0,
        is_balanced=True,
        is_late=False,
        is_dead=is_dead,
    )


def climbed(goodput: Callable[[float], float], rules: Rules = RULES) -> tuple[list[Step], Done]:
    """All steps against a server, and the result."""
    steps: list[Step] = []
    while isinstance(following := choose_next_step(steps, rules), Next):
        made = step(following.rate, goodput(following.rate), number=len(steps) + 1)
        steps.append(msgspec.structs.replace(made, purpose=following.purpose, reason=following.reason))
    return steps, following


def capacity(knee: float) -> Callable[[float], float]:
    return lambda rate: 1.0 if rate <= knee else knee / rate * 0.5


def test_the_first_step_is_at_the_first_rate() -> None:
    assert choose_next_step([], RULES) == Next(1.0, "raise", "the first rate")


def test_the_rate_doubles_while_goodput_holds_then_the_bracket_is_halved_and_the_knee_run_again() -> None:
    steps, done = climbed(capacity(5.0))

    assert [made.rate for made in steps[:5]] == [1, 2, 4, 8, pytest.approx(32**0.5)]
    assert [made.purpose for made in steps] == ["raise"] * 4 + ["bisect"] * 4 + ["confirm"]
    assert done.is_confirmed
    assert "The knee is at" in done.reason


@given(knee=st.floats(0.05, 900.0), factor=st.floats(1.2, 4.0), precision=st.floats(0.01, 0.3))
def test_the_knee_is_found_to_the_precision_wherever_it_is(knee: float, factor: float, precision: float) -> None:
    rules = Rules(start_rate=1.0, max_rate=1000.0, factor=factor, precision=precision, max_steps=100)
    steps, done = climbed(capacity(knee), rules)
    found = find_bracket(steps, rules)

    if found.held is not None and found.missed is not None:
        assert done.is_confirmed
        assert found.held <= knee < found.missed <= found.held * (1 + precision) * (1 + 1e-9)
    elif found.held is None:
        assert knee < 1.0 / factor**6 * (1 + 1e-9)
        assert "even at" in done.reason
    else:
        assert found.held == 1000.0


@given(seed=st.integers(0, 10_000))
def test_a_noisy_server_never_keeps_it_going_for_ever_and_a_confirmed_knee_never_missed(seed: int) -> None:
    rng = random.Random(seed)
    steps, done = climbed(lambda rate: rng.random() * 2 if 3 < rate < 30 else float(rate <= 3))
    found = find_bracket(steps, RULES)

    assert len(steps) <= RULES.max_steps
    if done.is_confirmed:
        at_knee = [made for made in steps if made.rate == found.held]
        assert len(at_knee) >= 2
        assert all((made.goodput or 0) >= RULES.share for made in at_knee)


def test_a_confirmation_that_fails_goes_on_below() -> None:
    steps = [step(4.0, 1.0), step(5.0, 0.5), step(4.8, 0.95)]
    confirm = choose_next_step(steps, RULES)
    assert isinstance(confirm, Next)
    assert (confirm.purpose, confirm.rate) == ("confirm", 4.8)

    after = choose_next_step([*steps, step(4.8, 0.85)], RULES)

    assert isinstance(after, Next)
    assert (after.purpose, after.rate) == ("bisect", pytest.approx((4.0 * 4.8) ** 0.5))


def test_goodput_exactly_at_the_share_holds() -> None:
    assert find_bracket([step(4.0, 0.9)], RULES).held == 4.0
    assert find_bracket([step(4.0, 0.8999)], RULES).held is None


def test_a_step_in_which_nothing_was_judged_does_not_hold() -> None:
    assert find_bracket([step(4.0, None)], RULES).missed == 4.0


def test_a_first_rate_that_is_too_high_is_lowered() -> None:
    steps, done = climbed(capacity(0.3))

    assert [made.rate for made in steps[:3]] == [1.0, 0.5, 0.25]
    assert [made.purpose for made in steps[1:3]] == ["lower", "lower"]
    assert done.is_confirmed


def test_a_server_that_holds_at_no_rate_is_given_up() -> None:
    steps, done = climbed(lambda rate: 0.0)

    assert len(steps) == 7
    assert not done.is_confirmed
    assert done.reason == "Goodput is under 90% even at 0.0156 requests/s."


def test_a_server_that_holds_at_every_rate_is_not_given_a_knee() -> None:
    steps, done = climbed(lambda rate: 1.0)

    assert steps[-1].rate == 1000.0
    assert not done.is_confirmed
    assert done.reason == "Goodput holds up to 1e+03 requests/s, the highest rate that was allowed."


def test_a_dead_server_ends_the_ladder() -> None:
    done = choose_next_step([step(1.0, 1.0), step(2.0, 0.0, is_dead=True)], RULES)

    assert done == Done(False, "The server stopped answering at 2 requests/s.")


def test_the_number_of_steps_is_bounded() -> None:
    rules = Rules(start_rate=1.0, max_rate=1000.0, max_steps=3)
    steps, done = climbed(capacity(5.0), rules)

    assert len(steps) == 3
    assert done == Done(False, "3 steps did not settle it.")


def test_a_ladder_that_goes_on_makes_the_same_steps_as_one_that_was_never_stopped() -> None:
    whole, _ = climbed(capacity(23.0))
    for count in range(len(whole)):
        following = choose_next_step(whole[:count], RULES)

        assert isinstance(following, Next)
        assert following.rate == whole[count].rate


def test_a_ladder_says_what_is_known_so_far() -> None:
    begun = make_ladder("http://x/v1", "m", "requests/s", RULES, {}, [step(1.0, 1.0), step(2.0, 0.1)])

    assert (begun.knee, begun.missed, begun.is_confirmed, begun.is_complete) == (1.0, 2.0, False, False)
    assert begun.verdict == "Not finished after 2 steps: goodput held at 1 requests/s, not at 2 requests/s."


def test_a_ladder_survives_json() -> None:
    steps, _ = climbed(capacity(5.0))
    ladder = make_ladder("http://x/v1", "m", "requests/s", RULES, {"pace": {"step_s": 1.0}}, steps)

    assert ladder.is_complete
    assert msgspec.convert(msgspec.to_builtins(ladder), Ladder, strict=False) == ladder
