import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.batches.lines import (
    BadLine,
    check_not_streamed,
    encode_answer,
    encode_not_run,
    parse_line,
    result_id,
)
from penstock.wire.errors import InvalidRequest

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}


def changed(**fields: object) -> bytes:
    return msgspec.json.encode({name: value for name, value in (GOOD | fields).items() if value != "absent"})


def test_a_line_is_its_name_and_its_body_as_it_was_written() -> None:
    data = b'{"custom_id": "a","method":"POST","url":"/v1/completions","extra":1,"body": {"a" : [1,  2]} }'

    assert parse_line(data, "/v1/completions") == ("a", b'{"a" : [1,  2]}')


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (changed(custom_id=5), "invalid_json_line"),
        (changed(custom_id="absent"), "invalid_custom_id"),
        (changed(custom_id=""), "invalid_custom_id"),
        (changed(custom_id="x" * 513), "invalid_custom_id"),
        (changed(method="GET"), "invalid_method"),
        (changed(url="/v1/chat/completions"), "invalid_url"),
        (changed(url="absent"), "invalid_url"),
        (changed(body="absent"), "invalid_request"),
        (changed(body=[1]), "invalid_request"),
        (changed(body=None), "invalid_request"),
    ],
)
def test_what_is_wrong_with_a_line_has_a_code(data: bytes, code: str) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(data, "/v1/completions")

    assert caught.value.code == code
    assert caught.value.at(7).line == 7


@given(st.text(min_size=20))
def test_no_sentence_repeats_what_the_line_says(text: str) -> None:
    for data in (changed(custom_id=text + "y" * 513), changed(url=text), changed(method=text), text.encode()):
        with pytest.raises(BadLine) as caught:
            parse_line(data, "/v1/completions")

        assert text not in caught.value.message


@pytest.mark.parametrize("body", [b'{"stream":true}', b'{"a":1,"stream":1}'])
def test_a_streamed_line_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="stream"):
        check_not_streamed(body)


def test_a_line_that_is_not_streamed_is_fine() -> None:
    for body in (b"{}", b'{"stream":false}', b'{"stream":null,"a":{"stream":true}}'):
        check_not_streamed(body)


def test_results_have_openais_form_and_one_line_each() -> None:
    answered = encode_answer("batch_0f", 3, "a", 200, "q1", b'{\n "x": "a\\nb"}')
    not_run = encode_not_run("batch_0f", 3, "a", "batch_expired", "Too late.")

    assert b"\n" not in answered
    assert msgspec.json.decode(answered) == {
        "id": "batch_req_0f_3",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "q1", "body": {"x": "a\nb"}},
        "error": None,
    }
    assert msgspec.json.decode(not_run) == {
        "id": result_id("batch_0f", 3),
        "custom_id": "a",
        "response": None,
        "error": {"code": "batch_expired", "message": "Too late."},
    }
