"""`penstock plan` from the command line."""

import json
from pathlib import Path

import httpx
import jsonschema
import msgspec
import pytest
import typer
import yaml
from typer.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.base.metrics import Metrics
from penstock.cli.plan.command import plan as command
from penstock.cli.plan.measured import fetch_measured, read_page
from penstock.cli.plan.question import parse_duration, parse_targets
from penstock.cli.plan.traces import busiest_rps, read_load
from penstock.perf.costs_page import show_costs
from penstock.perf.planning.cards import CARDS
from penstock.perf.planning.choice import kv_formats
from penstock.perf.planning.known import known_shape
from penstock.perf.planning.loads import Targets
from penstock.wire.frames import Stairs, StepCosts
from penstock.workers.config import EngineConfig

ROOT = Path(__file__).parents[4]
COMMAND = typer.Typer()
COMMAND.command()(command)
ONE = ("--gpu", "H100", "--count", "1")
SEVENTY = "layers=80,hidden=8192,heads=64,kv_heads=8,params=70e9"


def plan(*arguments: str) -> tuple[int, str]:
    """Exit status and output, lines joined."""
    result = CliRunner().invoke(COMMAND, [*arguments])
    return result.exit_code, " ".join(result.output.split())


def plan_tree(*arguments: str) -> dict:
    result = CliRunner().invoke(COMMAND, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_page_has_lines_a_bar_every_option_and_conclusions() -> None:
    status, page = plan("--model", "llama-3-8b", *ONE, "--slo", "ttft=1s,tpot=50ms", "--rate", "5")

    assert status == 0, page
    assert "llama-3-8b: 8.03 billion parameters" in page
    assert "weights 13.96 6.98 billion, bf16" in page
    assert "█" in page
    assert "░" in page
    assert (
        "The cheapest that serves it within TTFT 1.00 s and TPOT 50 ms is H100, bf16, KV in bf16: one replica" in page
    )
    assert "Prompts are bound by FLOP/s" in page
    assert "A tariff of" in page


def test_the_sentence_about_sequences_has_the_numbers_of_the_sums() -> None:
    arguments = ("--model", "llama-3-70b", *ONE, "--weights", "int4", "--kv", "bf16", "--lm-head", "keep")

    _, page = plan(*arguments, "--adapters", "8")

    assert "80 GB holds 7 to 9 of these at 8k, not 16: 8.0 GB of each card stay free (that alone leaves 13)" in page


def test_70b_at_exactly_4_bits_holds_16_bare_and_13_with_a_tenth_reserved() -> None:
    (option,) = plan_tree("--shape", SEVENTY, *ONE, "--weights", "exact4", "--kv", "bf16")["options"]

    assert option["memory"]["sequences"]["bare"] == 16
    assert option["memory"]["sequences"]["reserved"] == 13


def test_every_card_and_format_that_fits_is_weighed_and_one_is_cheapest() -> None:
    tree = plan_tree("--model", "llama-3-8b", "--slo", "ttft=1s,tpot=50ms", "--rate", "10")

    options = tree["options"]
    assert {option["card"] for option in options} == {"L4", "RTX4090", "L40S", "A100", "H100", "H200", "B200"}
    assert {option["weights"] for option in options} == {"bf16", "fp8", "int8", "int4"}
    served = [option for option in options if option["serves"]]
    (best,) = [option for option in served if option["is_cheapest"]]
    assert best["price_per_month"] == min(option["price_per_month"] for option in served)
    for option in served:
        per_second = option["full"]["rate_rps"]
        costs = option["cost_of_million"]
        hourly = 3600 * per_second * (1024 * costs["input"] + 256 * costs["output"]) / 1e6
        assert hourly == pytest.approx(option["price_per_hour"])


def test_a_price_that_is_given_goes_before_the_table() -> None:
    (option,) = plan_tree("--model", "llama-3-8b", *ONE, "--weights", "bf16", "--kv", "bf16", "--price-per-hour", "2")[
        "options"
    ]

    assert option["price_per_hour"] == 2
    assert option["price_per_month"] == 1460


def test_the_demo_checkpoint_is_planned_in_its_own_format() -> None:
    tree = plan_tree("--model", "demo", "--gpu", "L4", "--count", "1", "--context", "2k")

    known = known_shape("smollm2-135m")
    assert known is not None
    assert tree["model"]["parameters"] == known.num_params
    assert {option["weights"] for option in tree["options"]} == {"int4"}


def test_a_directory_with_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    tree = plan_tree("--model", str(tmp_path), *ONE)

    known = known_shape("qwen3-8b")
    assert known is not None
    assert tree["model"]["parameters"] == known.num_params


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "llama-3-8b", *ONE),
        ("--model", "llama-3-70b", "--gpu", "H100", "--count", "2", "--kv", "fp8", "--weights", "int4"),
        ("--model", "demo", "--gpu", "L4", "--adapters", "4", "--max-num-seqs", "32", "--max-batched-tokens", "2048"),
    ],
)
def test_helm_values_pass_the_charts_schema(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(COMMAND, [*arguments, "--rate", "3", "--helm"])

    assert result.exit_code == 0, result.output
    values = yaml.safe_load(result.stdout)
    defaults = yaml.safe_load((ROOT / "deploy" / "helm" / "values.yaml").read_text())
    schema = json.loads((ROOT / "deploy" / "helm" / "values.schema.json").read_text())
    jsonschema.validate({**defaults, **values, "image": {**defaults["image"], "repository": "here"}}, schema)
    (pool,) = values["pools"]
    assert pool["engine"]["kv_memory_bytes"] == "auto"
    wrong = {**defaults, "pools": [{**pool, "engine": {**pool["engine"], "devise": "cuda"}}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_a_format_of_keys_and_values_is_planned_where_it_is_read_and_named_as_it_is() -> None:
    result = CliRunner().invoke(COMMAND, ["--model", "llama-3-8b", *ONE, "--kv", "fp8", "--helm"])
    tree = plan_tree("--model", "llama-3-8b", "--gpu", "A100", "--gpu", "H100", "--kv", "bf16", "--kv", "fp8")

    (pool,) = yaml.safe_load(result.stdout)["pools"]
    assert pool["engine"]["kv_dtype"] == "fp8"
    assert {(option["card"], option["kv"]) for option in tree["options"]} == {
        ("A100", "bf16"), ("H100", "bf16"), ("H100", "fp8")
    }  # fmt: skip


def test_every_format_that_is_planned_for_a_device_is_one_that_the_engine_takes_there() -> None:
    for device, card in (("cpu", None), ("cuda", CARDS["H100"])):
        for kv in kv_formats(card):
            if kv.name != "float32":
                EngineConfig(device=device, kv_dtype=kv.name)
        for name in {"bf16", "int8", "fp8"} - {kv.name for kv in kv_formats(card)}:
            with pytest.raises(ConfigError, match="8-bit keys and values"):
                EngineConfig(device=device, kv_dtype=name)


def test_a_trace_is_planned_for_its_busiest_minute(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    times_s = [float(second) for second in range(0, 300, 2)] + [300 + index / 10 for index in range(600)]
    lines = [
        {"timestamp": 1000 * at_s, "input_length": 1000, "output_length": 100, "hash_ids": [7, index]}
        for index, at_s in enumerate(times_s)
    ]
    trace.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    found = read_load(trace, 8192)
    status, page = plan("--model", "llama-3-8b", *ONE, "--load", str(trace))

    assert found.load.rate_rps == pytest.approx(10, rel=0.02)
    assert found.mean_rps == pytest.approx(750 / 360, rel=0.01)
    assert (found.load.prompt_tokens, found.load.output_tokens) == (1000, 100)
    assert found.hit_share == pytest.approx(0.5, abs=0.01)
    assert status == 0, page
    assert "10 in the busiest minute, which is planned for" in page


def test_requests_beyond_the_context_are_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,9000,109\n"
    )

    found = read_load(trace, 8192)

    assert (found.num_requests, found.num_too_long) == (2, 1)
    assert found.load.prompt_tokens == 374


def test_the_busiest_window_of_a_short_trace_is_all_of_it() -> None:
    assert busiest_rps([0.0, 1.0, 2.0, 10.0]) == 0.4
    assert busiest_rps([0.0, *[100.0 + index for index in range(30)], 500.0]) == 0.5


@pytest.mark.slow
def test_a_simulation_of_the_load_says_what_came_of_it(tmp_path: Path) -> None:
    status, page = plan(
        "--model", "llama-3-8b", *ONE, "--rate", "2", "--output", "32", "--slo", "ttft=1s,tpot=50ms",
        "--simulate", str(tmp_path / "run"),
    )  # fmt: skip

    assert status == 0, page
    assert "Simulated with 1 replica: " in page
    assert "100.0 % within the targets" in page
    facts = json.loads((tmp_path / "run" / "simulation.json").read_text())
    assert facts["sources"]["planned"] == "penstock plan, llama-3-8b"


COSTS = StepCosts(0.02, 0.001, 1e-4, 1e-9, 1e-7, knee_s=0.01, stairs=Stairs(256, 512, 0.02, ((64, 0.001),)))


def metrics_page(**pools: StepCosts) -> str:
    metrics = Metrics()
    for pool, costs in pools.items():
        for coefficient, value in show_costs(costs).items():
            metrics.step_cost.labels(pool, coefficient).set(value)
        metrics.kv_blocks.labels(pool).set(2000)
        metrics.replicas.labels(pool, "cloud").set(2)
    return metrics.render().decode()


def test_measured_costs_are_those_of_the_page() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=metrics_page(chat=COSTS)))

    found = fetch_measured("http://here:8001", None, httpx.Client(transport=transport))

    assert found.costs == COSTS
    assert (found.kv_blocks, found.replicas, found.pool) == (1000, 2, "chat")


def test_of_several_pools_one_must_be_named() -> None:
    page = metrics_page(chat=COSTS, code=StepCosts(base_s=1.0))

    with pytest.raises(ConfigError, match="chat, code; name one by --pool"):
        read_page(page, None)
    assert read_page(page, "code").costs.base_s == 1.0


def test_a_page_without_costs_is_refused() -> None:
    with pytest.raises(ConfigError, match="no replica is connected"):
        read_page(Metrics().render().decode(), None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "either --model or --shape must be given"),
        (("--model", "llama-3-8b", "--gpu", "V100"), "--gpu V100 is not in the table"),
        (("--model", "llama-3-8b", "--slo", "itl=3s"), "--slo has 'itl'"),
        (("--model", "llama-3-8b", "--slo", "ttft=3"), "no duration above 0"),
        (("--model", "llama-3-8b", "--weights", "int3"), "--weights int3 is none of"),
        (("--model", "llama-3.1-8b", "--input", "8k", "--output", "8k"), "longer than --context 8192"),
        (("--model", "llama-3-8b", "--input", "8k", "--output", "8k"), "16384 tokens, prompt and output, is more than"),
        (("--model", "llama-2-13b", "--context", "8k"), "llama-2-13b takes: it was made for 4096 tokens"),
        (("--model", "llama-2-13b", "--input", "5k"), "llama-2-13b takes: it was made for 4096 tokens"),
        (
            ("--model", "llama-3-8b", "--gpu", "A100", "--kv", "int8", "--helm"),
            "int8 is not for --gpu A100; 8-bit",
        ),
        (("--model", "llama-3-8b", "--gpu", "A100", "--kv", "fp8"), "--kv fp8 is not for --gpu A100"),
        (("--model", "llama-3-8b", "--gpu", "H100", "--kv", "float32"), "--kv float32 is not for --gpu H100"),
        (("--model", "llama-3-8b", "--kv", "int8"), "--kv int8 is not for --gpu L4, --gpu RTX4090"),
        (("--model", "llama-3-8b", "--gpu", "H100", "--gpu", "A100", "--kv", "fp8"), "--gpu A100 keeps keys and"),
        (("--model", "demo", "--gpu", "cpu", "--kv", "fp8", "--helm"), "--kv fp8 is not for --gpu cpu"),
        (("--model", "./nowhere"), "does not exist"),
        (("--model", "llama-3-8b", "--utilisation", "0"), "--utilisation is a number from 0.001 to 1, not 0"),
        (("--model", "llama-3-8b", "--measured", "http://127.0.0.1:9"), "name both, by --gpu and --weights"),
        (("--model", "llama-3-70b", *ONE, "--weights", "bf16", "--helm"), "there is no pool"),
    ],
)
def test_what_can_not_be_asked_is_refused_with_a_sentence(arguments: tuple[str, ...], told: str) -> None:
    status, page = plan(*arguments)

    assert status == 2
    assert told in page


HOSTILE = ("inf", "nan", "1e999", "-1", "1e-320", "9" * 400)
"""Numbers that no plan can be made for, whatever they are given for."""
NUMBERS = (
    "count", "context", "rate", "input", "output", "cached", "adapters", "rank", "memory", "memory-share",
    "max-num-seqs", "max-batched-tokens", "price-per-hour", "utilisation", "margin",
)  # fmt: skip
HARMLESS = {("cached", "1e-320"), ("price-per-hour", "1e-320"), ("margin", "1e-320")}
"""Values that are as good as 0."""


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_that_can_not_be_planned_with_is_refused_and_never_a_traceback(option: str, value: str) -> None:
    result = CliRunner().invoke(COMMAND, ["--model", "llama-3-8b", *ONE, f"--{option}", value])

    is_harmless = (option, value) in HARMLESS
    assert result.exit_code == (0 if is_harmless else 2), result.output
    assert isinstance(result.exception, SystemExit | None)
    assert f"--{option}" in result.output or is_harmless


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "params", "context"])
def test_a_shape_of_numbers_that_no_model_has_is_refused(key: str, value: str) -> None:
    result = CliRunner().invoke(COMMAND, ["--shape", f"{SEVENTY},{key}={value}", *ONE])

    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert f"{key}=" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--memory", "0"),
        ("--memory", "0.001"),
        ("--slo", f"ttft={'9' * 400}s"),
        ("--slo", "tpot=nan"),
        ("--count", "0"),
        ("--rate", "1e10"),
        ("--output", "0"),
        ("--context", "infk"),
        ("--max-num-seqs", "0"),
    ],
)
def test_numbers_beyond_their_bounds_are_refused(arguments: tuple[str, ...]) -> None:
    status, page = plan("--model", "llama-3-8b", *ONE, *arguments)

    assert status == 2, page


@pytest.mark.parametrize(
    "arguments",
    [
        ("--memory", "0.01"),
        ("--memory", "1e6", "--max-num-seqs", "1000000", "--max-batched-tokens", "100000000", "--count", "1"),
        ("--rate", "1e-6", "--cached", "0.99", "--input", "1", "--output", "1", "--price-per-hour", "0"),
        ("--rate", "1e9", "--price-per-hour", "1e9", "--utilisation", "0.001", "--margin", "1000"),
        ("--adapters", "1000000", "--rank", "1000000", "--memory-share", "0.001", "--count", "1024"),
    ],
)
def test_numbers_at_their_bounds_are_planned_with(arguments: tuple[str, ...]) -> None:
    status, page = plan("--model", "llama-3-8b", "--gpu", "H100", "--weights", "bf16", "--kv", "bf16", *arguments)

    assert status == 0, page


def test_without_a_context_it_is_the_models_where_that_is_less_than_8k() -> None:
    arguments = ("--model", "llama-2-13b", *ONE, "--weights", "bf16", "--kv", "bf16")

    tree, (_, page) = plan_tree(*arguments), plan(*arguments)

    assert tree["context_tokens"] == 4096
    assert tree["options"][0]["memory"]["sequence_bytes"] == 4096 * 2 * 40 * 40 * 128 * 2
    assert "of these at 4k" in page
    assert plan_tree("--model", "llama-3.1-8b", *ONE)["context_tokens"] == 8192
    assert plan_tree("--model", "llama-3.1-8b", *ONE, "--context", "32k")["context_tokens"] == 32768


def test_durations_and_targets_have_units() -> None:
    assert parse_duration("50ms") == 0.05
    assert parse_targets("ttft=1s,tpot=250ms") == Targets(1.0, 0.25)
    assert parse_targets(None) == Targets()
