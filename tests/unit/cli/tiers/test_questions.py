from pathlib import Path

import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.cli.tiers.questions import CLOUD, EDGE, Answer, KeptAnswers, Message, Question, read_questions

QUESTION = Question((Message("user", "What is 2 + 2?"),), "4")


def answer(place: str = EDGE, model: str = "a", text: str = "4") -> Answer:
    return Answer(place, model, QUESTION.key, 9, text, 12, (-0.5,))


def test_each_form_of_a_line_is_read_and_each_conversation_once(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"question": "What is 2 + 2?", "answer": 4}\n\n{"prompt": "What is 2 + 2?"}\n{"turns": ["Hi", "again"]}\n'
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}\n'
    )

    assert read_questions(path) == [
        QUESTION,
        Question((Message("user", "Hi"),)),
        Question((Message("system", "Be brief."), Message("user", "Hi"))),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": 1}', "line 2: neither messages nor one of"),
        ('{"messages": [{"role": "user"}]}', "line 1: .*content"),
        ("{", "line 1"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_by_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)

    with pytest.raises(ConfigError, match=sentence):
        read_questions(path)


def test_answers_are_kept_and_found_by_place_model_and_bound(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    KeptAnswers(path).add(answer())
    KeptAnswers(path).add(answer(model="b", text="5"))

    kept = KeptAnswers(path)
    assert kept.find(EDGE, "a", QUESTION, 9) == answer()
    assert kept.find(EDGE, "b", QUESTION, 9) == answer(model="b", text="5")
    assert kept.find(CLOUD, "a", QUESTION, 9) is None
    assert kept.missing(EDGE, "a", [QUESTION], 9) == []
    assert kept.missing(EDGE, "a", [QUESTION], 10) == kept.missing(EDGE, "c", [QUESTION], 9) == [QUESTION]


def test_a_line_that_was_broken_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    line = msgspec.json.encode(answer())
    path.write_bytes(line + b"\n" + line[:20])

    kept = KeptAnswers(path)
    kept.add(answer(CLOUD))

    assert path.read_bytes() == line + b"\n" + msgspec.json.encode(answer(CLOUD)) + b"\n"


def test_another_file_is_no_file_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "a"}\n')

    with pytest.raises(ConfigError, match="line 1, is no kept answer"):
        KeptAnswers(path)
