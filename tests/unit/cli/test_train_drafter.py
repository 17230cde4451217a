"""What `penstock train-drafter` prints, and how it refuses."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli import train_drafter as command
from penstock.cli.main import app
from penstock.workers.drafter_training.training import OnProgress, Plan, Progress


def test_what_cannot_be_trained_is_said_in_a_sentence(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("not json")
    found = CliRunner().invoke(app, ["train-drafter", "demo", str(tmp_path / "out"), "--prompts", str(prompts)])
    assert found.exit_code != 0
    assert "prompts.jsonl, line 1" in found.output
    found = CliRunner().invoke(app, ["train-drafter", "demo", str(tmp_path / "out"), "--prompts", str(tmp_path / "no")])
    assert "can't read" in found.output
    assert not (tmp_path / "out" / "head.safetensors").exists()


def test_a_device_and_a_vocabulary_that_there_are_not_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command_line = ["train-drafter", "demo", str(tmp_path / "out"), "--made-prompts", "1"]
    refusals = {
        ("--device", "cuda"): "--device cuda needs a GPU",
        ("--device", "tpu"): "'tpu' is not one of",
        ("--vocabulary", "0"): "should be greater than or equal to 1",
    }
    for options, said in refusals.items():
        found = CliRunner().invoke(app, [*command_line, *options])
        assert found.exit_code != 0
        assert said in " ".join(found.output.replace("│", " ").split())
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_progress_is_a_line_a_phase_and_says_what_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(plan: Plan, on_progress: OnProgress) -> Path:
        for done in range(4):
            on_progress(Progress("answers", done, 3))
        on_progress(Progress("training", 0, 1000, kept=[0.1, 0.05], held_out_loss=8.0))
        for done in range(1, 1000):
            on_progress(Progress("training", done, 1000, loss=5.0))
        on_progress(Progress("done", 1000, 1000, 4.0, 3.9, [0.5, 0.25], trained_tokens=12_345, seconds=1800))
        return plan.out / "head.safetensors"

    monkeypatch.setattr(command, "train_drafter", train)
    console = Console(record=True, width=200)
    command.train(Plan("demo", [], tmp_path, 1), console)
    lines = console.export_text().splitlines()
    assert lines[0] == "0 of 3 answers of the model"
    assert lines[1] == "3 of 3 answers of the model"
    assert lines[2].startswith("0 of 1,000 steps of the training, of answers held out, a draft of 2 keeps 0.15 tokens")
    assert len(lines) == 5, "not a line a step"
    assert lines[3].startswith("trained on 12,345 tokens of answers in 30 minutes")
    assert "keeps 0.75 tokens (50.0 %, 25.0 %), loss 3.900" in lines[3]
    assert f"head: {tmp_path / 'head.safetensors'}" in lines[4]
