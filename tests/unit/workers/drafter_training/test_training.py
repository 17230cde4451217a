"""`train-drafter` on a tiny model: a head that says more than before, in a run that is broken off and goes on; what is
refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from bench.support.tiny_checkpoint import write_checkpoint
from penstock.base.errors import ConfigError
from penstock.text.source import resolve
from penstock.workers.compute.speculation.head_file import read_head
from penstock.workers.drafter_training import training
from penstock.workers.drafter_training.answers import Answer, read_answers
from penstock.workers.drafter_training.training import Plan, Progress, Recipe, choose_vocabulary, train_drafter
from tests.unit.workers.built_kernels import built_kernels


@pytest.fixture(autouse=True)
def same_torch_threads() -> Iterator[None]:
    """Training sets the process's number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    built_kernels()
    folder = tmp_path_factory.mktemp("drafter")
    write_checkpoint(folder / "model", num_layers=4)
    lines = [json.dumps({"question": f"What is {n} times {n + 1}?"}) for n in range(60)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return Plan(
        str(folder / "model"), [folder / "prompts.jsonl"], folder / "out", minutes=5, epochs=4, vocabulary=600,
        max_answer_tokens=24, threads=1,
    )  # fmt: skip


class Broken(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_is_broken_off_goes_on_and_the_head_has_learned(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY_S", 0.0)
    seen: list[tuple[str, int]] = []
    losses: list[float] = []

    def stop_at(phase: str, done: int) -> training.OnProgress:
        def show(progress: Progress) -> None:
            seen.append((progress.phase, progress.done))
            if progress.held_out_loss:
                losses.append(progress.held_out_loss)
            if progress.phase == phase and progress.done >= done:
                raise Broken

        return show

    with pytest.raises(Broken):
        train_drafter(plan, stop_at("answers", 20))
    num_answers = len(read_answers(plan.out / "answers.jsonl"))
    assert 20 <= num_answers < 60
    with (plan.out / "answers.jsonl").open("ab") as file:
        file.write(b"[[1,2],[3")  # a line that was cut off
    with pytest.raises(Broken):
        train_drafter(plan, stop_at("features", 1))
    assert min(done for phase, done in seen if phase == "answers" and done > 20) <= num_answers + 2
    with pytest.raises(Broken):
        train_drafter(plan, stop_at("training", 10))
    found: list[Progress] = []

    def show(progress: Progress) -> None:
        seen.append((progress.phase, progress.done))
        found.append(progress)

    seen.clear()
    path = train_drafter(plan, show)
    assert seen[0][0] == "training"
    assert seen[0][1] >= 8, "it began anew"
    last = found[-1]
    assert last.phase == "done"
    assert last.done == last.total
    assert len(last.kept) == plan.depth
    assert last.held_out_loss < min(losses) - 0.04
    head = read_head(path)
    assert head.spec.trained_tokens == last.trained_tokens > 1000
    assert len(head.vocabulary) == 600

    again = train_drafter(plan, lambda _: None)
    assert read_head(again).spec == head.spec


@pytest.mark.slow
def test_a_head_goes_on_from_another(plan: Plan) -> None:
    start = train_drafter(plan, lambda _: None)
    other = Plan(
        plan.model, plan.prompts, plan.out.with_name("on"), minutes=5, epochs=12, vocabulary=600, max_answer_tokens=24,
        threads=1, start=start, max_prompts=24,
    )  # fmt: skip
    losses: list[float] = []
    path = train_drafter(other, lambda p: losses.append(p.held_out_loss))
    begun = next(loss for loss in losses if loss)
    assert losses[-1] < begun
    assert read_head(path).spec.trained_tokens > read_head(start).spec.trained_tokens


def test_what_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    recipe = Recipe(resolve(plan.model).digest, "other", 600, 3, 24, 0, "")
    (tmp_path / "out" / "recipe.json").write_bytes(msgspec.json.encode(recipe))
    with pytest.raises(ConfigError, match="another prompts, vocabulary"):
        train_drafter(
            Plan(plan.model, plan.prompts, tmp_path / "out", minutes=1, vocabulary=700, max_answer_tokens=24), print
        )
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        train_drafter(Plan(plan.model, plan.prompts, tmp_path, minutes=1), print)


def test_another_number_of_made_up_prompts_is_refused_before_any_is_made(plan: Plan, tmp_path: Path) -> None:
    recipe = Recipe(resolve(plan.model).digest, "other", 600, 3, 24, 0, "", made_prompts=3)
    (tmp_path / "recipe.json").write_bytes(msgspec.json.encode(recipe))
    with pytest.raises(ConfigError, match="of a run with 3 made-up prompts"):
        train_drafter(Plan(plan.model, [], tmp_path, minutes=1, made_prompts=4), print)
    assert not (tmp_path / "made-prompts.jsonl").exists()
    with pytest.raises(ConfigError, match="name files of prompts, or how many"):
        train_drafter(Plan(plan.model, [], tmp_path, minutes=1), print)


def test_the_vocabulary_is_what_answers_say_most() -> None:
    answers = [Answer([9, 9, 9], [1, 2, 2]), Answer([8], [2, 5])]
    assert choose_vocabulary(answers, 3, 12).tolist() == [1, 2, 5]
    assert choose_vocabulary(answers, 5, 12).tolist() == [1, 2, 5, 8, 9]
    assert torch.equal(choose_vocabulary(answers, 99, 12), torch.arange(12))


def test_what_a_gpu_computes_at_once_is_bounded_by_the_longest_of_it() -> None:
    made = object.__new__(training._Training)
    made._lengths, made._most_tokens = [10, 40, 25, 12, 90, 24], 100
    assert made._groups([0, 1, 2, 3, 4, 5]) == [[4], [1, 2], [5, 3, 0]]
    made._most_tokens = 0
    assert sorted(made._groups([0, 1, 2])) == [[0], [1], [2]]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2, 8), (8, 2)])
def test_a_training_goes_on_with_other_numbers_of_answers_a_step(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    """The part of the answers that was read stays the same; another device has another number."""
    other = replace(plan, out=tmp_path / "out")
    monkeypatch.setattr(training, "SAVE_EVERY_S", 0.0)
    monkeypatch.setitem(training.BATCH, "cpu", first)

    def stop(progress: Progress) -> None:
        if progress.phase == "training" and progress.done >= progress.total // 2 + 1:
            raise Broken

    with pytest.raises(Broken):
        train_drafter(other, stop)
    monkeypatch.setitem(training.BATCH, "cpu", second)
    begun: list[float] = []

    def show(progress: Progress) -> None:
        if progress.phase == "training":
            begun.append(progress.done / progress.total)

    train_drafter(other, show)
    assert 0.3 < begun[0] < 0.6
    assert begun[-1] == 1


def test_a_gpu_that_is_not_there_is_refused_by_the_option(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda needs a GPU"):
        train_drafter(replace(plan, out=tmp_path / "out", device="cuda"), print)


def test_a_gpu_that_is_full_is_said_in_a_sentence(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> Path:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has")

    monkeypatch.setattr(training, "_train", fill)
    with pytest.raises(ConfigError, match=r"memory is too small for this training.*CUDA out of memory"):
        train_drafter(replace(plan, out=tmp_path / "out"), print)
