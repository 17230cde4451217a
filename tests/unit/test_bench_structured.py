import json

import httpx
import pytest
from jsonschema import Draft202012Validator

from bench.structured import Answered, check_seconds, read_answer, share_rows, step_rows
from bench.support.constraint_attack import body_of
from bench.support.hostile_constraints import HOSTILE
from bench.support.json_schemas import SchemaTask, make_schemas
from bench.support.mask_timing import StepTimes
from penstock.router.completions.constraints import find_constraint
from penstock.text.grammar import MAX_BYTES, find_error
from penstock.wire.bodies import decode_completion
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint
from tests.real_time import real_time

ASKED = SchemaTask("n", {"type": "integer"}, "a number")


def answer(text: str, finish_reason: str = "stop") -> Answered:
    choice = {"message": {"content": text}, "finish_reason": finish_reason}
    response = httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 3}})
    return read_answer(ASKED, 0, 0.0, response)


def test_there_are_two_hundred_schemas_each_another_one_and_always_the_same() -> None:
    texts = [json.dumps(asked.schema) for asked in make_schemas()]

    assert len(set(texts)) == 200
    assert texts == [json.dumps(asked.schema) for asked in make_schemas()]


def test_the_schemas_have_what_users_have() -> None:
    text = json.dumps([asked.schema for asked in make_schemas()])

    for keyword in ("enum", "const", "$ref", "pattern", "format", "minimum", "exclusiveMaximum", "anyOf", "oneOf"):
        assert f'"{keyword}"' in text
    for keyword in ("prefixItems", "additionalProperties", "maxItems", "minLength"):
        assert f'"{keyword}"' in text


@pytest.mark.parametrize("asked", make_schemas(), ids=lambda asked: asked.name)
def test_every_schema_is_one_and_can_be_enforced(asked: SchemaTask) -> None:
    Draft202012Validator.check_schema(asked.schema)

    assert find_error(Constraint("json_schema", json.dumps(asked.schema))) is None


def test_an_answer_that_does_not_validate_is_counted_and_named() -> None:
    good, wrong, broken, long = answer("5"), answer('"5"'), answer("{"), answer("5", "length")

    rows, notes, is_well = share_rows([good, wrong, broken, long])

    assert [row.ours for row in rows[:3]] == [4, 75.0, pytest.approx(100 / 3)]
    assert not is_well
    assert notes[0] == "unfinished: n"
    assert len(notes) == 3
    assert share_rows([good] * 20 + [long])[2]
    assert not share_rows([good] * 10 + [long])[2]


def test_a_refusal_is_no_answer() -> None:
    refused = read_answer(ASKED, 0, 1.0, httpx.Response(400, json={"error": {"message": "No."}}))

    assert (refused.finish_reason, refused.fault) == ("error", "400 No.")


def test_what_masks_add_is_the_difference_of_steps_that_follow_each_other() -> None:
    times = StepTimes([0.010, 0.020], [0.010, 0.020], [0.011, 0.022], num_late=1, num_answers=2)

    rows = {row.name.partition(": ")[2]: row for row in step_rows("x", times)}

    added = rows["added by a masked row (rival: by none), p99"]
    assert (added.ours, added.rival) == (pytest.approx(2.0), 0.0)
    assert rows["what free rows lose beside a masked one (rival: beside none)"].ours == pytest.approx(100 * 3 / 33)
    assert rows["masked tokens a step late, of 2"].ours == 1


@real_time
def test_the_gateways_check_is_timed_for_each_schema() -> None:
    assert all(0 < seconds < 0.2 for seconds in check_seconds(make_schemas(3)))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_sent_as_it_is(name: str) -> None:
    constraint = HOSTILE[name]
    request = decode_completion(json.dumps(body_of(constraint)).encode())

    if len(constraint.text) > MAX_BYTES:
        with pytest.raises(InvalidRequest, match="longer"):
            find_constraint(request)
    else:
        found = find_constraint(request)
        assert found is not None
        assert found.constraint.kind == constraint.kind
        assert constraint.kind == "choice" or found.constraint == constraint
