"""`chat_template_kwargs`: variables that a request gives to its model's chat template, and what they may be.

They reach a program of the operator's, so they are few, small and flat, and can't stand for what the gateway itself
puts there: the messages, the tools, special tokens. Special tokens in their texts are plain text (`text.tokenizer`).
"""

from collections.abc import Mapping

from penstock.wire.errors import InvalidRequest

PARAM = "chat_template_kwargs"
MAX_CHARS = 16 * 2**10
"""Characters of all names and texts together; any other value counts as one."""
MAX_DEPTH = 8
MAX_NAME_CHARS = 64
_MESSAGES = frozenset({"messages", "conversation", "chat_template", "tokenize", "continue_final_message"})
_FIELDS = frozenset({"add_generation_prompt", "documents", "tools", "tool_choice"})
_SPECIAL = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "audio", "video")
) | {"additional_special_tokens", "extra_special_tokens"}
_FUNCTIONS = frozenset(
    {"raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop", "self"}
)
RESERVED = _MESSAGES | _FIELDS | _SPECIAL | _FUNCTIONS
"""Names that a request can't set."""


def check_template_kwargs(variables: Mapping[str, object]) -> None:
    """Raises InvalidRequest for a name that can't be set, and for more or deeper values than are taken."""
    for name in variables:
        shown = name[:MAX_NAME_CHARS]
        if name in RESERVED:
            raise InvalidRequest(f"'{PARAM}' can't set '{shown}'.", param=f"{PARAM}.{shown}")
        if len(name) > MAX_NAME_CHARS or not name.isascii() or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                f"'{PARAM}' holds '{shown}'; a variable is a name of at most {MAX_NAME_CHARS} letters, digits and _.",
                param=PARAM,
            )
    if _size(variables, MAX_DEPTH) > MAX_CHARS:
        raise InvalidRequest(f"'{PARAM}' holds more than {MAX_CHARS} characters.", param=PARAM)


def _size(value: object, depth: int) -> int:
    """Characters of a JSON value, or more than MAX_CHARS; looks no further than that."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, dict | list):
        return 1
    if not depth:
        raise InvalidRequest(f"'{PARAM}' is nested more than {MAX_DEPTH} levels deep.", param=PARAM)
    size = 1
    for item in value.items() if isinstance(value, dict) else value:
        size += len(item[0]) + _size(item[1], depth - 1) if isinstance(value, dict) else _size(item, depth - 1)
        if size > MAX_CHARS:
            break
    return size
