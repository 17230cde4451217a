import pytest

from penstock.router.completions.best_choices import mean_logprob, select_best
from penstock.router.completions.formats import FinishedChoice
from penstock.wire.frames import TokenLogprobs
from tests.unit.router.http_fakes import Script, running_gateway


def choice(index: int, *logprobs: float) -> FinishedChoice:
    return FinishedChoice(index, text=str(index), logprobs=[TokenLogprobs(value) for value in logprobs])


def test_the_best_of_each_prompt_are_returned_and_numbered_anew() -> None:
    choices = [
        choice(0, -2.0),
        choice(1, -1.0),
        choice(2, -3.0, 0.5),
        choice(3, -1.0),
        choice(4, -5.0),
        choice(5, -0.5),
    ]

    best = list(select_best(choices, num_generated=3, num_returned=2))

    assert [(each.index, each.text) for each in best] == [(0, "1"), (1, "2"), (2, "5"), (3, "3")]


def test_of_equals_the_first_is_the_better_and_one_without_log_probabilities_the_worst() -> None:
    choices = [choice(0), choice(1, -1.0), choice(2, -0.5, -1.5)]

    assert [each.text for each in select_best(choices, 3, 3)] == ["1", "2", "0"]
    assert mean_logprob(choices[0]) == float("-inf")


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_more_answers_are_generated_and_charged_than_are_returned(logprobs: int | None) -> None:
    async with running_gateway(Script("abc")) as world:
        response = await world.complete(prompt=["x", "yz"], n=2, best_of=4, logprobs=logprobs)

        answer = response.json()
        assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
        assert {each["text"] for each in answer["choices"]} == {"abc"}
        assert [each["logprobs"] is None for each in answer["choices"]] == [logprobs is None] * 4
        assert len(world.dispatcher.generations) == 8
        assert {each.sampling.logprobs for each in world.dispatcher.generations} == {logprobs or 0}
        assert len({each.sampling.seed for each in world.dispatcher.generations}) == 4  # the same for both prompts
        assert answer["usage"]["completion_tokens"] == 8 * 3


async def test_as_many_as_are_returned_are_an_ordinary_request() -> None:
    async with running_gateway(Script("abc")) as world:
        response = await world.complete(prompt="x", n=2, best_of=2, stream=True)

        assert response.status_code == 200
        assert {each.sampling.logprobs for each in world.dispatcher.generations} == {None}
