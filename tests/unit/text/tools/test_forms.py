import pytest

from penstock.text.tools.forms import OWN_FORM, ToolForm, ToolParserName, choose_form

QWEN = "{%- if tools %}<tools>{{ tools | tojson }}</tools> within <tool_call></tool_call>{%- endif %}"
QWEN_CODER = "{%- if tools %}<tool_call>\n<function=example>\n<parameter=a>{%- endif %}"
LLAMA = """<|start_header_id|>{%- if tools %}{{ '{"name": "' + name + '", "parameters": ' }}{%- endif %}"""
MISTRAL = "{%- if tools %}[AVAILABLE_TOOLS]{%- endif %}[TOOL_CALLS][{{ calls }}]"
MISTRAL_V13 = "{%- if tools %}[AVAILABLE_TOOLS]{%- endif %}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}"
GRANITE = "{%- if tools %}<|tool_call|>{%- endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, ToolForm("hermes", is_in_template=True)),
        (LLAMA, ToolForm("llama3", is_in_template=True)),
        ("<|python_tag|>", ToolForm("llama3", is_in_template=True)),
        (MISTRAL, ToolForm("mistral", is_in_template=True)),
        (MISTRAL_V13, ToolForm("mistral", is_in_template=True, has_args_marker=True)),
        (QWEN_CODER, OWN_FORM),
        (GRANITE, OWN_FORM),
        ("{{ messages }}", OWN_FORM),
    ],
)
def test_the_form_is_the_one_that_the_template_writes_calls_in(template: str, expected: ToolForm) -> None:
    assert choose_form(template, renders_tools=True) == expected


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_a_template_that_shows_no_tools_has_our_form(template: str) -> None:
    assert choose_form(template, renders_tools=False) == OWN_FORM


@pytest.mark.parametrize(
    ("parser", "expected"),
    [
        ("text", OWN_FORM),
        ("hermes", ToolForm("hermes", is_in_template=True)),
        ("llama3", ToolForm("llama3", is_in_template=True)),
        ("mistral", ToolForm("mistral", is_in_template=True)),
    ],
)
def test_a_pools_setting_goes_before_what_the_template_says(parser: ToolParserName, expected: ToolForm) -> None:
    assert choose_form(GRANITE, True, parser) == expected


def test_templates_that_refuse_more_are_known() -> None:
    assert choose_form(MISTRAL, True).has_short_ids
    assert choose_form(LLAMA, True).has_single_calls
    assert not OWN_FORM.has_short_ids
    assert not OWN_FORM.has_single_calls
