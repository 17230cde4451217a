"""`penstock tiers tune` as a command: over two tiny checkpoints, and over a gateway whose replicas are played."""

import csv
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from bench.support.tiny_checkpoint import write_checkpoint
from penstock.cli.config import PlatformConfig
from penstock.cli.main import app

WORDS = ("Paris", "London", "Rome", "Oslo", "Bern", "Riga")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, num_layers in (("small", 1), ("large", 2)):
        write_checkpoint(folder / name, num_layers)
    return {name: folder / name for name in ("small", "large")}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "Where is {word}?", "answer": "{word}"}}\n' for word in WORDS))
    return path


class Service(BaseHTTPRequestHandler):
    """A platform with two models: the small one knows every second answer, and is unsure of the others."""

    has_logprobs = True
    keys: list[str] = []
    bodies: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
        type(self).keys.append(self.headers["authorization"])
        type(self).bodies.append(body)
        word = body["messages"][0]["content"].split()[-1].rstrip("?")
        knows = body["model"] == "chat-cloud" or WORDS.index(word) % 2
        logprobs = {"content": [{"logprob": -0.1 if knows else -2.0, "token": "x"}]}
        choice = {
            "message": {"content": f"{word}." if knows else "?"},
            "logprobs": logprobs if self.has_logprobs else None,
        }
        answer = msgspec.json.encode({"choices": [choice], "usage": {"prompt_tokens": 7}})
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[tuple[str, type[Service]]]:
    kind = type("OwnService", (Service,), {"keys": [], "bodies": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", kind
        server.shutdown()
        thread.join()


def tune(*arguments: object, key: str = "k") -> Any:
    return CliRunner().invoke(app, ["tiers", "tune", *map(str, arguments)], env={"OPENAI_API_KEY": key})


def test_a_running_platform_is_asked_and_the_rule_is_one_that_a_pool_takes(
    prompts: Path, tmp_path: Path, service: tuple[str, type[Service]]
) -> None:
    out = tmp_path / "out"
    names = ("--edge", "chat-edge", "--cloud", "chat-cloud", "--url", service[0], "--out", out)
    done = tune(prompts, *names, "--agreement", 1, "--tokens", 4, "--edge-price", "1,2", "--cloud-price", "10,20")

    assert done.exit_code == 0, done.output
    rule = yaml.safe_load((out / "escalation.yaml").read_text())
    assert rule == {"escalation": {"tokens": 4, "min_mean_logprob": -1.05}}
    pools = [
        {"name": "edge", "tier": "edge", "served_names": ["chat"], **rule},
        {"name": "cloud", "tier": "cloud", "served_names": ["chat"]},
    ]
    assert msgspec.convert({"pools": pools}, PlatformConfig).pools[0].escalation is not None
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "curve.csv").read_text().splitlines()) == 1 + 3
    assert "edge: 6 of 6 answers" in done.output
    assert set(service[1].keys) == {"Bearer k"}


def test_what_was_answered_is_not_asked_again(
    prompts: Path, tmp_path: Path, service: tuple[str, type[Service]]
) -> None:
    names = ("--edge", "chat-edge", "--cloud", "chat-cloud", "--url", service[0], "--out", tmp_path / "out")
    tune(prompts, *names, "--share", 0.5)
    answers = tmp_path / "out" / "answers.jsonl"
    lines = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:7]) + lines[7][:30])
    service[1].keys.clear()
    done = tune(prompts, *names, "--share", 0.5)

    assert done.exit_code == 0, done.output
    assert len(service[1].keys) == 12 - 7
    assert sorted(answers.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_another_model_is_asked_itself_and_the_answers_of_the_earlier_one_are_kept(
    prompts: Path, tmp_path: Path, service: tuple[str, type[Service]]
) -> None:
    def run(edge: str, url: str = service[0]) -> tuple[str, int]:
        """The first point of the curve, with none sent on, and how many questions were asked."""
        service[1].bodies.clear()
        names = ("--edge", edge, "--cloud", "chat-cloud", "--url", url, "--out", tmp_path / "out")
        done = tune(prompts, *names, "--share", 0.5)
        assert done.exit_code == 0, done.output
        row = next(csv.DictReader((tmp_path / "out" / "curve.csv").read_text().splitlines()))
        return row["agreement"], len(service[1].bodies)

    assert run("chat-edge") == ("0.5", 12)
    assert run("chat-cloud") == ("1.0", 6)  # as the edge it has answered nothing yet
    assert run("chat-edge") == run("chat-edge", service[0] + "/") == ("0.5", 0)
    assert run("chat-edge", service[0].replace("127.0.0.1", "localhost")) == ("0.5", 12)  # maybe another platform


def test_a_prompt_may_end_in_the_beginning_of_its_answer(tmp_path: Path, service: tuple[str, type[Service]]) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "Where is Oslo?"}, {"role": "assistant", "content": "It is in"}]
    path.write_bytes(msgspec.json.encode({"messages": turns}) + b'\n{"prompt": "Where is Rome?"}\n')
    done = tune(path, "--edge", "a", "--cloud", "b", "--url", service[0], "--out", tmp_path / "out", "--share", 0.5)

    assert done.exit_code == 0, done.output
    continued = {
        (len(body["messages"]), body["continue_final_message"], body["add_generation_prompt"])
        for body in service[1].bodies
    }
    assert continued == {(2, True, False), (1, False, True)}


def test_a_platform_that_tells_no_log_probabilities_is_refused(
    prompts: Path, tmp_path: Path, service: tuple[str, type[Service]]
) -> None:
    service[1].has_logprobs = False
    done = tune(
        prompts, "--edge", "./a", "--cloud", "b", "--url", service[0], "--out", tmp_path / "out", "--share", 0.5
    )

    assert done.exit_code == 2
    assert "tells no log probabilities for ./a, by which answers are judged" in done.stderr


@pytest.mark.slow
def test_two_checkpoints_are_asked_here(prompts: Path, tmp_path: Path, models: dict[str, Path]) -> None:
    out, edge = tmp_path / "out", tmp_path / "edge"
    shutil.copytree(models["small"], edge)
    names = ("--edge", edge, "--cloud", models["large"], "--out", out, "--threads", 1)
    done = tune(prompts, *names, "--share", 0.5, "--tokens", 2, "--max-tokens", 3)

    assert done.exit_code == 0, done.output
    answers = [msgspec.json.decode(line) for line in (out / "answers.jsonl").read_bytes().splitlines()]
    assert [len(answer["logprobs"]) for answer in answers] == [3] * 12
    assert max(logprob for answer in answers for logprob in answer["logprobs"]) <= 0
    rule = yaml.safe_load((out / "escalation.yaml").read_text())["escalation"]
    scores = sorted(sum(answer["logprobs"][:2]) / 2 for answer in answers if answer["place"] == "edge")
    assert scores[2] < rule["min_mean_logprob"] < scores[3]
    write_checkpoint(edge, num_layers=3)  # another model has the path now
    again = tune(prompts, *names, "--share", 0.5, "--tokens", 2, "--max-tokens", 3)
    assert ("edge: 6 of 6 answers" in again.output, "cloud: 6 of 6 answers" in again.output) == (True, False)
    assert len((out / "answers.jsonl").read_bytes().splitlines()) == 18
    refused = tune(prompts, "--edge", "./a", "--cloud", "./b", "--out", tmp_path / "other", "--share", 0.5)
    assert (refused.exit_code, "model './a' does not exist" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "one of --agreement and --share says what is wanted"),
        (("--share", 0.5, "--agreement", 0.5), "one of --agreement and --share says what is wanted"),
        (("--share", 2), "--share is a share between 0 and 1, not 2.0"),
        (("--share", 1, "--match", "words"), "--match is auto, number or text, not 'words'"),
        (("--share", 1, "--edge-price", "1"), "--edge-price is two prices per million tokens"),
        (("--share", 1, "--edge-price", "1,2"), "--edge-price and --cloud-price belong together"),
        (("--share", 1, "--max-tokens", 3), "--tokens (16) must not exceed --max-tokens (3)"),
        (("--share", 1, "--url", "http://x/v1"), "OPENAI_API_KEY is not set"),
    ],
)
def test_what_can_not_be_is_refused_with_a_sentence(
    prompts: Path, tmp_path: Path, arguments: tuple[object, ...], sentence: str
) -> None:
    done = tune(prompts, "--edge", "./a", "--cloud", "b", "--out", tmp_path / "out", *arguments, key="")

    assert (done.exit_code, sentence in done.stderr) == (2, True), done.output
