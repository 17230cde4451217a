"""Beam searches over HTTP: one sequence, whose answers are the choices."""

from typing import Any

import pytest

from penstock.tenancy.tenants import Limits, Settings
from tests.unit.router.http_fakes import Script, World, running_gateway


async def choices_of(world: World, **body: object) -> list[Any]:
    response = await world.complete(use_beam_search=True, **body)
    assert response.status_code == 200, response.text
    found: list[Any] = response.json()["choices"]
    return found


async def test_the_answers_of_a_search_are_the_choices() -> None:
    async with running_gateway(Script("ab")) as world:
        choices = await choices_of(world, prompt=["x", "y"], n=2, best_of=3, max_tokens=5, length_penalty=0.5)

        assert [(each["index"], each["text"]) for each in choices] == [(0, "ab0"), (1, "ab1"), (2, "ab0"), (3, "ab1")]
        assert {each["finish_reason"] for each in choices} == {"length"}
        assert len(world.dispatcher.generations) == 2
        sampling = world.dispatcher.generations[0].sampling
        assert (sampling.num_beams, sampling.num_returned, sampling.length_penalty) == (3, 2, 0.5)
        assert world.dispatcher.num_open == 0


async def test_usage_counts_the_tokens_of_all_beams() -> None:
    async with running_gateway(Script("ab")) as world:
        response = await world.complete(prompt="xyz", use_beam_search=True, n=2, best_of=4, max_tokens=5)

        assert response.json()["usage"]["completion_tokens"] == 4 * 3
        assert response.json()["usage"]["prompt_tokens"] == 3


async def test_an_answer_of_a_search_is_cut_at_a_stop_string_and_shows_what_is_wanted() -> None:
    async with running_gateway(Script("ab")) as world:
        [choice] = await choices_of(world, prompt="xyz", stop="b", echo=True, logprobs=1)

        assert (choice["text"], choice["finish_reason"]) == ("xyza", "stop")
        assert choice["logprobs"]["tokens"] == ["x", "y", "z", "a", "b"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"best_of": 17}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"stop_token_ids": [*range(9)]}, "stop_token_ids"),
        ({"temperature": 0.5}, "temperature"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
    ],
)
async def test_what_a_search_does_not_go_with_is_refused(fields: dict[str, Any], param: str) -> None:
    async with running_gateway() as world:
        response = await world.complete(use_beam_search=True, **fields)

        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert world.dispatcher.generations == []


async def test_values_that_change_no_score_are_accepted() -> None:
    async with running_gateway(Script("ab")) as world:
        assert await choices_of(world, temperature=0, top_p=1, top_k=-1, bad_words=[], presence_penalty=0)
        assert await choices_of(world, response_format={"type": "text"})
        assert await choices_of(world, stop_token_ids=[*range(8)])
        plain = await world.complete(use_beam_search=False, length_penalty=2)

        assert plain.status_code == 200
        assert world.dispatcher.generations[-1].sampling.num_beams == 0


async def test_a_search_needs_limits_for_all_its_beams() -> None:
    limited = Settings(limits=Limits(max_parallel=2))
    async with running_gateway(Script("ab"), settings=limited, num_gateways=1) as world:
        refused = await world.complete(use_beam_search=True, best_of=3)

        assert refused.status_code == 400
        assert "3 sequences" in refused.json()["error"]["message"]
