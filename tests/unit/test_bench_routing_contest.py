"""The contest of routing policies: its loads against counts by hand, its intervals and verdicts against examples worked
out by hand, and a short contest from the command to its page."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from bench.autoscaling.replicas import work_s
from bench.routing.__main__ import main
from bench.routing.contest import Cell, Plan, Store, collect, hold_contest, list_jobs
from bench.routing.floor import Floor, find_floor_s
from bench.routing.loads import ADAPTER_SHARED, BLOCK, FURTHER_IDS, SAMPLE, Drawn, Load, load_loads, mean_work_s
from bench.routing.play import TIMEOUT_S, Job, Outcome, play
from bench.routing.summary import compare, describe, estimate, judge
from penstock.base.errors import ConfigError
from penstock.sim.content import make_keys, read_segments

DRAWN = ("one prefix", "groups", "adapters")


def load_named(name: str) -> Load:
    return load_loads(None, [name])[0][0]


def outcome(goodput: float, p90_s: float = 1.0) -> Outcome:
    return Outcome(
        requests=10,
        rate=2.0,
        goodput=goodput,
        p50_s=0.5,
        p90_s=p90_s,
        p99_s=2.0,
        cached=0.5,
        imbalance=1.0,
        unanswered=0,
    )


@pytest.mark.parametrize("name", DRAWN)
def test_a_load_is_the_same_for_a_seed_and_has_its_rate(name: str) -> None:
    load = load_named(name)

    plan = load.plan(1, 10.0, 60.0)

    assert plan == load.plan(1, 10.0, 60.0) != load.plan(2, 10.0, 60.0)
    assert len(plan) == 600
    assert plan[-1].at_s == pytest.approx(60.0, rel=0.2)
    assert [each.at_s for each in plan] == sorted(each.at_s for each in plan)


def test_groups_share_50_to_2000_tokens_and_are_asked_unevenly() -> None:
    drawn = list(islice(load_named("groups").draw(0), 3000))

    asked = Counter(each.prompt[0] for each in drawn)
    lengths = {each.prompt[0]: each.prompt[1] for each in drawn}
    assert sorted(lengths) == list(range(16))
    assert (min(lengths.values()), max(lengths.values())) == (50, 2000)
    assert asked[0] > 10 * asked[15]


def test_requests_of_two_adapters_have_no_block_in_common() -> None:
    plan = load_named("adapters").plan(0, 10.0, 30.0)

    by_adapter: dict[int, set[bytes]] = {}
    for planned in plan:
        assert isinstance(planned.prompt, list)
        by_adapter.setdefault(int(planned.prompt[0]), set()).update(make_keys(read_segments(planned), BLOCK))
    assert {len(keys) for keys in by_adapter.values()} == {ADAPTER_SHARED // BLOCK}
    assert len(set.union(*by_adapter.values())) == len(by_adapter) * ADAPTER_SHARED // BLOCK


def test_a_trace_is_played_from_the_seeds_place_on_and_round_again(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * row, "input_length": 1024, "output_length": 8 * row + 8, "hash_ids": [row, row + 1]}
        for row in range(10)
    ]
    (tmp_path / "mooncake").mkdir()
    trace = tmp_path / "mooncake" / "conversation_trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    loads, missing = load_loads(tmp_path, ["conversation", "synthetic"])

    plan = loads[0].plan(1, 2.0, 6.0)

    assert [each.max_tokens for each in plan] == [3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4]
    assert (plan[0].prompt, plan[8].prompt) == ([2, 64, 3, 64], [0, 64, 1, 64])
    assert plan[10].prompt == [2 + FURTHER_IDS, 64, 3 + FURTHER_IDS, 64]  # the first again
    assert plan[-1].at_s == pytest.approx(6.0)
    assert len(missing) == 1
    assert "synthetic is left out" in missing[0]


def test_without_traces_their_loads_are_left_out_with_a_sentence() -> None:
    loads, missing = load_loads(None, ["conversation", "groups"])

    assert [load.name for load in loads] == ["groups"]
    assert missing == [
        "conversation is left out: PENSTOCK_TEST_DATA is not set; docs/testing.md says where the trace is from"
    ]
    with pytest.raises(ConfigError, match="there is no load 'nonsense'"):
        load_loads(None, ["nonsense"])


def _draw_alike(_: int) -> Iterator[Drawn]:
    for index in range(1 << 30):
        yield Drawn([7, 160, -1 - index, 100], 50)


def test_the_capacity_is_that_of_one_endless_cache() -> None:
    # the first prompt computes 260 tokens, each later one the 100 behind the 160 that all share
    whole = (work_s(260, 50) + (SAMPLE - 1) * work_s(100, 50)) / SAMPLE

    assert mean_work_s(Load("alike", _draw_alike, is_uneven=False)) == pytest.approx(whole)


def test_a_run_counts_every_request_behind_its_lead_the_same_each_time() -> None:
    load, job = load_named("groups"), Job("groups", 2, "ours", 0.5, 3, 16.0)

    found = play(load, job)

    rate = 0.5 * 2 / mean_work_s(load)
    counted = sum(4.0 <= each.at_s < 16.0 for each in load.plan(3, rate, 16.0))
    assert found == play(load, job)
    assert (found.requests, found.unanswered) == (counted, 0)
    assert 0 < found.goodput <= found.rate == counted / 12.0
    assert 0 < found.p50_s <= found.p90_s <= found.p99_s < TIMEOUT_S
    assert 0 < found.cached < 1
    assert 1 <= found.imbalance <= 2


def test_a_contest_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    loads = [load_named("one prefix")]
    plan = Plan([2], ["round robin", "ours"], [0.5], 2, 8.0)
    told: list[str] = []

    def hold(limit_s: float | None = None) -> dict[Cell, dict[str, list[Outcome]]]:
        store = Store(tmp_path / "runs.jsonl", loads)
        return hold_contest(plan, loads, store, 1, lambda job, *_: told.append(job.label), limit_s)

    first = hold(0.0)
    with (tmp_path / "runs.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"key": "broken o')
    second, third = hold(), hold()

    assert first == {}  # one run was made: no seed is whole
    assert len(told) == len(set(told)) == 4
    assert second == third
    assert [len(outcomes) for outcomes in second[Cell("one prefix", 2, 0.5)].values()] == [2, 2]


def test_only_seeds_that_every_policy_has_played_count() -> None:
    plan = Plan([8], ["ours", "Ray"], [0.5], 3)
    jobs = list_jobs(plan, [load_named("groups")])
    played = {job: outcome(job.seed) for job in jobs if (job.policy, job.seed) != ("Ray", 1)}

    found = collect(jobs, plan.policies, played.get)

    assert [each.goodput for each in found[Cell("groups", 8, 0.5)]["ours"]] == [0, 2]


def test_an_interval_is_students() -> None:
    # mean 3, standard deviation sqrt(2.5), five values: 2.776 * sqrt(2.5 / 5)
    assert estimate([1, 2, 3, 4, 5]) == pytest.approx((3.0, 2.776 * math.sqrt(0.5)))
    assert estimate([4.0]) == (4.0, None)


def test_a_rival_is_better_only_beyond_the_interval_of_the_differences() -> None:
    ours = [outcome(10.0), outcome(20.0), outcome(30.0)]
    policies = {
        "close": [outcome(10.5), outcome(19.9), outcome(30.3)],
        "better": [outcome(11.0), outcome(21.1), outcome(31.2)],
        "ours": ours,
    }

    verdict = judge(policies)

    assert verdict.better == ["better"]
    assert verdict.best_rival == "better"
    assert verdict.goodput.mean == pytest.approx(-1.1)
    assert compare(policies, "goodput")["ours"] == (0.0, 0.0)
    assert describe(verdict, is_uneven=False).startswith("less goodput than better; p90 TTFT 1.00")


def test_p90_is_held_against_the_quickest_rivals() -> None:
    policies = {
        "slow": [outcome(1.0, 4.0), outcome(1.0, 4.0)],
        "quick": [outcome(1.0, 1.0), outcome(1.0, 4.0)],
        "ours": [outcome(1.0, 0.5), outcome(1.0, 2.0)],
    }

    verdict = judge(policies)

    assert (verdict.quickest, verdict.better) == ("quick", [])
    assert (verdict.p90_ratio, verdict.p90_low, verdict.p90_high) == pytest.approx((0.5, 0.5, 0.5))
    assert describe(verdict, is_uneven=True).endswith("at most 0.8 is wanted: met")


def test_the_command_leaves_a_record_a_picture_and_a_page(tmp_path: Path) -> None:
    status = main(
        [
            "--quick",
            "--seeds",
            "1",
            "--load",
            "groups",
            "--only",
            "Dynamo",
            "--processes",
            "1",
            "--cache",
            str(tmp_path),
        ]
    )

    assert status == 0
    record = json.loads((tmp_path / "routing.json").read_text(encoding="utf-8"))
    assert record["runs_left"] == 0
    assert [(cell["load"], cell["part"], sorted(cell["policies"])) for cell in record["cells"]] == [
        ("groups", 0.7, ["Dynamo", "ours"])
    ]
    page = (tmp_path / "routing_contest.html").read_text(encoding="utf-8")
    assert "groups, 8 replicas, 0.7 of the capacity" in page
    assert "<svg" in page
    assert (tmp_path / "routing_contest.png").read_bytes().startswith(b"\x89PNG")


def test_without_any_load_the_command_fails_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_TEST_DATA", raising=False)

    assert main(["--load", "synthetic", "--cache", str(tmp_path)]) == 2
    assert "synthetic is left out: PENSTOCK_TEST_DATA is not set" in capsys.readouterr().err


def test_the_floor_is_what_a_request_takes_that_meets_nobody() -> None:
    load = load_named("adapters")
    lonely = Job(load.name, 1, "ours", 0.004, 0, 10_000.0)  # a request in a hundred seconds

    assert find_floor_s(load, lonely) == pytest.approx(play(load, lonely).p90_s, rel=0.02)
    busy = msgspec.structs.replace(lonely, part=0.5, seconds=100.0)
    assert find_floor_s(load, busy) < play(load, busy).p90_s


def test_a_ratio_below_the_floor_is_out_of_reach() -> None:
    assert Floor(1.0, "Ray", 1.2, 1.3).is_out_of_reach
    assert not Floor(1.0, "Ray", 1.3, 1.3).is_out_of_reach


def test_a_contest_without_a_rival_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "ours", "--cache", str(tmp_path)])
    assert "name a policy beside ours" in capsys.readouterr().err
