import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from penstock.router.completions import prediction
from penstock.router.completions.fair_threads import FairThreads
from penstock.router.completions.prompts import Reader
from penstock.wire.bodies import decode_chat
from penstock.wire.frames import unpack_token_ids
from tests.unit.router.http_fakes import IM_START, Script, byte_tokenizer, running_gateway


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


async def test_a_prediction_ends_where_a_token_comes_that_the_model_can_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "num_embedded", IM_START)
    content = {"type": "content", "content": "Paris<|im_start|>."}
    body = {"model": "m", "messages": [{"role": "user", "content": "Where?"}], "prediction": content}

    packed = await prediction.read_prediction(
        decode_chat(json.dumps(body).encode()), Reader(tokenizer, None, FairThreads(), "t")
    )

    assert unpack_token_ids(packed) == [*b"Paris"]


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


def details(accepted: int, rejected: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


@pytest.mark.parametrize(
    ("deltas", "fields"),
    [
        (None, {}),
        ([[*b"Par"], [*b"is."]], {}),
        (None, {"stop": ["!"]}),  # each token by the reader
        (None, {"logprobs": True}),
    ],
)
async def test_usage_says_how_much_of_the_prediction_stands_in_the_answer(
    deltas: list[list[int]] | None, fields: dict[str, Any]
) -> None:
    body = {"prediction": {"type": "content", "content": "Paris, of course"}, "n": 2, **fields}
    script = Script(deltas=deltas)
    expected = details(2 * len("Paris"), 2 * len(", of course"))
    async with running_gateway(script) as world:
        whole = await world.chat(**body)
        streamed = await world.chat(**body, stream=True, stream_options={"include_usage": True})
        *_, last, _ = [line for line in streamed.text.split("\n\n") if line]

        assert whole.json()["usage"]["completion_tokens_details"] == expected
        assert json.loads(last.removeprefix("data: "))["usage"] == whole.json()["usage"]
        usage = ChatCompletion.model_validate(whole.json()).usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.accepted_prediction_tokens == 10
        assert whole.json()["usage"]["completion_tokens"] == 2 * len("Paris.")


async def test_what_a_stop_string_cuts_off_is_not_in_the_answer() -> None:
    async with running_gateway(Script(deltas=[[*b"Paris."]])) as world:
        response = await world.chat(prediction={"type": "content", "content": "Paris."}, stop=["r"])

        assert response.json()["usage"]["completion_tokens"] == 3
        assert response.json()["usage"]["completion_tokens_details"] == details(3, 3)


async def test_with_continuous_usage_each_chunk_has_the_counts_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_gateway(Script("abc")) as world:
        response = await world.chat(
            prediction={"type": "content", "content": "abc"}, stream=True, stream_options=options
        )
        *data, _ = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]

        counts = [json.loads(item)["usage"]["completion_tokens_details"] for item in data]
        assert counts == [details(1, 2), details(2, 1), *[details(3, 0)] * 3]


async def test_without_a_prediction_usage_is_as_before() -> None:
    async with running_gateway() as world:
        response = await world.chat()

        assert set(response.json()["usage"]) == {
            "prompt_tokens",
            "completion_tokens",
            "total_tokens",
            "prompt_tokens_details",
        }
