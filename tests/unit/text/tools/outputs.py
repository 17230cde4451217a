"""Answers with calls as each family's documentation prints them, and what they mean. None was made by our own writer.

Sources:
* LLAMA: Meta, llama-models, llama3_1/prompt_format.md, "JSON based tool calling" and "Builtin Code Interpreter", and
  llama3_2/text_prompt_format.md; two calls with a semicolon: SGLang's tests of its Llama 3.2 detector.
* HERMES: model cards of Hermes 2 Pro and Hermes 2 Theta ("Prompt Format for Function Calling").
* QWEN: the chat template of Qwen2.5, its documentation (framework/function_call.md), and the documentation of models
  that took its template over, with text before the call.
* MISTRAL: mistral-common 1.12 as rendered by its instruct tokenizers v3, v3-tekken, v11 and v13, and the model card of
  Mistral 7B Instruct v0.3.
"""

from typing import NamedTuple

from penstock.text.tools.parser import CallFormat


class Documented(NamedTuple):
    """An answer without the token that ends it."""

    call_format: CallFormat
    answer: str
    content: str
    calls: list[tuple[str, object]]


WEATHER = [("get_weather", {"city": "Zürich"}), ("get_weather", {"city": "Bern"})]
IS_PRIME = "<|python_tag|>def is_prime(n):\n    if n <= 1\n        return False\n\nprint(is_prime(7))  # Output: True"

DOCUMENTED = {
    "llama tag": Documented(
        "llama3",
        '<|python_tag|>{\n    "type": "function",\n    "name": "trending_songs",\n    "parameters": {\n'
        '        "n": "10",\n        "genre": "all"\n    }\n}',
        "",
        [("trending_songs", {"n": "10", "genre": "all"})],
    ),
    "llama without tag": Documented(
        "llama3",
        '{"name": "get_current_conditions", "parameters": {"location": "San Francisco, CA", "unit": "Fahrenheit"}}',
        "",
        [("get_current_conditions", {"location": "San Francisco, CA", "unit": "Fahrenheit"})],
    ),
    "llama two": Documented(
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}};'
        '{"name": "get_tourist_attractions", "parameters": {"city": "Paris"}}',
        "",
        [("get_weather", {"city": "Paris"}), ("get_tourist_attractions", {"city": "Paris"})],
    ),
    "llama code": Documented("llama3", IS_PRIME, IS_PRIME, []),
    "llama builtin": Documented(
        "llama3",
        '<|python_tag|>wolfram_alpha.call(query="100th decimal of pi")',
        '<|python_tag|>wolfram_alpha.call(query="100th decimal of pi")',
        [],
    ),
    "hermes": Documented(
        "hermes",
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n</tool_call>',
        "",
        [("get_stock_fundamentals", {"symbol": "TSLA"})],
    ),
    "hermes two in one": Documented(
        "hermes",
        '<tool_call>\n{"name": "func1", "arguments": {"a": 1}}\n{"name": "func2", "arguments": {"b": 2}}\n</tool_call>',
        "",
        [("func1", {"a": 1}), ("func2", {"b": 2})],
    ),
    "qwen two": Documented(
        "hermes",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_temperature_date", "arguments": {"location": "San Francisco, CA,'
        ' USA", "date": "2024-10-01"}}\n</tool_call>',
        "",
        [
            ("get_current_temperature", {"location": "San Francisco, CA, USA"}),
            ("get_temperature_date", {"location": "San Francisco, CA, USA", "date": "2024-10-01"}),
        ],
    ),
    "qwen with text": Documented(
        "hermes",
        "为了获取当前天气，我需要调用`get_current_temperature`这个工具。\n\n<tool_call>\n"
        '{"name": "get_current_temperature", "arguments": {"location": "北京"}}\n</tool_call>',
        "为了获取当前天气，我需要调用`get_current_temperature`这个工具。",
        [("get_current_temperature", {"location": "北京"})],
    ),
    "mistral v3": Documented(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": "abcDEF123"}, '
        '{"name": "get_weather", "arguments": {"city": "Bern"}, "id": "xyzXYZ789"}]',
        "",
        WEATHER,
    ),
    "mistral v3 tekken": Documented(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": "abcDEF123"}]',
        "",
        WEATHER[:1],
    ),
    "mistral v11": Documented(
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{"city": "Zürich"}'
        '[TOOL_CALLS]get_weather[CALL_ID]xyzXYZ789[ARGS]{"city": "Bern"}',
        "",
        WEATHER,
    ),
    "mistral v13": Documented(
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "unit": "c"}'
        '[TOOL_CALLS]search[ARGS]{"query": "café \\"best\\"", "filters": {"tags": ["a", "b"], "max": 3}}',
        "",
        [
            ("get_weather", {"city": "Zürich", "unit": "c"}),
            ("search", {"query": 'café "best"', "filters": {"tags": ["a", "b"], "max": 3}}),
        ],
    ),
    "mistral 7b": Documented(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_current_temperature", "arguments": {"location": "Paris, France", "unit":'
        ' "celsius"}, "id": "abcdef123"}]',
        "",
        [("get_current_temperature", {"location": "Paris, France", "unit": "celsius"})],
    ),
}
