"""Labelled prompts, and what two models answered to them: the files that `penstock tiers tune` reads and keeps.

Prompts are JSON lines: `messages` as in OpenAI's API, or a text (`prompt`, `question`, `text`, or the first of
`turns`), and if there is one an `answer`, the label. Answers are kept as JSON lines too, one as it comes, so that a run
that was broken off goes on, and another threshold asks nobody again. Invariant: an answer is found again only by the
same conversation, place and model and the same bound of its length; those of other models stay in the file, unused.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from penstock.base.errors import ConfigError
from penstock.text.corpus import FIELDS, read_file

EDGE, CLOUD = "edge", "cloud"
BATCH = 16
"""Questions that one model is asked at the same time."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Question(msgspec.Struct, frozen=True):
    """One labelled prompt."""

    messages: tuple[Message, ...]
    label: str | None = None
    """What the answer should be, as the file has it; None: it does not say."""

    @property
    def key(self) -> str:
        """The conversation as JSON, by which answers to it are found again."""
        return msgspec.json.encode(self.messages).decode()

    @property
    def is_continued(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"

    def as_dicts(self) -> list[dict[str, str]]:
        """The messages as chat templates and APIs take them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


class Answer(msgspec.Struct, frozen=True):
    """What one model answered greedily."""

    place: str
    """EDGE or CLOUD."""
    model: str
    """What stands for the model: a checkpoint's digest, or a served name and its platform's URL."""
    key: str
    """`Question.key`."""
    max_tokens: int
    """Bound of the answer, tokens."""
    text: str
    num_prompt_tokens: int
    logprobs: tuple[float, ...]
    """Natural logarithm of the probability of each chosen token."""

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)

    def mean_logprob(self, num_tokens: int) -> float:
        """The mean over the first tokens, as the gateway judges them; over all, where the answer has fewer."""
        judged = self.logprobs[:num_tokens]
        return sum(judged) / len(judged)


OnAnswer = Callable[[Answer], None]


def read_questions(path: Path) -> list[Question]:
    """The questions of a file, each conversation once. Raises ConfigError that names file and line."""
    found: dict[str, Question] = {}
    for number, line in enumerate(read_file(path).split("\n"), 1):
        if line.strip():
            question = _read_line(path, number, line)
            found.setdefault(question.key, question)
    if not found:
        raise ConfigError(f"{path} holds no prompt")
    return list(found.values())


def _read_line(path: Path, number: int, line: str) -> Question:
    try:
        row = msgspec.json.decode(line, type=dict[str, object])
        label = row.get("answer")
        if "messages" in row:
            return Question(msgspec.convert(row["messages"], tuple[Message, ...]), _text(label))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
    found = next((row[name] for name in FIELDS if name in row), None)
    text = found[0] if isinstance(found, list) and found else found
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{path}, line {number}: neither messages nor one of {', '.join(FIELDS)} holds a prompt")
    return Question((Message("user", text),), _text(label))


def _text(label: object) -> str | None:
    return None if label is None else str(label)


class KeptAnswers:
    """The answers in a file; those that are added are in it at once."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that holds anything else. A last line that was broken off is left out."""
        self._path = path
        self._found: dict[tuple[str, str, str, int], Answer] = {}
        decoder = msgspec.json.Decoder(Answer)
        data = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            try:
                answer = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}, is no kept answer: {error}") from error
            self._take(answer)
        if data and not data.endswith(b"\n"):
            path.write_bytes(data[: data.rfind(b"\n") + 1])

    def find(self, place: str, model: str, question: Question, max_tokens: int) -> Answer | None:
        """What the model answered there. model: as in `Answer.model`."""
        return self._found.get((place, model, question.key, max_tokens))

    def missing(self, place: str, model: str, questions: Iterable[Question], max_tokens: int) -> list[Question]:
        """Questions that the model has not answered there."""
        return [question for question in questions if self.find(place, model, question, max_tokens) is None]

    def add(self, answer: Answer) -> None:
        """Keep it, also on the disk. Raises OSError."""
        self._take(answer)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(answer) + b"\n")

    def _take(self, answer: Answer) -> None:
        self._found[answer.place, answer.model, answer.key, answer.max_tokens] = answer
