"""The grammar of forced calls: as text, against llguidance, and against the parser of the same format."""

import json
from random import Random
from typing import Any

import llguidance
import pytest

from penstock.text.grammar import LIMITS, find_error, grammar_of
from penstock.text.tools.events import CallArguments, CallBegin, CallEnd, Content
from penstock.text.tools.forms import OWN_FORM, ToolForm
from penstock.text.tools.grammar import call_grammar
from penstock.text.tools.parser import ARGS, HERMES_CLOSE, HERMES_OPEN, TOOL_CALLS, ToolParser
from penstock.wire.frames import Constraint
from penstock.wire.tools import NO_PARAMETERS, Function, RequestedTools, ToolChoice

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", 'B"ern']}},
}
WEATHER, NOW = Function("get_weather", "d", CITY), Function("now", None, NO_PARAMETERS)
FORMS = {
    "ours": OWN_FORM,
    "llama3": ToolForm("llama3", is_in_template=True),
    "mistral v3": ToolForm("mistral", is_in_template=True),
    "mistral v13": ToolForm("mistral", is_in_template=True, has_args_marker=True),
}
SPECIAL = {marker: 256 + number for number, marker in enumerate((HERMES_OPEN, HERMES_CLOSE, TOOL_CALLS, ARGS))}
EOS = 260
ANY = ToolChoice(must_call=True)
BLANKS = (9, 13, 32)
ROME = '{"city": "Rome", "days": 3}'


class ByteVocabulary:
    """Every byte is a token, and so is every marker of SPECIAL."""

    eos_token_id, bos_token_id = EOS, None
    tokens = [bytes([byte]) for byte in range(256)] + [marker.encode() for marker in SPECIAL] + [b"<eos>"]
    special_token_ids = [*SPECIAL.values(), EOS]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def matcher(grammar: str) -> Any:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary()))
    found = llguidance.LLMatcher(tokenizer, grammar_of(Constraint("grammar", grammar)), limits=LIMITS)
    assert not found.is_error(), found.get_error()
    return found


def token_ids(answer: str, special: dict[str, int]) -> list[int]:
    found: list[int] = []
    while answer:
        marker = next((marker for marker in special if answer.startswith(marker)), None)
        found += [special[marker]] if marker else answer[0].encode()
        answer = answer[len(marker) if marker else 1 :]
    return found


def accepts(grammar: str, answer: str, special: dict[str, int]) -> bool:
    found = matcher(grammar)
    return bool(found.consume_tokens(token_ids(answer, special))) and bool(found.is_accepting())


def tools(*functions: Function, choice: ToolChoice = ANY, is_parallel: bool = True) -> RequestedTools:
    return RequestedTools(functions, choice, is_parallel)


ANSWERS = {
    "ours": [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>',
    ],
    "llama3": [f'{{"name": "get_weather", "parameters": {ROME}}}', '{"name": "now", "parameters": {}}'],
    "mistral v3": [
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ROME}}}]',
        f'[TOOL_CALLS][{{"name": "now", "arguments": {{}}}}, {{"name": "get_weather", "arguments": {ROME}}}]',
    ],
    "mistral v13": [
        f"[TOOL_CALLS]get_weather[ARGS]{ROME}",
        f"[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{ROME}",
    ],
}


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("name", FORMS)
def test_calls_in_the_familys_format_are_accepted(name: str, special: dict[str, int]) -> None:
    grammar = call_grammar(tools(WEATHER, NOW), FORMS[name], special)

    assert [answer for answer in ANSWERS[name] if not accepts(grammar, answer, special)] == []


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("name", FORMS)
def test_what_the_schema_or_the_format_refuses_is_not_accepted(name: str, special: dict[str, int]) -> None:
    grammar = call_grammar(tools(WEATHER, NOW), FORMS[name], special)
    answer = ANSWERS[name][0]

    for wrong in (
        "",
        "Hello",
        answer[:-1],
        f"{answer}!",
        answer.replace("get_weather", "get_whether"),
        answer.replace("Rome", "Paris"),
        answer.replace("3", "30"),
        answer.replace('"days": 3', '"days": 3, "x": 1'),
        answer.replace(ROME, '{"city": "Rome"}'),
    ):
        assert not accepts(grammar, wrong, special), wrong


@pytest.mark.parametrize("name", FORMS)
def test_the_named_function_is_called_once_and_no_other(name: str) -> None:
    grammar = call_grammar(tools(WEATHER, NOW, choice=ToolChoice(True, "now")), FORMS[name], {})

    only_now = ANSWERS[name][0].replace("get_weather", "now").replace(ROME, "{}")
    assert accepts(grammar, only_now, {})
    assert not accepts(grammar, ANSWERS[name][0], {})
    assert not accepts(grammar, f"{only_now}\n{only_now}", {})
    assert not accepts(grammar, only_now + only_now, {})


@pytest.mark.parametrize("name", FORMS)
def test_where_parallel_calls_are_refused_there_is_one(name: str) -> None:
    several, single = (
        call_grammar(tools(WEATHER, NOW, is_parallel=is_parallel), FORMS[name], {}) for is_parallel in (True, False)
    )

    for answer in ANSWERS[name]:
        is_one = answer.count('"city"') + answer.count("{}") == 1
        assert accepts(several, answer, {})
        assert accepts(single, answer, {}) is is_one


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("name", ["ours", "mistral v3", "mistral v13"])
def test_an_answer_may_be_calls_or_keep_to_a_schema(name: str, special: dict[str, int]) -> None:
    schema = '{"type": "object",\n"properties": {"answer": {"type": "integer"}}, "required": ["answer"]}'
    grammar = call_grammar(tools(WEATHER, NOW, choice=ToolChoice()), FORMS[name], special, schema)

    assert [answer for answer in ANSWERS[name] if not accepts(grammar, answer, special)] == []
    assert accepts(grammar, '{"answer": 5}', special)
    for wrong in ("", "Hello", '{"answer": "5"}', '{"answer": 5}' + ANSWERS[name][0]):
        assert not accepts(grammar, wrong, special), wrong


def test_a_schema_of_arguments_that_can_not_be_enforced_is_told() -> None:
    function = Function("f", None, {"properties": {"a": {"type": "array", "uniqueItems": True}}})
    error = find_error(Constraint("grammar", call_grammar(tools(function), OWN_FORM, {})))

    assert error is not None
    assert "uniqueItems" in error


def test_a_function_without_parameters_gets_none() -> None:
    grammar = call_grammar(tools(NOW), FORMS["llama3"], {})

    assert not accepts(grammar, '{"name": "now", "parameters": {"x": 1}}', {})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", FORMS)
def test_whatever_the_grammar_lets_a_model_write_the_parser_reads_as_calls(name: str, seed: int) -> None:
    random, form = Random(seed), FORMS[name]
    found = matcher(call_grammar(tools(WEATHER, NOW), form, SPECIAL))
    answer: list[int] = []
    while len(answer) < 2000:
        mask = found.compute_bitmask()
        allowed = [token for token in range(EOS + 1) if mask[token // 8] >> token % 8 & 1]
        allowed = [token for token in allowed if token not in BLANKS] or allowed  # white space may go on for ever
        token = EOS if EOS in allowed and random.random() < 0.7 else random.choice(allowed)
        if token == EOS:
            break
        assert found.consume_token(token)
        answer.append(token)
    text = b"".join(ByteVocabulary.tokens[token] for token in answer).decode()

    parser = ToolParser(form.call_format, frozenset({"get_weather", "now"}), holds_calls=True)
    events = parser.push(text) + parser.finish()

    assert not [event for event in events if isinstance(event, Content)]
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert len(names) == len(arguments) == sum(isinstance(event, CallEnd) for event in events) > 0
    for called, given in zip(names, arguments, strict=True):
        assert set(given) == ({"city", "days"} if called == "get_weather" else set())


def test_the_grammar_is_text_that_names_special_tokens_by_their_ids() -> None:
    grammar = call_grammar(tools(NOW, is_parallel=False), FORMS["mistral v13"], {TOOL_CALLS: 9, ARGS: 32})

    assert grammar.splitlines() == [
        "start: calls",
        "calls: call",
        "call: call_0",
        'call_0: <[9]> "now" <[32]> arguments_0',
        'arguments_0: %json {"type": "object", "properties": {}, "additionalProperties": false}',
    ]
