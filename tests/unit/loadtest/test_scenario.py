import json
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.scenario import (
    EXAMPLES,
    Arrivals,
    Kind,
    Lengths,
    Prompts,
    Scenario,
    Sessions,
    Share,
    Trace,
    find_scenario,
    load_scenario,
    to_tree,
)
from penstock_loadtest.workload.plan import draw_plan

EXAMPLE_NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
MOONCAKE = "".join(
    json.dumps({"timestamp": 500 * row, "input_length": 700, "output_length": 20, "hash_ids": [1, 2 + row % 3]}) + "\n"
    for row in range(20)
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
TRACES = {"mooncake": MOONCAKE, "azure": AZURE}


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def sentence_of(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ScenarioInvalid) as caught:
        load_scenario(path, list(overrides))
    return str(caught.value)


def test_no_file_is_the_defaults() -> None:
    assert load_scenario(None, []) == Scenario()


def test_a_file_is_read_whole_and_named_after_itself(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "arrivals: {process: gamma, rate: 4, cv: 2.5}\nkinds: [{name: a, output_tokens: {uniform: [1, 9]}}]\n"
        "requests: 10",
    )

    assert load_scenario(path, []) == Scenario(
        name="mine",
        arrivals=Arrivals(process="gamma", rate=4, cv=2.5),
        kinds=[Kind(name="a", output_tokens=Lengths(uniform=(1, 9)))],
        requests=10,
    )
    assert load_scenario(path, ["name=other"]).name == "other"


def test_an_empty_file_is_the_defaults_under_its_name(tmp_path: Path) -> None:
    assert load_scenario(written(tmp_path, "# nothing\n"), []) == Scenario(name="mine")


def test_overrides_go_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "arrivals: {rate: 4}\nkinds: [{name: a}, {name: b}]")

    scenario = load_scenario(
        path, ["arrivals.rate=9", "kinds.1.prompts.tokens={lognormal: [100, 500]}", "duration_s=null", "requests=5"]
    )

    assert scenario.arrivals == Arrivals(rate=9)
    assert [kind.prompts.tokens for kind in scenario.kinds] == [Lengths(constant=256), Lengths(lognormal=(100, 500))]
    assert (scenario.duration_s, scenario.requests) == (None, 5)


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "scenarios"
    folder.mkdir()
    written(folder, "trace: {format: azure, path: ../a.csv}\nkinds: [{prompts: {tokenizer: tokenizer.json}}]")
    monkeypatch.chdir(tmp_path)

    scenario = load_scenario(Path("scenarios/mine.yaml"), [])
    moved = load_scenario(Path("scenarios/mine.yaml"), ["trace.path=b.csv"])

    assert scenario.trace is not None
    assert moved.trace is not None
    assert scenario.trace.path == folder / ".." / "a.csv"
    assert scenario.kinds[0].prompts.tokenizer == folder / "tokenizer.json"
    assert moved.trace.path == tmp_path / "b.csv"


def test_a_scenario_written_as_json_is_read_back_the_same(tmp_path: Path) -> None:
    trace = Trace(format="mooncake", path=Path("/data/trace.jsonl"), token_scale=1e-5)
    scenario = Scenario(
        name="x",
        trace=trace,
        kinds=[Kind(output_tokens=Lengths(choices=[1, 2], max=7)), Kind(name="b")],
        models=[Share(name="m")],
    )

    path = written(tmp_path, json.dumps(to_tree(scenario), allow_nan=False), "scenario.json")

    assert load_scenario(path, []) == scenario


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_every_example_loads_by_name_and_has_a_plan(name: str, tmp_path: Path) -> None:
    overrides = [f"trace.path={written(tmp_path, TRACES[name], name)}"] if name in TRACES else []

    scenario = load_scenario(Path(name), overrides)
    planned = list(islice(draw_plan(scenario), 20))

    assert scenario.name == name
    assert len(planned) >= 2
    assert (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8").startswith("# "), "an example says what it is for"


def test_the_mixed_example_has_some_of_everything_in_a_minute() -> None:
    planned = list(draw_plan(load_scenario(Path("mixed"), [])))

    assert 70 <= len(planned) <= 110, "1.2 to 1.8 requests a second"
    assert 60 <= sum(each.max_tokens for each in planned) / 60 <= 120
    assert {each.kind for each in planned} == {"chat", "completion", "conversation", "whole"}
    assert {each.endpoint for each in planned} == {"chat", "completions"}
    assert any(each.cancel_after_s is not None for each in planned)
    assert any(not each.stream for each in planned)
    assert any(each.turn == 3 for each in planned)
    assert max(len(str(each.prompt).split()) + each.max_tokens for each in planned) < 1000


def test_a_file_goes_before_an_example_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert find_scenario(Path("mixed")) == EXAMPLES / "mixed.yaml"
    written(tmp_path, "", "mixed")
    assert find_scenario(Path("mixed")) == Path("mixed")


def test_what_is_neither_file_nor_example_is_a_sentence_with_the_examples() -> None:
    assert sentence_of(Path("mixd")) == f"mixd is neither a file nor one of the examples {', '.join(EXAMPLE_NAMES)}."
    assert "../mixed is neither" in sentence_of(Path("../mixed"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not YAML: while parsing"),
        ("- 1", "is not a mapping of settings."),
        ("arrivals: {rats: 4}", "mine.yaml: arrivals: object contains unknown field `rats`."),
        ("rate: 4", "mine.yaml: Object contains unknown field `rate`."),
        (
            "kinds: [{}, {name: b, prompts: {tokens: {constant: x}}}]",
            "mine.yaml: kinds.1.prompts.tokens.constant: expected `float | null`, got `str`.",
        ),
        ("arrivals: {process: fast}", "mine.yaml: arrivals.process: invalid enum value 'fast'."),
        ("kinds: [{}, {name: b, weight: -1}]", "mine.yaml: kinds.1.weight is -1; it must be 0 or more."),
        ("requests: 0", "mine.yaml: requests is 0; it must be above 0."),
        ("trace: {format: azure}", "mine.yaml: trace: object missing required field `path`."),
    ],
)
def test_a_file_that_can_not_be_run_is_a_sentence_with_file_and_key(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in sentence_of(written(tmp_path, text))


def test_a_file_that_can_not_be_read_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: \xff\xfe")

    assert "mine.yaml is not YAML" in sentence_of(path)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "kinds.0.output_tokens={}",
            "kinds.0.output_tokens.constant is not set; it must be exactly one of constant, uniform, lognormal, "
            "choices",
        ),
        ("kinds.0.output_tokens={constant: 1, choices: [1]}", "kinds.0.output_tokens.constant and choices are set"),
        ("kinds.0.output_tokens={choices: []}", "kinds.0.output_tokens.choices is empty"),
        ("kinds.0.output_tokens={constant: -4}", "kinds.0.output_tokens.constant is -4; it can't be negative"),
        ("kinds.0.output_tokens={constant: .nan}", "kinds.0.output_tokens.constant is nan"),
        ("kinds.0.output_tokens={uniform: [9, 1]}", "kinds.0.output_tokens.uniform is 9, 1;"),
        ("kinds.0.output_tokens={lognormal: [0, 1]}", "kinds.0.output_tokens.lognormal is 0, 1;"),
        ("kinds.0.output_tokens={lognormal: [9, 1]}", "kinds.0.output_tokens.lognormal is 9, 1;"),
        ("kinds.0.output_tokens={constant: 1, min: 5, max: 4}", "kinds.0.output_tokens.min is 5, above max, 4"),
        ("arrivals.rate=0", "arrivals.rate is 0; it must be above 0"),
        ("arrivals.rate=.inf", "arrivals.rate is inf"),
        ("arrivals.cv=2", "arrivals.cv is for gamma"),
        ("arrivals={process: gamma, cv: 0}", "arrivals.cv is 0; it must be above 0"),
        ("arrivals.to_rate=2", "arrivals.to_rate is for step, ramp and spike, not for poisson"),
        ("arrivals.process=step", "arrivals.to_rate is missing"),
        ("arrivals={process: ramp, rate: 0, to_rate: 0}", "arrivals.rate and to_rate are both 0"),
        ("arrivals={process: step, to_rate: -1}", "arrivals.to_rate is -1"),
        ("arrivals={process: ramp, to_rate: 2, at_s: 1}", "arrivals.at_s is for step and spike, not for ramp"),
        ("arrivals={process: step, to_rate: 2, length_s: 1}", "arrivals.length_s is for ramp and spike, not for step"),
        ("arrivals={process: spike, to_rate: 2, at_s: -1}", "arrivals.at_s is -1"),
        ("cancel.share=1.5", "cancel.share is 1.5; it must be from 0 to 1"),
        ("targets.ttft_s=0", "targets.ttft_s is 0"),
        ("concurrency=0", "concurrency is 0"),
        ("seed=-1", "seed is -1"),
        ("timeout_s=0", "timeout_s is 0"),
        ("warmup_s=60", "warmup_s is 60, not below duration_s"),
        ("kinds=[]", "kinds is empty"),
        ("kinds=[{}, {}]", "kinds has two of the same name: requests, requests"),
        ("kinds.0.weight=0", "kinds have no weight above 0"),
        ("kinds.0.name=''", "kinds.0.name is empty"),
        ("kinds.0.temperature=-1", "kinds.0.temperature is -1"),
        ("tenants=[]", "tenants is empty"),
        ("tenants=[{name: a}, {name: a}]", "tenants has two of the same name: a, a"),
        ("models=[{name: a, key_env: X}]", "models can't have a key_env"),
        ("models=[{name: a, weight: 0}]", "models have no weight above 0"),
        ("kinds.0.prompts.source=tokens", "kinds.0.prompts.source is tokens; only endpoint completions"),
        ("kinds.0.prompts.source=corpus", "kinds.0.prompts.path is missing"),
        ("kinds.0.prompts.path=x", "kinds.0.prompts.path is for source corpus"),
        ("kinds.0.prompts.token_range=[9, 9]", "kinds.0.prompts.token_range is 9, 9"),
        ("kinds.0.prompts.shared_prefix_tokens=-1", "kinds.0.prompts.shared_prefix_tokens is -1"),
        ("kinds.0.prompts.prefix_groups=0", "kinds.0.prompts.prefix_groups is 0"),
        ("kinds.0={endpoint: completions, sessions: {}}", "kinds.0.sessions need endpoint chat"),
        ("kinds.0.sessions={system_tokens: -1}", "kinds.0.sessions.system_tokens is -1"),
        ("trace={format: azure, path: x, rate: 2}", "trace.rate is for ServeGen's client rates, not for azure"),
        ("trace={format: azure, path: x, time_scale: 0}", "trace.time_scale is 0"),
        ("trace={format: azure, path: x, max_prompt_tokens: 0}", "trace.max_prompt_tokens is 0"),
        ("trace={format: azure, path: x, start_s: 5, end_s: 5}", "trace.start_s is 5, not before end_s, 5"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence_that_names_the_key(setting: str, sentence: str) -> None:
    assert sentence_of(None, setting).startswith(f"The scenario: {sentence}")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["duration_s=null"], "duration_s and requests are both null, and there is no trace"),
        (
            ["duration_s=null", "requests=5", "arrivals={process: spike, to_rate: 2}"],
            "arrivals.at_s and arrivals.length_s must be set where duration_s is null",
        ),
        (["repeat=2", "kinds.0.temperature=1", "kinds.0.seeded=false"], "repeat is 2, but no kind is greedy or seeded"),
        (["trace={format: azure, path: x}", "arrivals.rate=2"], "arrivals and trace are both set"),
        (["trace={format: azure, path: x}", "kinds.0.sessions={}"], "kinds.0.sessions and trace are both set"),
        (
            ["trace={format: mooncake, path: x}", "kinds.0.prompts.shared_prefix_tokens=9"],
            "kinds.0.prompts.shared_prefix_tokens is set",
        ),
        (
            ["trace={format: mooncake, path: x}", "kinds.0.prompts={source: corpus, path: x}"],
            "kinds.0.prompts.source is corpus",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: list[str], sentence: str) -> None:
    assert sentence in sentence_of(None, *settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["duration_s=null", "requests=5"],
        ["duration_s=null", "trace={format: azure, path: x}"],
        ["loop=closed", "trace={format: mooncake, path: x}"],
        ["arrivals={process: ramp, rate: 0, to_rate: 4}"],
        ["arrivals={process: step, to_rate: 0}"],
        ["cancel.after_s.constant=1"],
        ["kinds=[{weight: 0}, {name: b}]"],
        ["kinds.0={endpoint: completions, prompts: {source: tokens}}"],
    ],
)
def test_unusual_settings_that_make_sense_are_taken(settings: list[str]) -> None:
    load_scenario(None, settings)


def test_a_scenario_made_in_code_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        Lengths()
    with pytest.raises(ValueError, match="only endpoint completions"):
        Kind(prompts=Prompts(source="tokens"))
    with pytest.raises(ValueError, match="both set"):
        Scenario(trace=Trace(format="azure", path=Path("x")), kinds=[Kind(sessions=Sessions())])
    with pytest.raises(ValueError, match="rate is 0"):
        msgspec.structs.replace(Arrivals(), rate=0)
