"""The form in which a checkpoint is told of tools: by its own chat template, or by a text of ours.

Invariant: the form that the prompt teaches is the one that the answer is parsed by. So a template that shows tools in a
form that no parser here reads is not asked to.
"""

from typing import Literal, NamedTuple

from penstock.text.tools.parser import ARGS, HERMES_OPEN, PYTHON_TAG, TOOL_CALLS, CallFormat

ToolParserName = Literal["auto", "hermes", "llama3", "mistral", "text"]
"""Setting of a pool. auto: as its template says; text: a text of ours whatever its template; else the template shows
tools, and calls come in that format."""


class ToolForm(NamedTuple):
    """How one checkpoint is told of tools, and how it writes calls."""

    call_format: CallFormat
    is_in_template: bool
    """Whether the chat template shows tools, calls and results; else a text of ours does (`prompt`)."""
    has_args_marker: bool = False
    """Whether a Mistral model writes `name[ARGS]{...}`, and not an array."""

    @property
    def has_short_ids(self) -> bool:
        """Whether ids of calls must be nine letters and digits, as Mistral's templates demand."""
        return self.is_in_template and self.call_format == "mistral"

    @property
    def has_single_calls(self) -> bool:
        """Whether a message may have one call at most: Llama 3's templates refuse a second one."""
        return self.is_in_template and self.call_format == "llama3"


OWN_FORM = ToolForm("hermes", is_in_template=False)
"""A text of ours, which teaches the format of Hermes: most models have seen it, whatever their template says."""


def choose_form(template: str, renders_tools: bool, parser: ToolParserName = "auto") -> ToolForm:
    """The form for a checkpoint. template: Jinja source; renders_tools: whether it shows tools."""
    if not renders_tools or parser == "text":
        return OWN_FORM
    call_format = _detect(template) if parser == "auto" else parser
    if call_format is None:
        return OWN_FORM
    return ToolForm(call_format, is_in_template=True, has_args_marker=call_format == "mistral" and ARGS in template)


def _detect(template: str) -> CallFormat | None:
    """The format that a template writes past calls in. Returns None for one that is not known, such as Qwen3-Coder's,
    which has the same opening marker as Hermes' and no JSON behind it."""
    if TOOL_CALLS in template:
        return "mistral"
    if HERMES_OPEN in template:
        return None if "<function=" in template else "hermes"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return "llama3"
    return None
