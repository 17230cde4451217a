"""Prompts that the target makes up: where they begin, that each is another, that a file goes on, and when it is given
up."""

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource, resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.drafter_training import answers
from penstock.workers.drafter_training.answers import make_prompts
from tests.unit.workers.built_kernels import built_kernels

Request = tuple[list[int], SamplingParams]


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def demo() -> ModelSource:
    return resolve("demo")


@pytest.fixture(scope="module")
def demo_tokenizer(demo: ModelSource) -> Tokenizer:
    return load_tokenizer(demo)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, demo_tokenizer: Tokenizer) -> list[tuple[str, Finish]]:
    """What the target says, in turn and over again, instead of computing it."""
    texts: list[tuple[str, Finish]] = []

    def generate(source: ModelSource, requests: Iterator[Request], longest: int, *others: object) -> Iterator[Any]:
        for number, (prompt, _) in enumerate(requests):
            text, finish = texts[number % len(texts)]
            ids = prompt + demo_tokenizer.encode(text, add_special=False)
            assert len(ids) <= longest
            yield SimpleNamespace(token_ids=ids, num_prompt_tokens=len(prompt), finish=finish, error=None)

    monkeypatch.setattr(answers, "_generate", generate)
    return texts


def test_only_whole_prompts_count_and_each_once(
    said: list[tuple[str, Finish]], demo: ModelSource, demo_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    said += [
        ("Why is the sky blue, and not green?", Finish.STOP),
        ("Why is the sky blue, and not green?", Finish.STOP),
        ("This one goes on and on and on and", Finish.LENGTH),
        ("Hm", Finish.STOP),
        (" How do I boil an egg until it is soft? ", Finish.STOP),
    ]
    path, seen = tmp_path / "made.jsonl", list[tuple[int, int]]()
    make_prompts(demo, demo_tokenizer, 2, path, 0, "cpu", 1, lambda done, total: seen.append((done, total)))
    assert read_prompts(path) == ["Why is the sky blue, and not green?", "How do I boil an egg until it is soft?"]
    assert seen == [(1, 2), (2, 2)]


def test_a_file_that_was_broken_off_goes_on(
    said: list[tuple[str, Finish]], demo: ModelSource, demo_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    said += [(f"What is the meaning of number {n}?", Finish.STOP) for n in range(9)]
    path = tmp_path / "made.jsonl"
    make_prompts(demo, demo_tokenizer, 3, path, 0, "cpu", 1, lambda *_: None)
    with path.open("ab") as file:
        file.write(b'{"prompt": "What is')
    make_prompts(demo, demo_tokenizer, 6, path, 0, "cpu", 1, lambda *_: None)
    assert read_prompts(path) == [f"What is the meaning of number {n}?" for n in range(6)]
    said.clear()  # nothing is asked for when all are there
    make_prompts(demo, demo_tokenizer, 6, path, 0, "cpu", 1, lambda *_: None)


def test_a_model_that_says_the_same_always_is_given_up(
    said: list[tuple[str, Finish]], demo: ModelSource, demo_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    said.append(("Can you help me with something?", Finish.STOP))
    with pytest.raises(ConfigError, match="of 24 prompts that the model made up only 1 are of use"):
        make_prompts(demo, demo_tokenizer, 3, tmp_path / "made.jsonl", 0, "cpu", 1, lambda *_: None)


def test_a_model_without_a_chat_template_makes_up_none(demo: ModelSource, tmp_path: Path) -> None:
    tokenizer = cast(Tokenizer, SimpleNamespace(is_chat=False))
    with pytest.raises(ConfigError, match="without a chat template"):
        make_prompts(demo, tokenizer, 3, tmp_path / "made.jsonl", 0, "cpu", 1, lambda *_: None)


@pytest.mark.slow
def test_the_demo_model_makes_up_questions(demo: ModelSource, demo_tokenizer: Tokenizer, tmp_path: Path) -> None:
    built_kernels()
    path = tmp_path / "made.jsonl"
    make_prompts(demo, demo_tokenizer, 20, path, 0, "cpu", 1, lambda *_: None)
    found = read_prompts(path)
    assert len(set(found)) == 20
    assert sum(" " in text for text in found) >= 18
    assert not any("<|" in text for text in found)


def test_another_seed_asks_for_other_texts(
    monkeypatch: pytest.MonkeyPatch, demo: ModelSource, demo_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    asked: dict[int, list[int | None]] = {}

    def generate(source: object, requests: Iterator[Request], *_: object) -> Generator[Any]:
        asked[seed] = [sampling.seed for _, sampling in requests]
        yield from ()

    monkeypatch.setattr(answers, "_generate", generate)
    for seed in (0, 1):
        with pytest.raises(ConfigError, match="only 0 are of use"):
            make_prompts(demo, demo_tokenizer, 3, tmp_path / f"{seed}.jsonl", seed, "cpu", 1, lambda *_: None)
    assert asked[0][:2] == [0, 1]
    assert len(asked[1]) == len(set(asked[1]))
    assert not set(asked[0]) & set(asked[1])
