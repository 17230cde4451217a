import json
import time
from collections import Counter, defaultdict
from itertools import chain, islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.planned import Planned
from penstock_loadtest.scenario import Arrivals, Cancel, Kind, Lengths, Prompts, Scenario, Sessions, Share, Trace
from penstock_loadtest.workload.hit_rate import measure_hit_rate, measure_hit_rate_of_ids
from penstock_loadtest.workload.plan import draw_plan
from tests.yardstick import rested

CHAT = Kind(
    name="chat", weight=3, prompts=Prompts(tokens=Lengths(uniform=(5, 20))), output_tokens=Lengths(lognormal=(30, 90))
)
CODE = Kind(
    name="code",
    endpoint="completions",
    stream=False,
    ignore_eos=True,
    prompts=Prompts(source="tokens", tokens=Lengths(choices=[4, 8])),
)
TALK = Kind(
    name="talk",
    temperature=0.7,
    prompts=Prompts(tokens=Lengths(constant=6)),
    sessions=Sessions(turns=Lengths(choices=[1, 2, 5]), think_s=Lengths(uniform=(1, 3)), system_tokens=12),
)
MIXED = Scenario(
    duration_s=60,
    arrivals=Arrivals(rate=20),
    kinds=[CHAT, CODE, TALK],
    cancel=Cancel(share=0.25),
    tenants=[Share(name="a"), Share(name="b")],
)


def changed(scenario: Scenario, **fields: object) -> Scenario:
    return msgspec.structs.replace(scenario, **fields)


def without(planned: Planned, *names: str) -> dict[str, object]:
    return {name: value for name, value in msgspec.structs.asdict(planned).items() if name not in names}


def write_mooncake(path: Path, rows: list[dict[str, object]]) -> Trace:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Trace(format="mooncake", path=path)


def small_mooncake(path: Path) -> Trace:
    """Conversations that grow by a block each time, mixed with single requests; the last block of each is its own, and
    not full."""
    rows: list[dict[str, object]] = []
    for row in range(120):
        ids = [*(range(1, 3 + row % 7) if row % 3 else [1000 + row]), 5000 + row]
        rows.append(
            {"timestamp": 250 * row, "input_length": 512 * len(ids) - 100, "output_length": 10 + row, "hash_ids": ids}
        )
    return write_mooncake(path, rows)


def test_the_same_seed_is_the_same_plan_and_another_seed_another() -> None:
    assert list(draw_plan(MIXED)) == list(draw_plan(MIXED))
    assert [each.at_s for each in draw_plan(MIXED)] != [each.at_s for each in draw_plan(changed(MIXED, seed=1))]


def test_a_plan_is_what_it_was_when_it_was_written_down() -> None:
    """A seed that is noted beside a result must give the same load with the next version."""
    scenario = Scenario(
        seed=5,
        requests=2,
        kinds=[Kind(prompts=Prompts(tokens=Lengths(uniform=(3, 5))), output_tokens=Lengths(lognormal=(30, 90)))],
    )

    assert [(round(each.at_s, 6), each.prompt, each.max_tokens) for each in draw_plan(scenario)] == [
        (0.531227, "always union season glass", 38),
        (2.641619, "yet seven within part", 13),
    ]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_part_of_a_plan_is_the_beginning_of_the_whole(seed: int, count: int) -> None:
    scenario = changed(MIXED, seed=seed, duration_s=10)

    whole = list(draw_plan(scenario))

    assert list(islice(draw_plan(scenario), count)) == whole[:count]
    assert list(draw_plan(changed(scenario, duration_s=20, arrivals=Arrivals(rate=20))))[: len(whole)] == whole, (
        "a longer run begins with the shorter one"
    )


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_indexes_count_and_times_ascend_within_the_duration(seed: int) -> None:
    planned = list(draw_plan(changed(MIXED, seed=seed, duration_s=10)))

    assert [each.index for each in planned] == list(range(len(planned)))
    assert all(before.at_s <= after.at_s for before, after in pairwise(planned))
    assert all(0 <= each.at_s < 10 and each.max_tokens >= 1 for each in planned)


def test_kinds_tenants_and_models_have_their_shares() -> None:
    scenario = changed(
        MIXED,
        duration_s=300,
        kinds=[CHAT, CODE],
        tenants=[
            Share(name="a", weight=1),
            Share(name="none", weight=0),
            Share(name="b", weight=9),
            Share(name="last", weight=0),
        ],
        models=[Share(name="base", weight=0.5), Share(name="adapter", weight=1.5)],
    )

    planned = list(draw_plan(scenario))
    shares = {
        name: count / len(planned)
        for name, count in Counter(chain(*((each.kind, each.tenant, each.model) for each in planned))).items()
    }

    assert shares == pytest.approx(
        {"chat": 0.75, "code": 0.25, "a": 0.1, "b": 0.9, "base": 0.25, "adapter": 0.75}, abs=0.03
    )


def test_without_models_the_target_chooses() -> None:
    assert {each.model for each in draw_plan(MIXED)} == {None}


def test_a_request_is_asked_as_its_kind_says() -> None:
    planned = {each.kind: each for each in draw_plan(MIXED)}
    chat, code, talk = planned["chat"], planned["code"], planned["talk"]

    assert (chat.endpoint, chat.stream, chat.ignore_eos, chat.temperature, chat.seed) == (
        "chat",
        True,
        False,
        0.0,
        None,
    )
    assert isinstance(chat.prompt, str)
    assert (code.endpoint, code.stream, code.ignore_eos) == ("completions", False, True)
    assert isinstance(code.prompt, list)
    assert talk.temperature == 0.7
    assert talk.seed is not None


def test_lengths_are_drawn_as_the_scenario_says() -> None:
    planned = list(draw_plan(changed(MIXED, duration_s=200, kinds=[CHAT, CODE])))
    words = [len(each.prompt.split()) for each in planned if isinstance(each.prompt, str)]
    ids = [len(each.prompt) for each in planned if isinstance(each.prompt, list)]

    assert set(words) == set(range(5, 21))
    assert set(ids) == {4, 8}
    assert np.median([each.max_tokens for each in planned if each.kind == "chat"]) == pytest.approx(30, abs=2)
    assert {each.max_tokens for each in planned if each.kind == "code"} == {64}


def test_prompts_of_different_requests_are_different() -> None:
    prompts = [str(each.prompt) for each in draw_plan(MIXED) if each.kind != "code"]

    assert len(set(prompts)) == len(prompts)


def test_sampled_requests_have_seeds_of_their_own_unless_the_scenario_wants_none() -> None:
    kind = Kind(temperature=1.0, prompts=Prompts(tokens=Lengths(constant=2)))
    seeds = [each.seed for each in draw_plan(changed(MIXED, kinds=[kind]))]
    unseeded = {each.seed for each in draw_plan(changed(MIXED, kinds=[msgspec.structs.replace(kind, seeded=False)]))}

    assert None not in seeds
    assert len(set(seeds)) == len(seeds)
    assert unseeded == {None}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tenants": [Share(name="a"), Share(name="b"), Share(name="c", weight=4)]}, ["tenant"]),
        ({"models": [Share(name="base"), Share(name="adapter")]}, ["model"]),
        ({"cancel": Cancel(share=0.6)}, ["cancel_after_s"]),
        ({"cancel": Cancel(share=0.25, after_s=Lengths(lognormal=(1, 5)))}, ["cancel_after_s"]),
        ({"arrivals": Arrivals(process="constant", rate=20)}, ["at_s"]),
        ({"kinds": [msgspec.structs.replace(CHAT, output_tokens=Lengths(uniform=(2, 4))), CODE, TALK]}, ["max_tokens"]),
        (
            {
                "kinds": [
                    CHAT,
                    msgspec.structs.replace(CODE, prompts=Prompts(source="tokens", tokens=Lengths(constant=9))),
                    TALK,
                ]
            },
            ["prompt"],
        ),
        (
            {"kinds": [CHAT, msgspec.structs.replace(CODE, stream=True), msgspec.structs.replace(TALK, seeded=False)]},
            ["stream", "seed"],
        ),
    ],
)
def test_a_change_of_one_concern_leaves_the_others_as_they_were(fields: dict[str, object], names: list[str]) -> None:
    before, after = list(draw_plan(MIXED)), list(draw_plan(changed(MIXED, **fields)))
    pairs = list(zip(before, after, strict=False))

    assert len(pairs) > 1000
    assert all(without(old, *names) == without(new, *names) for old, new in pairs)
    for name in names:
        assert any(getattr(old, name) != getattr(new, name) for old, new in pairs)


def test_turns_of_a_session_come_one_behind_the_other_at_its_start() -> None:
    talk = [each for each in draw_plan(MIXED) if each.kind == "talk"]
    sessions: defaultdict[str | None, list[Planned]] = defaultdict(list)
    for each in talk:
        sessions[each.session].append(each)

    assert None not in sessions
    assert {len(turns) for turns in sessions.values()} == {1, 2, 5}
    for turns in sessions.values():
        first = turns[0]
        assert [each.turn for each in turns] == list(range(len(turns)))
        assert [each.index for each in turns] == list(range(first.index, first.index + len(turns)))
        assert [each.is_last_turn for each in turns] == [False] * (len(turns) - 1) + [True]
        assert {(each.at_s, each.tenant, each.model) for each in turns} == {(first.at_s, first.tenant, first.model)}
        assert first.think_s == 0
        assert all(1 <= each.think_s <= 3 and each.system is None for each in turns[1:])


def test_all_sessions_have_the_same_system_message() -> None:
    systems = {each.system for each in draw_plan(MIXED) if each.kind == "talk" and each.turn == 0}
    (system,) = systems

    assert system is not None
    assert len(system.split()) == 12
    assert {each.system for each in draw_plan(MIXED) if each.kind != "talk"} == {None}


def test_requests_outside_sessions_belong_to_none() -> None:
    assert {(each.session, each.turn, each.is_last_turn) for each in draw_plan(MIXED) if each.kind != "talk"} == {
        (None, 0, True)
    }


def test_no_more_requests_than_asked_for_and_a_session_that_is_cut_ends_there() -> None:
    for requests in range(1, 40):
        planned = list(draw_plan(changed(MIXED, duration_s=None, requests=requests, kinds=[TALK])))

        assert len(planned) == requests
        assert planned[-1].is_last_turn


def test_prompts_of_a_group_begin_alike_and_go_on_differently() -> None:
    prompts = Prompts(tokens=Lengths(uniform=(5, 30)), shared_prefix_tokens=16, prefix_groups=3)
    for source, endpoint in (("words", "chat"), ("tokens", "completions")):
        of_source = msgspec.structs.replace(prompts, source=source)
        kind = Kind(endpoint=endpoint, prompts=of_source)  # type: ignore[arg-type]
        planned = [
            each.prompt.split() if isinstance(each.prompt, str) else each.prompt
            for each in draw_plan(changed(MIXED, kinds=[kind]))
        ]
        groups = Counter(tuple(each[:16]) for each in planned)

        assert len(groups) == 3
        assert all(count / len(planned) == pytest.approx(1 / 3, abs=0.05) for count in groups.values())
        assert {len(each) for each in planned} == set(range(17, 31)), (
            "the prefix is part of the length, and one token of its own follows"
        )
        assert len({tuple(each[16:22]) for each in planned if len(each) > 22}) == sum(
            len(each) > 22 for each in planned
        )


def test_only_the_first_turn_of_a_session_has_the_prefix() -> None:
    kind = msgspec.structs.replace(TALK, prompts=Prompts(tokens=Lengths(constant=30), shared_prefix_tokens=16))
    planned = list(draw_plan(changed(MIXED, kinds=[kind])))
    beginnings = {
        turn > 0: {" ".join(str(each.prompt).split()[:16]) for each in planned if (each.turn > 0) == (turn > 0)}
        for turn in (0, 1)
    }

    assert len(beginnings[False]) == 1
    assert len(beginnings[True]) == sum(each.turn > 0 for each in planned)
    assert all(len(str(each.prompt).split()) == 30 for each in planned)


def test_the_cancelled_share_hangs_up_when_it_should() -> None:
    planned = list(
        draw_plan(changed(MIXED, duration_s=200, cancel=Cancel(share=0.25, after_s=Lengths(uniform=(0.5, 1.5)))))
    )
    after = [each.cancel_after_s for each in planned if each.cancel_after_s is not None]

    assert len(after) / len(planned) == pytest.approx(0.25, abs=0.02)
    assert min(after) >= 0.5
    assert max(after) <= 1.5
    assert np.mean(after) == pytest.approx(1.0, abs=0.05)


def test_nobody_hangs_up_by_default() -> None:
    assert {each.cancel_after_s for each in draw_plan(changed(MIXED, cancel=Cancel()))} == {None}


def test_a_closed_loop_goes_on_until_its_requests_are_spent_all_at_once() -> None:
    planned = list(draw_plan(changed(MIXED, loop="closed", requests=500, duration_s=1)))

    assert len(planned) == 500
    assert {each.at_s for each in planned} == {0.0}
    assert len(list(islice(draw_plan(changed(MIXED, loop="closed")), 5000))) == 5000, "its duration is the runner's"


def test_corpus_prompts_go_as_they_are_and_none_twice_before_all(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"turns": [f"question {row}", f"more of {row}"]}) + "\n" for row in range(40)),
        encoding="utf-8",
    )
    kinds = [Kind(name=name, prompts=Prompts(source="corpus", path=path)) for name in ("one", "two")]

    planned = list(draw_plan(changed(MIXED, kinds=kinds, duration_s=None, requests=80)))

    assert {each.kind for each in planned} == {"one", "two"}
    for half in (planned[:40], planned[40:]):
        assert {each.prompt for each in half} == {f"question {row}" for row in range(40)}


def test_a_session_goes_through_a_corpus_rows_turns_and_then_through_another_rows(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"turns": [f"question {row}", f"more of {row}"]}) + "\n" for row in range(40)),
        encoding="utf-8",
    )
    kind = Kind(prompts=Prompts(source="corpus", path=path), sessions=Sessions(turns=Lengths(constant=5)))

    planned = list(draw_plan(changed(MIXED, kinds=[kind], duration_s=None, requests=10)))

    for session in (planned[:5], planned[5:]):
        prompts = [str(each.prompt) for each in session]
        assert [text.split()[0] for text in prompts] == ["question", "more", "question", "more", "question"]
        assert [text.split()[-1] for text in prompts[:4:2]] == [text.split()[-1] for text in prompts[1:4:2]]
        assert len({text.split()[-1] for text in prompts}) == 3


def test_a_trace_sets_times_and_lengths(tmp_path: Path) -> None:
    trace = msgspec.structs.replace(small_mooncake(tmp_path / "trace.jsonl"), time_scale=0.5, token_scale=1 / 16)
    kind = Kind(endpoint="completions", ignore_eos=True, prompts=Prompts(source="tokens"))
    scenario = Scenario(duration_s=5, trace=trace, kinds=[kind])

    planned = list(draw_plan(scenario))

    assert [each.at_s for each in planned] == pytest.approx([row / 8 for row in range(40)])
    assert [len(each.prompt) for each in planned[:3]] == [32 + 26, 32 * 3 + 26, 32 * 4 + 26]
    assert [each.max_tokens for each in planned[:3]] == [1, 1, 1]
    assert planned[39].max_tokens == 3


def test_a_trace_ends_the_plan_and_its_requests_may_end_it_earlier(tmp_path: Path) -> None:
    scenario = Scenario(duration_s=None, trace=small_mooncake(tmp_path / "trace.jsonl"))

    assert len(list(draw_plan(scenario))) == 120
    assert len(list(draw_plan(changed(scenario, requests=7)))) == 7
    closed = list(draw_plan(changed(scenario, loop="closed", duration_s=1)))
    assert (len(closed), {each.at_s for each in closed}) == (120, {0.0})


@pytest.mark.parametrize("source", ["words", "tokens"])
def test_replayed_prompts_share_prefixes_as_the_traces_ids_do(tmp_path: Path, source: str) -> None:
    trace = msgspec.structs.replace(small_mooncake(tmp_path / "trace.jsonl"), token_scale=1 / 16)
    ids = [json.loads(line)["hash_ids"] for line in trace.path.read_text(encoding="utf-8").splitlines()]
    prompts = Prompts(source=source)  # type: ignore[arg-type]
    kinds = [Kind(name=name, endpoint="completions", prompts=prompts) for name in ("one", "two")]

    planned = list(draw_plan(Scenario(duration_s=None, trace=trace, kinds=kinds)))
    number: dict[str, int] = {}
    prompts = [
        each.prompt
        if isinstance(each.prompt, list)
        else [number.setdefault(word, len(number)) for word in each.prompt.split()]
        for each in planned
    ]

    assert {each.kind for each in planned} == {"one", "two"}
    assert measure_hit_rate(prompts, 32) == measure_hit_rate_of_ids(ids) > 0.3


def test_the_published_trace_has_its_hit_rate_when_replayed(data_dir: Path) -> None:
    path = data_dir / "mooncake" / "conversation_trace.jsonl"
    ids = [json.loads(line)["hash_ids"] for line in path.read_text(encoding="utf-8").splitlines()[:600]]
    kind = Kind(endpoint="completions", prompts=Prompts(source="tokens"))

    def hit_rate(scale: float, block_tokens: int) -> float:
        scenario = Scenario(
            duration_s=None, requests=600, trace=Trace(format="mooncake", path=path, token_scale=scale), kinds=[kind]
        )
        return measure_hit_rate(
            (each.prompt for each in draw_plan(scenario) if isinstance(each.prompt, list)), block_tokens
        )

    assert hit_rate(1.0, 512) == measure_hit_rate_of_ids(ids)
    assert hit_rate(1 / 16, 32) == pytest.approx(measure_hit_rate_of_ids(ids), abs=0.01)


def test_requests_of_a_traces_session_begin_alike_and_stay_with_one_tenant(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    rows = [f"{row},GPT-4,{20 + row},5,{25 + row},Conversation log,{row % 4},1" for row in range(60)]
    path.write_text(
        "\n".join(
            ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type,Session ID,Elapsed time", *rows]
        ),
        encoding="utf-8",
    )
    tenants = [Share(name=f"tenant-{number}") for number in range(8)]
    kinds = [Kind(name=f"kind-{number}", prompts=Prompts(tokens=Lengths(constant=9))) for number in range(5)]

    planned = list(
        draw_plan(Scenario(duration_s=None, trace=Trace(format="burstgpt", path=path), tenants=tenants, kinds=kinds))
    )

    assert [len(str(each.prompt).split()) for each in planned] == [20 + row for row in range(60)]
    assert all(
        str(later.prompt).startswith(f"{each.prompt} ") for each, later in zip(planned, planned[4:], strict=False)
    )
    assert not any(str(other.prompt).startswith(str(each.prompt)[:40]) for each, other in pairwise(planned))
    assert all(
        (each.tenant, each.kind) == (later.tenant, later.kind)
        for each, later in zip(planned, planned[4:], strict=False)
    )
    assert len({each.tenant for each in planned}) > 1
    assert {each.session for each in planned} == {None}, (
        "they leave at the trace's times, whether or not the answer before is there"
    )


def test_a_trace_without_ids_may_have_a_shared_prefix(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{row:02}.5,{10 + row},9\n" for row in range(20)),
        encoding="utf-8",
    )
    kind = Kind(prompts=Prompts(shared_prefix_tokens=12))

    planned = [
        str(each.prompt).split() for each in draw_plan(Scenario(trace=Trace(format="azure", path=path), kinds=[kind]))
    ]

    assert [len(words) for words in planned] == [max(13, 10 + row) for row in range(20)]
    assert len({tuple(words[:12]) for words in planned}) == 1
    assert len({tuple(words[12:14]) for words in planned}) == 20


def test_a_trace_that_is_not_there_is_said_before_the_first_request(tmp_path: Path) -> None:
    with pytest.raises(TraceInvalid, match="nowhere"):
        next(draw_plan(Scenario(trace=Trace(format="azure", path=tmp_path / "nowhere.csv"))))


def test_a_plan_is_drawn_far_faster_than_it_is_sent() -> None:
    """5,000 requests a second of processor time, with a margin of several times."""
    scenario = changed(MIXED, duration_s=None, requests=5000)

    begin = time.thread_time()
    count = sum(1 for _ in draw_plan(scenario))

    assert rested(time.thread_time() - begin) / count < 1 / 5000
