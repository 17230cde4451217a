"""Questions asked of a model that a platform serves, greedily, with the log probability of each token that it chose.

Not what is made of the answers (`curve`). Answers come as they end, in no order; a question that the platform refuses
as invalid is passed over and counted.
"""

import asyncio
from collections.abc import Iterable

import httpx
import msgspec

from penstock.base.errors import ConfigError
from penstock.cli.tiers.questions import BATCH, Answer, OnAnswer, Question

TIMEOUT_S = 600.0


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Message(msgspec.Struct):
    content: str | None


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class Server(msgspec.Struct, frozen=True):
    """A platform that runs."""

    url: str
    """URL up to and including /v1."""
    key: str

    def identity(self, model: str) -> str:
        """What stands for the model of that name, as far as one can tell from outside."""
        return f"{model} at {self.url.rstrip('/')}"


def ask_server(
    server: Server, model: str, place: str, questions: Iterable[Question], max_tokens: int, on_answer: OnAnswer
) -> int:
    """Have a served model answer. Returns how many questions were passed over: those that the platform refused as
    invalid. Raises ConfigError where the platform can't be asked."""
    return asyncio.run(_ask_server(server, model, place, questions, max_tokens, on_answer))


async def _ask_server(
    server: Server, model: str, place: str, questions: Iterable[Question], max_tokens: int, on_answer: OnAnswer
) -> int:
    left, num_passed = iter(questions), 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal num_passed
        for question in left:
            answer = await _ask(client, server, model, place, question, max_tokens)
            if answer is None:
                num_passed += 1
            else:
                on_answer(answer)

    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(BATCH):
                    tasks.create_task(work(client))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return num_passed


async def _ask(
    client: httpx.AsyncClient, server: Server, model: str, place: str, question: Question, max_tokens: int
) -> Answer | None:
    body = {
        "model": model,
        "messages": question.as_dicts(),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "continue_final_message": question.is_continued,
        "add_generation_prompt": not question.is_continued,
    }
    url = server.url.rstrip("/") + "/chat/completions"
    try:
        response = await client.post(url, json=body, headers={"authorization": f"Bearer {server.key}"})
    except httpx.HTTPError as error:
        raise ConfigError(f"{url} can't be asked: {error or type(error).__name__}") from error
    if response.status_code in (400, 422):
        return None
    if response.status_code != 200:
        raise ConfigError(f"{url} answered {response.status_code} for {model}: {response.text[:300]}")
    try:
        completion = msgspec.json.decode(response.content, type=_Completion)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{url} gave no chat completion: {error}") from error
    choice = completion.choices[0]
    if choice.logprobs is None or not choice.logprobs.content:
        raise ConfigError(f"{url} tells no log probabilities for {model}, by which answers are judged")
    chosen = tuple(each.logprob for each in choice.logprobs.content)
    text = choice.message.content or ""
    return Answer(place, server.identity(model), question.key, max_tokens, text, completion.usage.prompt_tokens, chosen)
