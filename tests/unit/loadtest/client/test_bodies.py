"""Bodies as they are sent, and what errors' bodies say."""

import json

import pytest

from penstock_loadtest.client.bodies import (
    OPTIONAL,
    describe_error,
    encode_body,
    find_refused_field,
    has_field,
    remove_fields,
)
from penstock_loadtest.planned import Message, Planned

FULL = Planned(
    index=0, at_s=0.0, prompt='say "seed": 1', system="be brief", max_tokens=8, ignore_eos=True, temperature=0.5, seed=7
)


def fields(body: bytes) -> dict[str, object]:
    found = json.loads(body)
    assert isinstance(found, dict)
    return found


def test_a_chat_has_everything_that_the_plan_asks_for() -> None:
    assert fields(encode_body(FULL, "the model")) == {
        "model": "the model",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": 'say "seed": 1'}],
        "max_tokens": 8,
        "temperature": 0.5,
        "return_token_ids": True,
        "seed": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_plain_request_asks_for_nothing_more() -> None:
    body = fields(
        encode_body(
            Planned(index=0, at_s=0.0, prompt="hello", max_tokens=8, stream=False, model="another"), "the model"
        )
    )

    assert body == {
        "model": "another",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0.0,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("prompt", ["some text", [1, 2, 3]])
def test_completions_send_text_or_token_ids(prompt: str | list[int]) -> None:
    body = fields(encode_body(Planned(index=0, at_s=0.0, endpoint="completions", prompt=prompt, max_tokens=8), "m"))

    assert body["prompt"] == prompt
    assert "messages" not in body


def test_a_later_turn_sends_what_was_said_and_the_system_message_once() -> None:
    history = (Message("system", "be brief"), Message("user", "hello"), Message("assistant", "hi"))

    assert [message["content"] for message in fields(encode_body(FULL, "m", history))["messages"]] == [
        "be brief",
        "hello",
        "hi",
        'say "seed": 1',
    ]  # type: ignore[attr-defined]


def test_a_body_without_a_field_keeps_all_the_others() -> None:
    whole = fields(encode_body(FULL, "m"))

    for name in OPTIONAL:
        assert has_field(encode_body(FULL, "m"), name)
        assert fields(remove_fields(encode_body(FULL, "m"), {name})) == {
            key: value for key, value in whole.items() if key != name
        }
        assert remove_fields(encode_body(FULL, "m"), {name}) == encode_body(FULL, "m", refused={name})
        assert not has_field(encode_body(FULL, "m", refused={name}), name)


def test_a_field_that_only_a_prompt_names_is_not_there() -> None:
    body = encode_body(Planned(index=0, at_s=0.0, prompt='"seed":1', max_tokens=8), "m")

    assert not has_field(body, "seed")
    assert remove_fields(body, {"seed"}) is body


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {
                "error": {
                    "message": "Unrecognized request argument supplied: return_token_ids",
                    "type": "invalid_request_error",
                }
            },
            "return_token_ids",
        ),
        ({"error": {"message": "no.", "param": "ignore_eos"}}, "ignore_eos"),
        ({"error": "Unknown field 'seed'."}, "seed"),
        (
            {"object": "error", "message": "stream_options: extra inputs are not permitted", "code": 400},
            "stream_options",
        ),
        (
            {
                "detail": [
                    {
                        "type": "extra_forbidden",
                        "loc": ["body", "return_token_ids"],
                        "msg": "Extra inputs are not permitted",
                        "input": True,
                    }
                ]
            },
            "return_token_ids",
        ),
        ({"detail": "ignore_eos is not supported"}, "ignore_eos"),
        ({"error": {"message": "The prompt is seeded with nonsense.", "param": "messages"}}, None),
        ({"detail": [{"loc": []}]}, None),
        ({"error": {"message": "Too long.", "param": None, "code": "context_length_exceeded"}}, None),
        ({"error": {"message": 7}}, None),
        ([1], None),
    ],
)
def test_the_field_that_a_server_refuses_is_found_in_the_words_of_many_servers(body: object, field: str | None) -> None:
    assert find_refused_field(json.dumps(body).encode()) == field


@pytest.mark.parametrize("body", [b"", b"<html>seed</html>", b"\xff", b'"\\ud800"'])
def test_what_is_no_error_body_says_nothing(body: bytes) -> None:
    assert find_refused_field(body) is None
    assert describe_error(body) == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            {
                "message": "secret",
                "type": "invalid_request_error",
                "param": "max_tokens",
                "code": "context_length_exceeded",
            },
            "context_length_exceeded (max_tokens)",
        ),
        ({"message": "secret", "type": "BadRequestError", "param": None, "code": 400}, "BadRequestError"),
        ({"message": "secret", "param": "messages"}, "(messages)"),
        ({"message": "secret", "code": "the secret", "type": "secret: it", "param": "se cret"}, ""),
        ({"message": "secret", "code": "x" * 65}, ""),
    ],
)
def test_an_error_is_told_by_what_names_it_never_by_its_words(error: dict[str, object], said: str) -> None:
    assert describe_error(json.dumps({"error": error}).encode()) == said
