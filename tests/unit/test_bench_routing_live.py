"""The pure parts of the live routing bench: the cache offline, whom ours is beside, what records say."""

from collections.abc import Sequence

import pytest

from bench.routing.loads import load_loads
from bench.routing_live import contest
from bench.routing_live.cache import count_blocks, make_prompt, measure_share
from bench.routing_live.policies import IDLE_S, Forgetful, find_maker, make_policy, pin_sessions
from bench.routing_live.rivals import choose_rivals
from bench.routing_live.summary import Reused, compare, read_reuse
from penstock.router.replicas.routing_policy import RoutedRequest
from penstock.router.routing.policy import Decision, Reason, ReplicaView
from penstock_loadtest.results.records import Record
from tests.unit.test_bench_routing import KEYS, chosen, view

A, B, C = ([number] * 32 for number in (1, 2, 3))


def test_an_endless_cache_has_all_full_blocks_that_were_before_but_the_last_token() -> None:
    prompts = [make_prompt(ids, 16) for ids in (A + B, A + C, A, B + A)]

    assert count_blocks(prompts) == 2 + 2 + 2 + 4
    assert measure_share(prompts, 16, None) == (0 + 32 + 16 + 0) / (64 + 64 + 32 + 64)


def test_a_cache_forgets_what_was_unused_longest_and_the_deepest_of_a_prompt_first() -> None:
    prompts = [make_prompt(ids, 16) for ids in (A + B, C, [*A, 9], [*A, *B, 9])]

    assert measure_share(prompts, 16, 5) * (64 + 32 + 33 + 65) == 32 + 48  # of A + B its last block was forgotten
    assert measure_share(prompts, 16, 6) * (64 + 32 + 33 + 65) == 32 + 64


def test_the_two_best_rivals_have_the_most_goodput_and_the_least_wait() -> None:
    def measured(goodput: float, p90_s: float) -> dict[str, list[float]]:
        return {"goodput": [goodput, 0.1], "p90_s": [p90_s, 0.1]}

    apart = {"ours": measured(9, 0.1), "a": measured(5, 2), "b": measured(4, 1), "c": measured(3, 0.5)}
    one = {"ours": measured(9, 0.1), "a": measured(5, 0.2), "b": measured(4, 1), "c": measured(3, 0.5)}

    assert choose_rivals(apart).names == ["a", "c"]
    assert choose_rivals(one).names == ["a", "b"]


def ask(keys: Sequence[bytes], now_s: float = 0.0) -> RoutedRequest:
    return RoutedRequest(16 * len(keys), 10.0, keys, 16, now_s)


def test_a_session_stays_pinned_and_new_ones_go_to_the_next_replica() -> None:
    policy, views = pin_sessions(), (view("a"), view("b"))
    shared = KEYS[:2]
    sessions = [[*shared, b"one"], [*shared, b"two"], [*shared, b"three"]]

    first = [chosen(policy, *views, request=ask(keys)) for keys in sessions]
    again = [chosen(policy, *views, request=ask([*keys, b"more" + keys[-1]])) for keys in reversed(sessions)]

    assert first == ["a", "b", "a"]
    assert again == ["a", "b", "a"]


def test_a_policy_begins_anew_when_nothing_was_asked_for_a_while() -> None:
    made: list[int] = []

    def make() -> object:
        made.append(len(made))
        return lambda _request, views: Decision(views[made[-1] % 2].replica_id, Reason.TIE)

    policy = Forgetful(make)  # type: ignore[arg-type]
    at_s = (0.0, IDLE_S, 2 * IDLE_S + 0.1)
    replicas = [chosen(policy, view("a"), view("b"), request=ask(KEYS, now_s)) for now_s in at_s]

    assert replicas[0] == replicas[1] != replicas[2]


def test_ours_is_what_a_gateway_does_by_itself() -> None:
    assert find_maker("ours") is None
    assert find_maker("Ray") is not None
    with pytest.raises(KeyError):
        find_maker("nobody's")
    assert chosen(make_policy("round robin"), view("a")) == "a"


def test_prompts_of_a_load_are_equal_as_far_as_its_segments_are() -> None:
    (load,), _ = load_loads(None, ["adapters"])
    plan = contest.make_plan(contest.cut(load), 0, 8.0)
    again = contest.make_plan(contest.cut(load), 0, 8.0)
    segments = load.plan(0, len(plan) / 8.0, 8.0)

    assert plan == again
    assert len(plan) > 20
    assert all(each.max_tokens <= contest.MAX_OUTPUT_TOKENS for each in plan)
    by_adapter: dict[int, list[int]] = {}
    for planned, drawn in zip(plan, segments, strict=True):
        adapter, shared, _, own = drawn.prompt
        assert len(planned.prompt) == int(shared) + int(own)
        beginning = by_adapter.setdefault(int(adapter), list(planned.prompt[: int(shared)]))  # type: ignore[arg-type]
        assert planned.prompt[: int(shared)] == beginning
    assert len({tuple(each) for each in by_adapter.values()}) == len(by_adapter) > 3


def record(intended_s: float, ttft_s: float | None, **changes: object) -> Record:
    times_s = [] if ttft_s is None else [intended_s + ttft_s, intended_s + ttft_s + 0.05]
    fields: dict[str, object] = {
        "index": 0,
        "intended_s": intended_s,
        "sent_s": intended_s,
        "first_s": times_s[0] if times_s else None,
        "end_s": times_s[-1] if times_s else intended_s + 1.0,
        "chunk_s": times_s,
        "chunk_tokens": [1] * len(times_s),
        "outcome": "finished" if times_s else "shed",
        "prompt_tokens": 100 if times_s else None,
        "cached_tokens": 40 if times_s else None,
    }
    return Record(**fields | changes)  # type: ignore[arg-type]


def test_a_run_is_judged_behind_its_lead_in_the_time_of_slower_replicas() -> None:
    records = [
        record(0.5, 9.0),  # of the lead
        record(3.0, 0.5, replica="a"),
        record(3.1, 1.01, replica="a"),  # 2.02 s there, of 2.06 s
        record(3.2, 1.04, replica="b"),
        record(4.0, None),
    ]

    outcome = contest.judge_run(records, 10.0)

    assert (outcome.requests, outcome.unanswered) == (4, 1)
    assert outcome.goodput == 2 / 8.0
    assert outcome.p99_s > 1.03
    assert outcome.cached == 0.4
    assert 1.0 < outcome.imbalance <= 4.0


def test_conversations_are_compared_round_by_round() -> None:
    ours = [Reused(0.70, 0.10, 10, 0), Reused(0.72, 0.11, 10, 0)]
    pinned = [Reused(0.70, 0.10, 10, 0), Reused(0.75, 0.10, 10, 0)]

    found = compare(200, ours, pinned)

    assert found.share.mean == pytest.approx((1 + 0.96) / 2)
    assert found.ttft.mean == pytest.approx(1.05)
    assert found.share.half is not None
    assert found.is_met(0.97, 1.06)
    assert not found.is_met(0.99, 1.06)
    assert not found.is_met(0.97, 1.04)
    assert not compare(200, [ours[0], ours[1]._replace(not_finished=1)], pinned).is_met(0.97, 1.06)


def test_turns_that_never_left_count_as_not_finished() -> None:
    found = read_reuse([record(0.0, 0.2), record(1.0, 0.4), record(2.0, None)], 2)

    assert found == Reused(0.4, pytest.approx(0.3), 3, 3)


def test_pinning_waits_without_a_replica_and_takes_a_prompt_without_a_full_block() -> None:
    views: list[ReplicaView] = []

    assert pin_sessions()(ask(KEYS), views).replica_id is None
    assert chosen(pin_sessions(), view("a"), request=ask([])) == "a"
