"""Rendering against transformers, and what happens when a template refuses."""

from datetime import datetime

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from penstock.base.errors import ConfigError
from penstock.text.template import MAX_RENDERED_CHARS, ChatTemplate
from penstock.wire.errors import InvalidRequest

CHAT = [
    {"role": "system", "content": ' Be <b>kind</b> & "brief".\n'},
    {"role": "user", "content": "Ünï 'q' {{ 1 + 1 }} {% raw %}"},
    {
        "role": "assistant",
        "content": "yes",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None, "é<"]}}}],
    },
    {"role": "user", "content": "and?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d<>", "parameters": {"b": 1, "a": 2}}}]
TEMPLATES = {
    "blocks": (
        "{% for m in messages %}\n    {% if m['role'] == 'user' %}\n U:{{ m.content | trim }}\n    {% endif %}\n"
        "{% endfor %}\n{{ bos_token }}"
    ),
    "json": (
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}"
        "|{{ messages[2].tool_calls[0].function.arguments | tojson }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% if loop.last %}{% break %}{% endif %}"
        "{{ m.role }};{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}GO{% endif %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
        "{{ ns.n }}{{ eos_token }}"
    ),
    "undefined": (
        "{{ documents }}{{ nothing }}{% if documents is none %}none{% endif %}{% if nothing is defined %}x{% endif %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    raw = RawTokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    oracle = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    expected = oracle.apply_chat_template(
        CHAT, tools=TOOLS, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )

    assert (
        ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}).render(CHAT, {"tools": TOOLS})
        == expected
    )


def test_the_clock_is_the_one_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 2, 29, 12))

    assert template.render([], {}) == "29 Feb 2024"


def test_options_reach_the_template() -> None:
    assert (
        ChatTemplate("{{ enable_thinking }}{{ add_generation_prompt }}", {}).render(
            [], {"enable_thinking": False, "add_generation_prompt": False}
        )
        == "FalseFalse"
    )


def test_a_refusal_carries_the_templates_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})

    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render([], {})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 'x' }}", "{{ messages[9].content.x.y }}", "{{ 1 // 0 }}", "{{ messages | sum }}"],
)
def test_messages_a_template_was_not_made_for_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        ChatTemplate(source, {}).render([{"role": "user", "content": None}], {})


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([], {})


def test_the_result_is_bounded() -> None:
    source = "{% for i in range(99999) %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}"

    with pytest.raises(InvalidRequest, match=str(MAX_RENDERED_CHARS)):
        ChatTemplate(source, {}).render([{"content": "x" * 10_000}], {})


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}", True),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% if tools %}no tools, please{% endif %}", False),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}", False),
        ("{{ tools }}{{ 'shown_to_the_model' }}", False),
    ],
)
def test_whether_a_template_shows_tools_is_found_by_rendering(source: str, expected: bool) -> None:
    assert ChatTemplate(source, {}).renders_tools is expected
