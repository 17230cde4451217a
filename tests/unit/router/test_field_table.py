"""Every row of the table of fields, made from the table: an honoured field changes what it says, a harmless one is
accepted and named, a refused one gets a 400 unless it asks for nothing, and a near miss of what matters is refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock.router.config import GatewayConfig
from penstock.router.models.served_model import ServedModel
from penstock.tenancy.tenants import tenant_of
from penstock.wire.anthropic import (
    BlockIn,
    CountTokensRequest,
    MessageIn,
    MessagesRequest,
    OutputConfig,
    OutputFormat,
    TextPart,
    ToolChoiceIn,
    ToolIn,
)
from penstock.wire.fields import HARMLESS, REFUSED, TABLE, matters
from penstock.wire.frames import Constraint, SamplingParams, pack_token_ids, unpack_token_ids
from penstock.wire.openai import (
    ChatMessageIn,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCallIn,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolCallIn,
    ToolDefinition,
)
from penstock.wire.responses import (
    InputItem,
    InputPart,
    ReasoningConfig,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
    TextForm,
)
from penstock.wire.tokenization import DetokenizeRequest, TokenizeRequest
from tests.unit.router.http_fakes import (
    CONTEXT,
    IM_END,
    IM_START,
    MODEL,
    SECRET,
    Script,
    World,
    byte_tokenizer,
    events,
    running_gateway,
)

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CHOICE = {"type": "function", "function": {"name": "get_weather"}}
CALLED = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
CALL = {"id": "a", "type": "function", "function": CALLED}
ENDPOINTS = (ChatRequest, CompletionRequest)
TEXT = "One. Two."
IDS = [*b"One.", IM_START, *b" Two.", IM_END]
TEMPLATE = (
    "{{ greeting }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    "{% if thinks %}<think>{% elif thinks is defined %}<think></think>{% endif %}"
)
SERVED = ServedModel(
    MODEL,
    ("pool-a",),
    byte_tokenizer(template=TEMPLATE, prefix_ids=(IM_START,)),
    lambda: 4 * CONTEXT,  # room for tools
    "0123456789abcdef",
)
SALT = tenant_of(SECRET, "tenant-1").salt
"""Salt of the tenant, whose blocks are shared among all its requests."""


class Seen(NamedTuple):
    """What one request led to."""

    answer: Any
    """JSON of the answer; of a stream the list of its chunks."""
    prompts: list[list[int]]
    sampling: SamplingParams
    salt: bytes
    priority: int
    constraint: Constraint | None
    prediction: bytes

    @property
    def choice(self) -> Any:
        return self.answer["choices"][0]

    @property
    def text(self) -> Any:
        return self.choice["text"] if "text" in self.choice else self.choice["message"]["content"]

    @property
    def prompt(self) -> bytes:
        """The only prompt, special tokens as <."""
        return bytes(ord("<") if token_id >= 256 else token_id for token_id in self.prompts[0])


class Case(NamedTuple):
    """What a field does: with it something has this value, without it another one."""

    fields: dict[str, Any]
    observe: Callable[[Seen], object]
    value: object
    base: dict[str, Any] = {}
    """Further fields, of the request without the field too."""


def constrained(kind: str, text: str, fields: dict[str, Any]) -> Case:
    """A field that asks for an answer of a form."""
    return Case(fields, lambda seen: seen.constraint, Constraint(kind, text))


def sampled(name: str, asked: Any, value: Any = None, **base: Any) -> Case:
    """A field that the sampling parameters have under this name. value: as they have it, None: as it was asked."""
    return Case({name: asked}, lambda seen: getattr(seen.sampling, name), asked if value is None else value, base)


THINKS = {"chat_template_kwargs": {"thinks": True}}
"""Has an answer begin within the thinking, which is then all of it."""


def thinking(seen: Seen) -> list[str]:
    """The thinking in an answer, chunk by chunk."""
    parts = [choice for chunk in seen.answer for choice in chunk["choices"]] if isinstance(seen.answer, list) else []
    told = [part["delta"] for part in parts] or [seen.choice["message"]]
    return [part["reasoning_content"] for part in told if part.get("reasoning_content")]


SHARED: dict[str, Case] = {
    "stream": Case({"stream": True}, lambda seen: isinstance(seen.answer, list), True),
    "stream_options": Case(
        {"stream_options": {"include_usage": True}},
        lambda seen: seen.answer[-1].get("usage", {}).get("completion_tokens"),
        len(IDS),
        {"stream": True},
    ),
    "max_tokens": sampled("max_tokens", 7),
    "stop": Case({"stop": " Two"}, lambda seen: seen.text, "One."),
    "n": Case({"n": 3}, lambda seen: len(seen.answer["choices"]), 3),
    "temperature": sampled("temperature", 0.5),
    "top_p": sampled("top_p", 0.5),
    "frequency_penalty": sampled("frequency_penalty", 0.5),
    "presence_penalty": sampled("presence_penalty", 0.5),
    "logit_bias": sampled("logit_bias", {"5": 1.5}, ((5, 1.5),)),
    "seed": sampled("seed", 5),
    "top_k": sampled("top_k", 5),
    "min_p": sampled("min_p", 0.5),
    "repetition_penalty": sampled("repetition_penalty", 1.5),
    "stop_token_ids": sampled("stop_token_ids", [5], (5,)),
    "ignore_eos": sampled("ignore_eos", True),
    "min_tokens": sampled("min_tokens", 3),
    "return_token_ids": Case({"return_token_ids": True}, lambda seen: seen.choice.get("token_ids"), IDS),
    "skip_special_tokens": Case({"skip_special_tokens": False}, lambda seen: seen.text, "One.<|im_start|> Two."),
    "include_stop_str_in_output": Case(
        {"include_stop_str_in_output": True}, lambda seen: seen.text, "One. Tw", {"stop": ["Tw", "zz"]}
    ),
    "truncate_prompt_tokens": Case({"truncate_prompt_tokens": 2}, lambda seen: len(seen.prompts[0]), 2),
    "truncation_side": Case(
        {"truncation_side": "right"},
        lambda seen: seen.prompt[:2] in (b"<u", b"<H"),
        True,
        {"truncate_prompt_tokens": 2},
    ),
    "cache_salt": Case({"cache_salt": "s"}, lambda seen: seen.salt == SALT, False),
    "prompt_logprobs": sampled("prompt_logprobs", 2),
    "allowed_token_ids": sampled("allowed_token_ids", [5, 6], pack_token_ids([5, 6])),
    "bad_words": sampled("bad_words", ["Hi"], ((72, 105),)),
    "priority": Case({"priority": -5}, lambda seen: seen.priority, -5),
    "response_format": constrained("json_schema", '{"type":"object"}', {"response_format": {"type": "json_object"}}),
    "structured_outputs": constrained("regex", "a+", {"structured_outputs": {"regex": "a+"}}),
    "guided_json": constrained("json_schema", '{"type":"null"}', {"guided_json": {"type": "null"}}),
    "guided_regex": constrained("regex", "a+", {"guided_regex": "a+"}),
    "guided_choice": constrained("choice", '["a","b"]', {"guided_choice": ["a", "b"]}),
    "guided_grammar": constrained("grammar", 'start: "a"', {"guided_grammar": 'start: "a"'}),
}
CHAT: dict[str, Case] = SHARED | {
    "add_generation_prompt": Case({"add_generation_prompt": False}, lambda seen: seen.prompt, b"<user\nHi<\n"),
    "continue_final_message": Case({"continue_final_message": True}, lambda seen: seen.prompt, b"<user\nHi"),
    "chat_template_kwargs": Case(
        {"chat_template_kwargs": {"greeting": "Yo"}}, lambda seen: seen.prompt, b"Yo<user\nHi<\n<assistant"
    ),
    "messages": Case({"messages": [USER, USER]}, lambda seen: seen.prompts[0].count(IM_START), 3),
    "tools": Case({"tools": [TOOL]}, lambda seen: b"get_weather" in seen.prompt, True),
    "tool_choice": Case({"tool_choice": "none"}, lambda seen: b"get_weather" in seen.prompt, False, {"tools": [TOOL]}),
    "parallel_tool_calls": Case(
        {"parallel_tool_calls": False}, lambda seen: b"call one function" in seen.prompt, True, {"tools": [TOOL]}
    ),
    "max_completion_tokens": Case({"max_completion_tokens": 7}, lambda seen: seen.sampling.max_tokens, 7),
    "logprobs": sampled("logprobs", True, 0),
    "echo": Case(
        {"echo": True},
        lambda seen: seen.text,
        "So" + TEXT,
        {"messages": [USER, {"role": "assistant", "content": "So"}], "continue_final_message": True},
    ),
    "prediction": Case(
        {"prediction": {"type": "content", "content": "Hi"}}, lambda seen: seen.prediction, pack_token_ids([*b"Hi"])
    ),
    "include_reasoning": Case({"include_reasoning": False}, thinking, [], THINKS),
    "separate_reasoning": Case({"separate_reasoning": False}, thinking, [], THINKS),
    "stream_reasoning": Case({"stream_reasoning": False}, thinking, [TEXT], {**THINKS, "stream": True}),
    "top_logprobs": Case({"top_logprobs": 2}, lambda seen: seen.sampling.logprobs, 2, {"logprobs": True}),
}
COMPLETION: dict[str, Case] = SHARED | {
    "use_beam_search": Case({"use_beam_search": True}, lambda seen: seen.sampling.num_beams, 3, {"n": 3}),
    "length_penalty": sampled("length_penalty", 2.0, use_beam_search=True),
    "best_of": Case({"best_of": 3}, lambda seen: len(seen.prompts), 3),
    "add_special_tokens": Case({"add_special_tokens": False}, lambda seen: seen.prompt, b"Hi"),
    "echo": Case({"echo": True}, lambda seen: seen.text, "Hi" + TEXT),
    "prompt": Case({"prompt": [1, 2]}, lambda seen: seen.prompts, [[1, 2]]),
    "logprobs": sampled("logprobs", 2),
}
PATHS = {
    CompletionRequest: "/v1/completions",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
    **dict.fromkeys((CountTokensRequest, TextPart), "/v1/messages/count_tokens"),
    **dict.fromkeys(
        (MessagesRequest, MessageIn, BlockIn, ToolIn, ToolChoiceIn, OutputConfig, OutputFormat), "/v1/messages"
    ),
    **dict.fromkeys(
        (
            ResponsesRequest,
            InputItem,
            InputPart,
            ResponseTool,
            ResponseToolChoice,
            TextConfig,
            TextForm,
            ReasoningConfig,
        ),
        "/v1/responses",
    ),
}
CASES: dict[type, dict[str, Case]] = {ChatRequest: CHAT, CompletionRequest: COMPLETION}
UNANSWERED = (TokenizeRequest, CountTokensRequest, TextPart)
"""Structs of requests that read a prompt and answer nothing to it."""
ROWS = [(struct, name) for struct in ENDPOINTS for name in CASES[struct]]


def honoured(struct: type) -> set[str]:
    return {name for name, row in TABLE[struct].items() if row.verdict == "honoured"}


def body(struct: type, fields: dict[str, Any]) -> dict[str, Any]:
    """A request of that endpoint. Fields of what is in a request stand where they belong."""
    inner: dict[type, dict[str, Any]] = {
        ChatMessageIn: {"messages": [{**USER, **fields}]},
        ContentPart: {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **fields}]}]},
        StreamOptions: {"stream": True, "stream_options": fields},
        ToolDefinition: {"tools": [{**TOOL, **fields}]},
        FunctionDefinition: {"tools": [{**TOOL, "function": {**FUNCTION, **fields}}]},
        NamedToolChoice: {"tools": [TOOL], "tool_choice": {**CHOICE, **fields}},
        FunctionName: {"tools": [TOOL], "tool_choice": {**CHOICE, "function": {"name": "get_weather", **fields}}},
        ToolCallIn: {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, **fields}]}]},
        FunctionCallIn: {
            "messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALLED, **fields}}]}]
        },
        Prediction: {"prediction": {"type": "content", "content": "Hi", **fields}},
        ResponseFormat: {"response_format": {"type": "json_object", **fields}},
        JsonSchemaFormat: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "null"}, **fields},
            }
        },
        StructuredOutputs: {"structured_outputs": {"json_object": True, **fields}},
    }
    other = body_of_dialect(struct, fields)
    if other is not None:
        return other
    if struct in inner:
        return {"messages": [USER], **inner[struct]}
    if struct is DetokenizeRequest:
        return {"tokens": [1], **fields}
    needed: dict[str, Any] = {"messages": [USER]} if struct is ChatRequest else {"prompt": "Hi"}
    return needed | fields


def body_of_dialect(struct: type, fields: dict[str, Any]) -> dict[str, Any] | None:
    """A request of one of the other APIs, or None for a struct of none."""
    text = {"type": "text", "text": "Hi"}
    tool = {"name": "get_weather", "input_schema": FUNCTION["parameters"]}
    schema = {"type": "json_schema", "schema": {"type": "null"}}
    messages: dict[type, dict[str, Any]] = {
        MessagesRequest: fields,
        CountTokensRequest: fields,
        MessageIn: {"messages": [{**USER, **fields}]},
        BlockIn: {"messages": [{"role": "user", "content": [{**text, **fields}]}]},
        TextPart: {"system": [{**text, **fields}]},
        ToolIn: {"tools": [{**tool, **fields}]},
        ToolChoiceIn: {"tools": [tool], "tool_choice": {"type": "any", **fields}},
        OutputConfig: {"output_config": {"format": schema, **fields}},
        OutputFormat: {"output_config": {"format": {**schema, **fields}}},
    }
    function = {"type": "function", **FUNCTION}
    form = {**schema, "name": "n"}
    responses: dict[type, dict[str, Any]] = {
        ResponsesRequest: fields,
        InputItem: {"input": [{**USER, **fields}]},
        InputPart: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", **fields}]}]},
        ResponseTool: {"tools": [{**function, **fields}]},
        ResponseToolChoice: {
            "tools": [function],
            "tool_choice": {"type": "function", "name": "get_weather", **fields},
        },
        TextConfig: {"text": {"format": form, **fields}},
        TextForm: {"text": {"format": {**form, **fields}}},
        ReasoningConfig: {"reasoning": fields},
    }
    if struct in responses:
        return {"input": "Hi", **responses[struct]}
    if struct not in messages:
        return None
    needed: dict[str, Any] = {"messages": [USER]}
    if struct not in (CountTokensRequest, TextPart):
        needed["max_tokens"] = 9
    return needed | messages[struct]


async def ask(world: World, struct: type, fields: dict[str, Any]) -> Any:
    return await world.client.post(
        PATHS.get(struct, "/v1/chat/completions"), json={"model": MODEL, **body(struct, fields)}
    )


async def see(struct: type, fields: dict[str, Any]) -> Seen:
    async with running_gateway(Script(deltas=[[each] for each in IDS]), model=SERVED) as world:
        response = await ask(world, struct, fields)

        assert response.status_code == 200, response.text
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        answer = [msgspec.json.decode(event) for event in events(response)[:-1]] if is_stream else response.json()
        generations = world.dispatcher.generations
        return Seen(
            answer,
            [unpack_token_ids(each.packed_token_ids) for each in generations],
            generations[0].sampling,
            generations[0].salt,
            generations[0].priority,
            generations[0].constraint,
            generations[0].prediction,
        )


@pytest.mark.parametrize("struct", ENDPOINTS)
def test_every_honoured_field_has_a_case(struct: type) -> None:
    assert honoured(struct) == {*CASES[struct], "model"}


@pytest.mark.parametrize(("struct", "name"), ROWS)
async def test_an_honoured_field_changes_the_answer_as_said(struct: type, name: str) -> None:
    case = CASES[struct][name]
    with_it, without = await see(struct, {**case.base, **case.fields}), await see(struct, case.base)

    assert case.observe(with_it) == case.value
    assert case.observe(without) != case.value


@pytest.mark.parametrize(
    ("struct", "name"), [(struct, name) for struct in HARMLESS for name in sorted(HARMLESS[struct])]
)
async def test_a_harmless_field_is_accepted_and_named(struct: type, name: str) -> None:
    async with running_gateway(config=GatewayConfig(strict=True), model=SERVED) as world:
        for value in ("x", {"a": [1]}, 5):
            response = await ask(world, struct, {name: value})

            assert response.status_code == 200, response.text
            assert response.headers["x-penstock-ignored-fields"].split(".")[-1] == name


@pytest.mark.parametrize(("struct", "name"), [(struct, name) for struct in REFUSED for name in REFUSED[struct]])
async def test_a_refused_field_gets_a_400_unless_it_asks_for_nothing(struct: type, name: str) -> None:
    refusal = REFUSED[struct][name]
    async with running_gateway(model=SERVED) as world:
        for value in (None, *refusal.accepted):
            assert (await ask(world, struct, {name: value})).status_code == 200
        refused = await ask(world, struct, {name: 77})

        assert refused.status_code == 400
        error = refused.json()["error"]
        place = error["message"].rpartition("'")[0].rpartition("'")[2]
        assert error["message"] == f"{refusal.sentence}; leave out '{place}'."
        assert place.split(".")[-1] == name
        assert error.get("param", place) == place
        num_generations = 0 if struct in UNANSWERED else 1 + len(refusal.accepted)
        assert len(world.dispatcher.generations) == num_generations


@pytest.mark.parametrize(
    ("struct", "name"),
    [(struct, name) for struct in TABLE for name in sorted(matters(struct)) if len(name.replace("_", "")) >= 6],
)
async def test_a_near_miss_of_a_field_that_matters_is_refused(struct: type, name: str) -> None:
    slip = name[:-2] + name[-1]
    if slip in TABLE[struct]:
        pytest.fail(f"{slip} is a field itself: choose another slip")
    async with running_gateway(model=SERVED) as world:
        refused = await ask(world, struct, {slip: 1})

        assert refused.status_code == 400
        assert refused.json()["error"]["message"].endswith(f"; did you mean '{name}'?")
        assert world.dispatcher.generations == []
