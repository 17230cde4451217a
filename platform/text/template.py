"""A model's chat template, rendered as transformers renders it: the same Jinja settings, filters and globals, in a
sandbox.

The template comes with the checkpoint, which the operator chose; messages come from anyone. So the sandbox forbids what
a template has no business with, and the size of the result is bounded, but a template that loops for minutes is the
operator's own.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.base.errors import ConfigError
from penstock.wire.errors import InvalidRequest

MAX_RENDERED_CHARS = 32 * 2**20
_PROBE_NAME = "shown_to_the_model"
_PROBE: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": _PROBE_NAME,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": ""}},
                "required": [],
            },
        },
    }
]
"""A tool, to see whether a template shows it."""
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template raises on messages it was not made for: it is a program."""


class ChatTemplate:
    """The compiled template of one model. source: the Jinja text. special_tokens: bos_token and so on, which templates
    refer to. Raises ConfigError when it does not compile."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template shows tools: it renders the name of one that it is given, and not without it."""
        chat = [{"role": "user", "content": "x"}]
        try:
            return _PROBE_NAME in self.render(chat, {"tools": _PROBE}) and _PROBE_NAME not in self.render(chat, {})
        except InvalidRequest:
            return False

    def render(self, messages: object, options: object) -> str:
        """The conversation as text, up to where the assistant's answer begins. InvalidRequest, with the template's own
        message, when it refuses.

        messages: a list of mappings; options: a mapping of further variables, which may override the defaults (tools,
        documents, add_generation_prompt).
        """
        variables: dict[str, object] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        if isinstance(options, Mapping):
            variables |= options
        variables["messages"] = messages
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidRequest(
                        f"the chat template makes more than {MAX_RENDERED_CHARS} characters of these messages",
                        param="messages",
                    )
        except _FAILURES as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return "".join(parts)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; here only its body matters."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
