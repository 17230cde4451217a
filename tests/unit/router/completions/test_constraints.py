"""What a request wants its answer to be, from the fields of OpenAI's and vLLM's clients."""

import json
from typing import Any

import msgspec
import pytest

from penstock.router.completions.constraints import ConstraintChecker, Wanted, find_constraint, with_calls
from penstock.router.completions.fair_threads import FairThreads
from penstock.text.grammar import MAX_BYTES, find_error
from penstock.text.tools.forms import ToolForm
from penstock.text.tools.parser import CallFormat
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint
from penstock.wire.openai import MAX_GUIDED_CHOICES
from penstock.wire.support import check
from penstock.wire.tools import NO_PARAMETERS, Function, RequestedTools
from tests.unit.router.http_fakes import byte_tokenizer

SCHEMA = '{"type": "object", "properties": {"z": {}, "a": {}}}'
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": json.loads(SCHEMA)}}


def wanted(**fields: Any) -> Wanted | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    request = decode_chat(json.dumps(body).encode())
    check(request)
    return find_constraint(request)


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}', "response_format"),
        ({"response_format": JSON_FORMAT}, "json_schema", SCHEMA, "response_format.json_schema.schema"),
        ({"guided_json": json.loads(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_choice": ["a", "é"]}, "choice", '["a","é"]', "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"', "guided_grammar"),
        ({"structured_outputs": {"json": json.loads(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            '{"type":"object"}',
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A", "structured_outputs.grammar"),
    ],
)
def test_each_field_becomes_its_constraint(fields: dict[str, Any], kind: str, text: str, param: str) -> None:
    assert wanted(**fields) == Wanted(Constraint(kind, text), param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "structured_outputs": None},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"response_format": {"type": "text", "colour": 1}},
    ],
)
def test_a_request_that_wants_nothing_has_no_constraint(fields: dict[str, Any]) -> None:
    assert wanted(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, None),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "text", "json_shema": 1}}, "response_format.json_shema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strct": True}}},
            "response_format.json_schema.strct",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * (MAX_GUIDED_CHOICES + 1)}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_BYTES + 1)}, "guided_regex"),
        ({"guided_regex": "\ud800"}, None),
        ({"guided_choice": ["\ud800"]}, None),
        ({"guided_json": {"a": "b" * (2 * MAX_BYTES)}}, "guided_json"),
        ({"guided_json": {"a": "b" * (MAX_BYTES + 1)}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
def test_a_malformed_wish_is_refused_with_its_parameter(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wanted(**fields)

    assert param is None or caught.value.param == param


def test_legacy_completions_take_the_same_fields() -> None:
    request = decode_completion(b'{"model": "m", "prompt": "p", "response_format": {"type": "json_object"}}')

    check(request)
    found = find_constraint(request)

    assert found is not None
    assert found.constraint.kind == "json_schema"


async def test_a_good_constraint_is_checked_once_for_each_tenant() -> None:
    threads = CountingThreads()
    checker = ConstraintChecker(threads)
    good = Wanted(Constraint("regex", "a+"), "guided_regex")

    for tenant in ("a", "a", "b", "a"):
        await checker.check(good, tenant)

    assert threads.tenants == ["a", "b"]


async def test_what_can_not_be_enforced_is_refused_each_time_with_its_parameter() -> None:
    threads = CountingThreads()
    checker = ConstraintChecker(threads)
    bad = Wanted(Constraint("json_schema", '{"uniqueItems": true}'), "response_format.json_schema.schema")

    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"response_format\.json_schema\.schema.*uniqueItems") as caught:
            await checker.check(bad, "a")
        assert caught.value.param == bad.param
    assert threads.tenants == ["a", "a"]


async def test_the_memory_of_good_constraints_is_bounded() -> None:
    threads = CountingThreads()
    checker = ConstraintChecker(threads, max_checked=2)
    first, second, third = (Wanted(Constraint("regex", letter), "p") for letter in "abc")

    for each in (first, second, first, third, first, second):
        await checker.check(each, "t")

    assert len(threads.tenants) == 4  # the second was forgotten for the third, being used longest ago


async def test_the_check_can_be_another_one() -> None:
    checker = ConstraintChecker(find=lambda constraint: f"{constraint.text} is too much.")

    with pytest.raises(InvalidRequest, match="aa is too much"):
        await checker.check(Wanted(Constraint("regex", "aa"), "guided_regex"), "a")


class CountingThreads(FairThreads):
    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[str] = []

    async def run(self, tenant: str, cost: int, work: Any) -> Any:
        self.tenants.append(tenant)
        assert cost > 0
        return await super().run(tenant, cost, work)


def test_a_wish_holds_nothing_of_the_body() -> None:
    """The body, which may be megabytes, can go."""
    found = wanted(guided_json=json.loads(SCHEMA))

    assert found is not None
    assert type(found.constraint.text) is str
    assert msgspec.json.decode(found.constraint.text) == json.loads(SCHEMA)


@pytest.mark.parametrize("call_format", ["hermes", "llama3", "mistral"])
def test_a_schema_beside_tools_is_joined_with_calls_where_these_can_be_told_from_json(call_format: CallFormat) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.tool_form = ToolForm(call_format, is_in_template=True)
    tools = RequestedTools((Function("f", None, NO_PARAMETERS),))
    schema = Wanted(Constraint("json_schema", '{"type": "null"}'), "response_format")

    if call_format == "llama3":
        with pytest.raises(InvalidRequest, match="whose calls are JSON too"):
            with_calls(schema, tools, tokenizer)
    else:
        joined = with_calls(schema, tools, tokenizer)
        assert joined is not None
        assert find_error(joined.constraint) is None
    assert with_calls(None, tools, tokenizer) is None
