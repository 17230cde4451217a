from typing import Any

import pytest

from penstock.router.completions import prediction
from penstock.wire.frames import unpack_token_ids
from tests.unit.router.http_fakes import IM_START, running_gateway


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Paris.", [*b"Paris."]),
        ([{"type": "text", "text": "Pa"}, {"type": "text", "text": "ris."}], [*b"Paris."]),
        ("<|im_start|>", [IM_START]),
        ("", []),
    ],
)
async def test_a_prediction_is_sent_as_token_ids_and_changes_nothing_of_the_answer(
    content: Any, expected: list[int]
) -> None:
    async with running_gateway() as world:
        response = await world.chat(prediction={"type": "content", "content": content}, n=2)
        plain = await world.chat(n=2)

        assert response.json()["choices"] == plain.json()["choices"]
        assert "x-penstock-ignored-fields" not in response.headers
        first, second, *others = world.dispatcher.generations
        assert unpack_token_ids(first.prediction) == unpack_token_ids(second.prediction) == expected
        assert {other.prediction for other in others} == {b""}


async def test_of_a_long_prediction_the_beginning_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "MAX_TOKENS", 5)
    async with running_gateway() as world:
        await world.chat(prediction={"type": "content", "content": "Paris. " * 2000})

        assert unpack_token_ids(world.dispatcher.generations[0].prediction) == [*b"Paris"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "other", "content": "x"},
        {"content": "x"},
        "x",
    ],
)
async def test_what_is_no_prediction_is_refused(wrong: Any) -> None:
    async with running_gateway() as world:
        response = await world.chat(prediction=wrong)

        assert response.status_code == 400
        assert (response.json()["error"]["param"] or "prediction").startswith("prediction")
        assert world.dispatcher.generations == []
