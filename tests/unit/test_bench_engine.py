"""bench.engine: what rounds come to, what rivals' output says, and how contenders are asked."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.engine import PROMPT_TOKENS, Prompts, has_amx, in_turn, report, unrecorded
from bench.support.cpu import Spent
from bench.support.engine_goals import LLAMA, VLLM, Finding, Goal, Pair, rows, verdict
from bench.support.engine_operations import Steps
from bench.support.engine_quality import FIRST, NUM_WINDOWS, WINDOW, perplexity, windows_of
from bench.support.llama_cpp import Speed, read_batched, read_bench, read_build, read_perplexity
from bench.support.worker import ROOT, module_command, peak_bytes, worker
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from tests.unit.workers.tiny_models import saved, tiny_model

SPEED = Goal("batch 8: output", VLLM, "tokens/s", 2.0, 3.0)
MEMORY = Goal("most memory", LLAMA, "MB", 2.0, is_ceiling=True)


def test_a_goal_is_judged_by_the_median_of_the_rounds_ratios_and_not_by_the_ratio_of_medians() -> None:
    finding = Finding(SPEED, [Pair(300, 100), Pair(100, 200), Pair(50, 10)])

    assert finding.ratios == [3.0, 0.5, 5.0]
    assert finding.is_met
    assert [(row.ours, row.rival) for row in rows(finding)] == [(100, 100), (3.0, 2.0), (0.5, 2.0)]


def test_the_worst_round_is_the_lowest_of_a_floor_and_the_highest_of_a_ceiling() -> None:
    pairs = [Pair(10, 10), Pair(30, 10)]

    *_, lowest = rows(Finding(SPEED, pairs))
    *_, highest = rows(Finding(MEMORY, pairs))

    assert (lowest.ours, highest.ours) == (1.0, 3.0)


@pytest.mark.parametrize(("ours", "floor", "ceiling"), [(19, False, True), (20, True, True), (21, True, False)])
def test_a_floor_and_a_ceiling_are_reached_at_their_bound(ours: float, floor: bool, ceiling: bool) -> None:
    assert Finding(SPEED, [Pair(ours, 10)]).is_met is floor
    assert Finding(MEMORY, [Pair(ours, 10)]).is_met is ceiling


def test_a_goal_whose_rival_is_missing_is_not_met_and_says_so() -> None:
    finding = Finding(SPEED, [Pair(1000, None)] * 5)

    (row,) = rows(finding)

    assert not finding.is_met
    assert (row.ours, row.rival, row.ratio) == (1000, None, None)
    assert (verdict(finding) or "").startswith("NOT MET, no vLLM")


@pytest.mark.parametrize(
    ("ours", "said"), [(19, "NOT MET: "), (29, "met, stretch goal 3 not: "), (30, "met, stretch goal 3 too: ")]
)
def test_a_verdict_says_what_was_reached(ours: float, said: str) -> None:
    sentence = verdict(Finding(SPEED, [Pair(ours, 10)]))

    assert (sentence or "").startswith(said)


def test_a_figure_without_a_goal_has_a_row_and_no_verdict() -> None:
    finding = Finding(Goal("prefill", LLAMA, "tokens/s"), [Pair(10, 20), Pair(12, 20)])

    assert [(row.ours, row.rival) for row in rows(finding)] == [(11, 20)]
    assert verdict(finding) is None
    assert finding.is_met


def test_what_others_took_is_what_the_cores_did_less_our_own_share() -> None:
    before = Spent(everybody=100.0, tree=10.0, stolen=1.0, total=400.0)

    assert Spent(everybody=108.0, tree=15.0, stolen=1.5, total=410.0).others_since(before) == pytest.approx((0.3, 0.05))
    assert Spent(everybody=104.0, tree=15.0, stolen=1.0, total=410.0).others_since(before)[0] == 0.0


def test_time_of_a_child_that_has_ended_stays_with_the_tree() -> None:
    cores = os.sched_getaffinity(0)
    before = Spent.now(os.getpid(), cores)
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)

    now = Spent.now(os.getpid(), cores)

    assert now.tree - before.tree >= 0.25
    assert now.total > before.total


def test_contenders_take_turns_in_going_first() -> None:
    asked: list[str] = []

    def asks(name: str) -> Callable[[], str]:
        return lambda: asked.append(name) or name

    assert [in_turn(number, asks("ours"), asks("rival")) for number in range(3)] == [("ours", "rival")] * 3
    assert asked == ["rival", "ours", "ours", "rival", "rival", "ours"]
    assert in_turn(0, asks("ours"), None) == ("ours", None)


def test_prompts_have_all_their_length_and_part_within_the_first_block() -> None:
    prompts = Prompts(
        load_tokenizer(resolve("demo")), "It was the best of times, it was the worst of times. " * 60
    ).take(30)

    assert {len(ids) for ids in prompts} == {PROMPT_TOKENS}
    assert len({tuple(ids[:16]) for ids in prompts}) == 30


def test_llama_bench_is_read_by_medians_of_prefill_and_decode() -> None:
    printed = [
        {"n_prompt": 256, "n_gen": 0, "samples_ts": [500.0, 900.0, 800.0]},
        {"n_prompt": 0, "n_gen": 64, "samples_ts": [90.0, 100.0, 20.0]},
    ]

    assert read_bench(json.dumps(printed)) == Speed(prefill=800.0, decode=90.0)


def test_of_a_batch_that_llama_batched_bench_ran_twice_the_second_counts() -> None:
    line = (
        '{"n_kv_max": 384, "n_batch": 2048, "pp": 256, "tg": 128, "pl": %d, "t_pp": 0.5, "speed_pp": %f, "t_tg": 1.0, '
        '"speed_tg": %f}'
    )
    printed = "\n".join(
        [
            "main: loading",
            line % (1, 400, 90),
            line % (1, 512, 128),
            line % (8, 600, 200),
            "",
            "llama_perf_context_print: 1 ms",
        ]
    )

    assert read_batched(printed) == {1: Speed(512, 128), 8: Speed(600, 200)}


def test_llama_perplexity_is_the_one_behind_its_last_window() -> None:
    printed = (
        "perplexity: 2.38 seconds per pass - ETA 0.63 minutes\n[1]21.6121,[2]19.7000,\n[3]20.5012,\nFinal estimate: "
        "PPL = 20.5012 +/- 0.3\n"
    )

    assert read_perplexity(printed) == (3, 20.5012)
    with pytest.raises(RuntimeError, match="failed to load"):
        read_perplexity("error: failed to load model")


def test_perplexity_is_over_the_second_halves_without_the_token_that_is_only_read() -> None:
    assert perplexity([(WINDOW - 1 - FIRST) * math.log(7.0)] * 3) == pytest.approx(7.0)


def test_only_a_whole_run_with_default_settings_is_recorded() -> None:
    assert unrecorded(None, 5, {}) is None
    assert unrecorded(["penstock"], 5, {}) == "only penstock"
    assert unrecorded(None, 4, {}) == "rounds: 4, at least 5 are"
    assert unrecorded(None, 5, {"lm_head": "int4"}) == 'not the default settings: {"lm_head":"int4"}'


def test_a_run_that_is_not_recorded_says_why_and_does_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Finding(SPEED, [Pair(1, 10)])], [], "only penstock") == 0
    assert "not recorded (only penstock)" in capsys.readouterr().out


def test_llama_bench_says_what_it_was_built_of() -> None:
    printed = [{"build_commit": "abc1234", "build_number": 7000, "backends": "CPU", "n_gen": 0}]

    assert read_build(json.dumps(printed)) == "commit abc1234 (build 7000), backends CPU"
    assert has_amx("flags : fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n")
    assert not has_amx("flags : fpu avx512_bf16\n")


def test_windows_are_whole_and_the_demo_model_puts_no_token_before_them() -> None:
    windows = windows_of("It was the best of times, it was the worst of times. " * 700)

    assert [len(ids) for ids in windows] == [WINDOW] * NUM_WINDOWS
    with pytest.raises(RuntimeError, match=r"a text of \d+ tokens has no 16 windows"):
        windows_of("It was the best of times.")


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_losses_are_those_of_the_second_halves_in_float32(batch: int, tmp_path: Path) -> None:
    before, model = torch.get_num_threads(), tiny_model("llama")
    config = EngineConfig(dtype="float32", threads=1, kv_memory_bytes=2**20)
    runner = load_runner(saved(model, tmp_path), config, poison=True)
    windows = torch.randint(0, 96, (4, 40), generator=torch.Generator().manual_seed(1))
    first = 19
    with torch.inference_mode():
        scores = model(windows).logits.double().log_softmax(-1)
    expected = -scores[:, first:-1].gather(2, windows[:, first + 1 :, None]).sum((1, 2))

    found = Steps(runner, config).losses(windows.tolist(), first, batch)
    torch.set_num_threads(before)

    assert found == pytest.approx(expected.tolist(), rel=1e-5)


CHILD = """
import time
from bench.support.worker import answer
def fail():
    raise SystemExit("nothing to say")
def start():
    print("noise")
    return {"add": lambda a, b: a + b, "fail": fail, "wait": lambda s: time.sleep(s)}
if __name__ == "__main__":
    answer(start)
"""


def test_a_worker_answers_and_what_it_prints_is_no_answer(tmp_path: Path) -> None:
    with worker("child", _child(tmp_path), tmp_path) as child:
        assert child.ask("add", a=2, b=3) == 5
        assert child.ask("add", a="x", b="y") == "xy"
        assert peak_bytes(child.pid) > 1e6
    assert "noise" in (tmp_path / "child.log").read_text()


def test_a_worker_stands_still_between_questions(tmp_path: Path) -> None:
    with worker("child", _child(tmp_path), tmp_path) as child:
        deadline = time.monotonic() + 10
        while _state(child.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)

        assert _state(child.pid) == "T"
        assert child.ask("add", a=1, b=1) == 2


def test_a_worker_that_ends_or_does_not_answer_is_reported_with_what_it_printed_last(tmp_path: Path) -> None:
    with (
        worker("child", _child(tmp_path), tmp_path) as child,
        pytest.raises(RuntimeError, match=r"child ended; it printed last:\n(?s:.*)nothing to say"),
    ):
        child.ask("fail")
    with (
        worker("child", _child(tmp_path), tmp_path) as child,
        pytest.raises(RuntimeError, match="child did not answer within 0 s"),
    ):
        child.ask("wait", s=30, timeout_s=0.1)


def test_a_workers_command_takes_nothing_of_the_repository_for_the_environments_own(tmp_path: Path) -> None:
    command = module_command(sys.executable, "bench.support.worker")

    assert command[3] == str(ROOT)
    assert "sys.path.append" in command[2]


def _child(folder: Path) -> list[str]:
    (folder / "child_module.py").write_text(CHILD)
    return module_command(sys.executable, "child_module")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
