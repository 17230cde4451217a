import time

import pytest

from penstock.wire.errors import InvalidRequest
from penstock.wire.template_kwargs import MAX_CHARS, MAX_DEPTH, MAX_NAME_CHARS, RESERVED, check_template_kwargs


def nested(depth: int) -> object:
    value: object = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False, "thinking_budget": 100, "date_string": "26 Jul 2026", "x": None, "y": 1.5},
        {"a": nested(MAX_DEPTH - 1)},
        {"a": "x" * (MAX_CHARS - 10)},
    ],
)
def test_small_flat_variables_are_taken(variables: dict[str, object]) -> None:
    check_template_kwargs(variables)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_what_the_gateway_or_the_template_puts_there_cant_be_set(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"can't set '{name}'") as caught:
        check_template_kwargs({"fine": 1, name: "x"})

    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"a": nested(MAX_DEPTH + 1)}, f"nested more than {MAX_DEPTH} levels deep"),
        ({"a": nested(200)}, "nested more than"),
        ({"a": "x" * (MAX_CHARS + 1)}, f"holds more than {MAX_CHARS} characters"),
        ({"a": [1] * (MAX_CHARS + 1)}, "holds more than"),
        ({"a": {f"{number}": 1 for number in range(MAX_CHARS)}}, "holds more than"),
        ({f"a{number}": "x" * 1000 for number in range(20)}, "holds more than"),
        ({"a b": 1}, "holds 'a b'"),
        ({"é": 1}, "holds 'é'"),
        ({"__class__": 1}, "holds '__class__'"),
        ({"x" * (MAX_NAME_CHARS + 1): 1}, "a variable is a name of at most"),
        ({"": 1}, "a variable is a name"),
    ],
)
def test_what_is_too_much_too_deep_or_no_name_is_refused(variables: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_template_kwargs(variables)

    assert words in caught.value.message
    assert len(caught.value.message) < 300


def test_a_large_value_costs_no_more_than_what_is_taken() -> None:
    large = {"a": [[1] * 100] * 100_000}
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="holds more than"):
        check_template_kwargs(large)

    assert time.process_time() - began < 0.1
